"""Time to ready of several rank processes: a cohort of aioshm beside processes that each `mmap.madvise` their share.

Timed from the moment all processes are let go until the last one has its memory. The naive ones are spared everything
but that: the file is there, sized and open, and nobody waits for anybody. aioshm's time is the whole open: race,
preflight, guard, populate, rendezvous, release, and every rank has all of the region mapped. Modules are loaded before.
"""

from __future__ import annotations

import asyncio
import functools
import mmap
from collections.abc import Callable

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

RANKS = (1, 2, 4, 8)


def naive(rank: int, world: int, size: int, fd: int) -> None:
    share = size // world
    with mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE, rank * share, share)


def with_aioshm(rank: int, world: int, size: int, directory: str, name: str) -> None:
    async def main() -> None:
        async with aioshm.open_region(name, size, local_rank=rank, local_world_size=world, directory=directory):
            pass

    asyncio.run(main())


def timed(world: int, work: Callable[[int], None]) -> Figures:
    ran = race(world, work)
    return {"ready": max(end for _, end, _ in ran) - min(start for start, _, _ in ran)}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=5)
    size, directory, name = arguments.mib * MIB, arguments.directory, region_name("ready")
    warm_up(directory)

    def naively(world: int) -> Figures:
        with unnamed_file(size, directory) as fd:
            return timed(world, lambda rank: naive(rank, world, size, fd))

    def with_ours(world: int) -> Figures:
        return timed(world, lambda rank: with_aioshm(rank, world, size, directory, name))

    contenders: dict[str, Callable[[], Figures]] = {}
    for world in RANKS:
        contenders[f"mmap.madvise, {world} ranks"] = functools.partial(naively, world)
        contenders[f"aioshm, {world} ranks"] = functools.partial(with_ours, world)
    outcome = Outcome(
        "Time to ready",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [Column("ready", "ms", 1e3, 0)],
        take_turns(contenders, arguments.rounds, prime=size),
    )
    for world in RANKS:
        ratio = f"ready, {world} ranks, mmap.madvise over aioshm"
        outcome.compare(ratio, f"mmap.madvise, {world} ranks", f"aioshm, {world} ranks", "ready")
    outcome.traces = {
        way: [[world, *outcome.spread(f"{way}, {world} ranks", "ready")] for world in RANKS]
        for way in ("mmap.madvise", "aioshm")
    }
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
