"""What a rank of the demo writes into its share, and how the others check it, in pieces that leave the loop its turn.

The bytes depend on the rank and on where they stand: a share in the wrong place, an exchanged piece and one that was
never written all differ.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

# Copied in a few dozen microseconds while the interpreter lock is held, and small enough for a core's own cache.
PIECE = 256 << 10

# The largest prime below 256 Ki: the pieces of the first 64 GiB each begin at another place of the pattern.
_PERIOD = 262_139


def share_of(rank: int, processes: int, size: int) -> range:
    """Return the bytes that `rank` writes: one of `processes` contiguous shares of about the same length."""
    return range(size * rank // processes, size * (rank + 1) // processes)


class Pattern:
    """The bytes that one rank writes, as a function of their place."""

    def __init__(self, rank: int) -> None:
        once = hashlib.shake_256(f"aioshm demo, rank {rank}".encode()).digest(_PERIOD)
        self._bytes = once + (once * 2)[:PIECE]

    def at(self, start: int, length: int) -> bytes:
        """Return the `length` bytes, at most a piece, that belong at offset `start`."""
        phase = start % _PERIOD
        return self._bytes[phase : phase + length]


async def write_share(view: memoryview, share: range, pattern: Pattern, on_piece: Callable[[int], None]) -> None:
    """Write `pattern` into `share`; tell `on_piece` how many bytes each piece had. The loop runs between pieces."""
    for start in share[::PIECE]:
        length = min(PIECE, share.stop - start)
        view[start : start + length] = pattern.at(start, length)
        on_piece(length)
        await asyncio.sleep(0)


async def find_wrong_byte(
    view: memoryview, share: range, pattern: Pattern, on_piece: Callable[[int], None]
) -> int | None:
    """Return the offset of the first byte of `share` that is not `pattern`'s; None where all are."""
    for start in share[::PIECE]:
        length = min(PIECE, share.stop - start)
        # As bytes: comparing a memoryview goes byte by byte and would take ten times as long.
        found, right = bytes(view[start : start + length]), pattern.at(start, length)
        if found != right:
            return start + next(index for index in range(length) if found[index] != right[index])
        on_piece(length)
        await asyncio.sleep(0)
    return None
