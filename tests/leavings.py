"""What killed processes leave, made for a test, and how it is seen."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

from ranks import Rank

from aioshm._leftovers import find_regions

MIB = 1 << 20
SIZE = 4 * MIB
NOBODY = 65534
UID = os.geteuid()


def leave(path: Path, size: int = SIZE, mode: int = 0o700) -> Path:
    """Make what a killed process leaves, with all its pages."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, b"old bytes", 0)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
    return path


def states(directory: Path) -> dict[str, str]:
    """Return the state of each file under a region's name."""
    return {Path(each.path).name: each.state for each in find_regions(str(directory))}


def stop_in_open(rank: Rank, where: str, place: Path, **options: Any) -> None:
    """Have a rank open its region in `place`, and stop before it calls `where`."""
    rank.ask("hook", call="stop_at", where=where)
    rank.send("open", name=rank.name, size=SIZE, options={"directory": str(place), **options})
    assert rank.answer() == {"stopped": where}
    rank.wait_stopped()


def has_open(rank: Rank, path: Path) -> bool:
    """Whether it has a file of this name open, a deleted one too."""
    for fd in os.listdir(f"/proc/{rank.pid}/fd"):
        try:
            if os.readlink(f"/proc/{rank.pid}/fd/{fd}").removesuffix(" (deleted)") == str(path):
                return True
        except FileNotFoundError:
            continue
    return False


def has_answered(rank: Rank) -> bool:
    """Whether `answer` would return at once."""
    return bool(select.select([rank.process.stdout], [], [], 0)[0])
