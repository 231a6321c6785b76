"""How soon eight ranks know that a region does not fit: from all of them being let go until the last has the error.

On a tmpfs of 64 MiB where one can be mounted (root), else with a size beyond what is free in the directory. The naive
way finds out by touching until the file system is full; it is measured only on the mount, which it fills.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator

from harness import (
    MADV_POPULATE_WRITE,
    MIB,
    Column,
    Figures,
    Outcome,
    parse_arguments,
    publish,
    region_name,
    take_turns,
    unnamed_file,
)
from processes import race, warm_up

import aioshm

WORLD = 8
MOUNT_MIB = 64


def open_in_vain(size: int, directory: str, rank: int | None) -> None:
    async def main() -> None:
        with contextlib.suppress(aioshm.InsufficientSpaceError):
            async with aioshm.open_region(
                region_name("capacity"),
                size,
                directory=directory,
                local_rank=rank,
                local_world_size=None if rank is None else WORLD,
            ):
                raise AssertionError("it fits")

    asyncio.run(main())


def populate_in_vain(size: int, fd: int, rank: int) -> None:
    share = size // WORLD
    with mmap.mmap(fd, size) as memory, contextlib.suppress(OSError):
        memory.madvise(MADV_POPULATE_WRITE, rank * share, share)


@contextlib.contextmanager
def small_tmpfs() -> Iterator[str | None]:
    """Mount a small tmpfs and yield where; None where that may not be."""
    with tempfile.TemporaryDirectory() as where:
        command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_MIB}m,mode=1777", "aioshm-bench", where]
        may = os.geteuid() == 0 and shutil.which("mount") is not None
        mounted = may and subprocess.run(command, check=False, capture_output=True).returncode == 0
        try:
            yield where if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", where], check=True)


def timed(work: Callable[[int], None]) -> Figures:
    ran = race(WORLD, work)
    begin = min(start for start, _, _ in ran)
    return {"first": min(end for _, end, _ in ran) - begin, "last": max(end for _, end, _ in ran) - begin}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=8 * MOUNT_MIB, rounds=21)
    with small_tmpfs() as mount:
        directory = mount or arguments.directory
        figures = os.statvfs(directory)
        size = arguments.mib * MIB if mount else figures.f_bavail * figures.f_frsize + (1 << 30)
        warm_up(directory)

        def naively() -> Figures:
            with unnamed_file(size, directory) as fd:
                return timed(lambda rank: populate_in_vain(size, fd, rank))

        contenders = {
            "without a cohort": lambda: timed(lambda _: open_in_vain(size, directory, None)),
            "ranks of a cohort": lambda: timed(lambda rank: open_in_vain(size, directory, rank)),
        }
        if mount:
            contenders["mmap.madvise"] = naively
        outcome = Outcome(
            "Eight ranks and no room",
            {"MiB": size // MIB, "rounds": arguments.rounds, "free MiB": figures.f_bavail * figures.f_frsize // MIB},
            [Column("first", "first rank, ms", 1e3), Column("last", "last rank, ms", 1e3)],
            take_turns(contenders, arguments.rounds),
        )
    outcome.quote("last of eight, without a cohort, seconds", "without a cohort", "last")
    outcome.quote("last of eight, ranks of a cohort, seconds", "ranks of a cohort", "last")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
