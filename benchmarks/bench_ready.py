"""Time to ready of several rank processes: a cohort of aioshm beside processes that each `mmap.madvise` their share.

Timed from the moment all processes are let go until the last one has its memory. The naive ones are spared everything
but that: the file is there, sized and open, and nobody waits for anybody. aioshm's time is the whole open: race,
preflight, guard, populate, rendezvous, release, and every rank has all of the region mapped.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

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

import aioshm

RANKS = (1, 2, 4, 8)
_fork = multiprocessing.get_context("fork")  # what is imported here is imported there


def naive(rank: int, world: int, size: int, fd: int) -> None:
    share = size // world
    with mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE, rank * share, share)


def with_aioshm(rank: int, world: int, size: int, directory: str, name: str) -> None:
    async def main() -> None:
        async with aioshm.open_region(name, size, local_rank=rank, local_world_size=world, directory=directory):
            pass

    asyncio.run(main())


def race(world: int, work: Callable[..., None], *arguments: Any) -> Figures:
    """Let `world` processes go at once, and return the seconds until the last is done."""
    go, results = _fork.Barrier(world), _fork.SimpleQueue()

    def be(rank: int) -> None:
        go.wait()
        started = time.perf_counter()
        work(rank, world, *arguments)
        results.put((started, time.perf_counter()))

    processes = [_fork.Process(target=be, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"exit status {[process.exitcode for process in processes]}")
    times = [results.get() for _ in processes]
    return {"ready": max(end for _, end in times) - min(start for start, _ in times)}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=5)
    size, directory, name = arguments.mib * MIB, arguments.directory, region_name("ready")

    def naively(world: int) -> Figures:
        with unnamed_file(size, directory) as fd:
            return race(world, naive, size, fd)

    contenders: dict[str, Callable[[], Figures]] = {}
    for world in RANKS:
        contenders[f"mmap.madvise, {world} ranks"] = lambda world=world: naively(world)
        contenders[f"aioshm, {world} ranks"] = lambda world=world: race(world, with_aioshm, size, directory, name)
    outcome = Outcome(
        "Time to ready",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [Column("ready", "ms", 1e3, 0)],
        take_turns(contenders, arguments.rounds, prime=size),
    )
    for world in RANKS:
        name = f"ready, {world} ranks, mmap.madvise over aioshm"
        outcome.compare(name, f"mmap.madvise, {world} ranks", f"aioshm, {world} ranks", "ready")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
