"""Did all of it hold? Facts that the ranks reported in, findings out; a demo that ends well has only good ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._shares import share_of
from ._sizes import in_words, seconds_in_words


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict.

    Attributes:
        held: Whether it is as it must be; None where it is a figure, to be judged by whoever reads it.
        text: The sentence.
    """

    held: bool | None
    text: str


@dataclass(frozen=True)
class Usage:
    """The directory at three moments.

    Attributes:
        before: Bytes in use before the ranks started; None where the file system does not say.
        during: The same while all ranks had the region open; None where they never had.
        after: The same when all were gone.
        left: Names of this demo that are still there.
    """

    before: int | None
    during: int | None
    after: int | None
    left: Sequence[str]


def judge_race(opened: Sequence[dict[str, Any]]) -> Finding:
    """Exactly one creator, and everybody has the same file mapped."""
    creators = [rank for rank, facts in enumerate(opened) if facts["created"]]
    inodes = {facts["inode"] for facts in opened}
    names = ", ".join(map(str, creators)) or "none"
    held = len(creators) == len(inodes) == 1 and None not in inodes
    if held:
        text = f"One creator, rank {names}; all ranks have the same inode mapped."
    else:
        text = f"Creators: {len(creators)} ({names}), inodes mapped: {len(inodes)}. There must be one of each."
    return Finding(held=held, text=text)


def judge_shares(checked: Sequence[dict[str, Any]], size: int) -> Finding:
    """Every rank found every other rank's share as that one wrote it."""
    wrong = [
        f"rank {rank} found share {other} wrong from byte {offset}"
        for rank, facts in enumerate(checked)
        for other, offset in facts["wrong"].items()
    ]
    if wrong:
        return Finding(held=False, text=f"Not the bytes that were written: {'; '.join(wrong)}.")
    ranks = len(checked)
    share = in_words(len(share_of(0, ranks, size)))
    by = "the other rank" if ranks == 2 else f"the {ranks - 1} other ranks"
    return Finding(held=True, text=f"{ranks} shares of {share} written, each checked by {by}: all as written.")


def judge_directory(directory: str, usage: Usage) -> Finding:
    """No name is left. The space in use is told beside it, but not judged: others may take some meanwhile."""
    text = f"Left in {directory}: {', '.join(usage.left)}." if usage.left else f"Nothing left in {directory}."
    if usage.before is not None and usage.after is not None:
        during = f"{in_words(usage.during)} while open, " if usage.during is not None else ""
        text += f" Space in use: {in_words(usage.before)} before, {during}{in_words(usage.after)} afterwards"
        text += "." if usage.after <= usage.before else " (others use it too)."
    return Finding(held=not usage.left, text=text)


def tell_stall(closed: Sequence[dict[str, Any]]) -> Finding:
    """Say which loop was held up the longest. It is for the reader to judge: a busy machine holds up any process."""
    text = f"Longest stall of an event loop: {_longest(closed, 'stall')}"
    if all(facts["held"] for facts in closed):
        text += f", without waits for a free processor {_longest(closed, 'held')}"
    beats = sum(facts["beats"] for facts in closed)
    text += f". {beats:,} beats, one due each millisecond in every rank from before the open until after the close."
    return Finding(held=None, text=text)


def _longest(closed: Sequence[dict[str, Any]], kind: str) -> str:
    rank, facts = max(enumerate(closed), key=lambda each: float(each[1][kind]["seconds"]))
    return f"{seconds_in_words(facts[kind]['seconds'])} (rank {rank} while {facts[kind]['during']})"
