"""Sizes and times as people write and read them, and the size that a demo may have on this machine."""

from __future__ import annotations

import bitmath
import click

from aioshm._cgroup import own_memory_levels, read_figures
from aioshm._host import read_file_system, read_memory
from aioshm._libc import HUGE_PAGE
from aioshm._preflight import free_bytes, takes_memory
from aioshm._request import check_size

_LARGEST_DEFAULT = 1 << 30


def parse_size(text: str) -> int:
    """Return the bytes that `text` says: `2GiB`, `1.5GB`, `64M` (of 1024), or plain bytes.

    Raises:
        click.BadParameter: It says none, or a number of bytes that no region has.
    """
    try:
        return check_size(_parse(text))
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def _parse(text: str) -> int:
    try:
        try:
            parsed = bitmath.parse_string(text)
        except ValueError:
            # Without `strict` a GB would be taken for a GiB, so this comes second: for "64M", "64m", "67108864".
            parsed = bitmath.parse_string(text, strict=False)
        if isinstance(parsed, bitmath.Bit):
            raise ValueError(text)
        return int(parsed.bytes)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size; write 2GiB, 512MiB or a number of bytes") from None


def in_words(size: int) -> str:
    """Return `size` bytes with the unit that suits, to one decimal: `1 GiB`, `341.3 MiB`, `0 B`."""
    if size < 1024:
        return f"{size} B"
    best = bitmath.Byte(size).best_prefix(system=bitmath.NIST)  # type: ignore[no-untyped-call]  # bitmath's own gap
    return f"{best.value:.1f} {best.unit}".replace(".0 ", " ")


def seconds_in_words(seconds: float) -> str:
    """Return `seconds` as milliseconds up to a second, as seconds above."""
    milliseconds = seconds * 1000
    if milliseconds < 10:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{seconds:.2f} s"


def find_default_size(directory: str) -> int:
    """Return the bytes that a demo in `directory` takes where nobody says: it must be nobody's trouble.

    A directory that cannot be read gets the smallest size; opening the region then says what is wrong with it.
    """
    try:
        file_system = read_file_system(directory)
    except OSError:
        return HUGE_PAGE
    free = free_bytes(file_system)
    limits = [] if free is None else [free]
    if takes_memory(file_system.page):
        limits += [figures.available for figures in read_figures(own_memory_levels())]
        memory = read_memory()
        limits += [memory.available] if memory else []
    return choose_size(limits, max(HUGE_PAGE, file_system.page))


def choose_size(limits: list[int], page: int) -> int:
    """Return a quarter of the smallest of `limits`, in whole pages, at least one; 1 GiB where that is less."""
    wanted = min([_LARGEST_DEFAULT, *(limit // 4 for limit in limits)])
    return max(page, wanted // page * page)
