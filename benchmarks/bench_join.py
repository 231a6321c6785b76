"""How long a process takes to join a region that is ready: aioshm beside mapping 4 KiB pages of the same memory.

The joiner is a process of its own, as a rank is, with page tables of its own, and stays for all rounds. It times the
whole of `open_region`; the other way opens the file, maps it and populates the mapping with `mmap.madvise`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from multiprocessing.connection import Connection

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
from processes import servant

import aioshm


def join_naively(path: str, size: int) -> Figures:
    started = time.perf_counter()
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, size) as memory:
            mapped = time.perf_counter()
            memory.madvise(MADV_POPULATE_WRITE)
            done = time.perf_counter()
            return {"join": done - started, "map": done - mapped}
    finally:
        os.close(fd)


def join_aioshm(name: str, directory: str, size: int) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(name, size, directory=directory) as region:
            seconds = time.perf_counter() - started
        assert not region.created
        return {"join": seconds, "map": region.report.populate_seconds}

    return asyncio.run(main())


def small_pages(pipe: Connection, size: int, directory: str) -> Figures:
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE)
        pipe.send((join_naively, f"/proc/{os.getpid()}/fd/{fd}", size))
        return pipe.recv()


def with_aioshm(pipe: Connection, size: int, directory: str) -> Figures:
    async def main() -> Figures:
        name = region_name("join")
        async with aioshm.open_region(name, size, directory=directory):
            pipe.send((join_aioshm, name, directory, size))
            return await asyncio.to_thread(pipe.recv)

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=7)
    size, directory = arguments.mib * MIB, arguments.directory
    with servant() as pipe:
        contenders = {
            "4 KiB, mmap.madvise": lambda: small_pages(pipe, size, directory),
            "aioshm": lambda: with_aioshm(pipe, size, directory),
        }
        values = take_turns(contenders, arguments.rounds, prime=size)
    outcome = Outcome(
        "Join",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [Column("join", "whole join, ms", 1e3), Column("map", "of it mapping, ms", 1e3)],
        values,
    )
    outcome.compare("join, 4 KiB over aioshm", "4 KiB, mmap.madvise", "aioshm", "join")
    outcome.compare("map, 4 KiB over aioshm", "4 KiB, mmap.madvise", "aioshm", "map")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
