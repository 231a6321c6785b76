"""The fixed cost: opening and closing 1 MiB, beside the ways that check nothing and wait for nobody."""

from __future__ import annotations

import asyncio
import mmap
import time
from multiprocessing import shared_memory

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


def with_aioshm(size: int, directory: str) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(region_name("small"), size, directory=directory):
            opened = time.perf_counter()
        closed = time.perf_counter()
        return {"open": opened - started, "close": closed - opened, "both": closed - started}

    return asyncio.run(main())


def madvise(size: int, directory: str) -> Figures:
    started = time.perf_counter()
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE)
        opened = time.perf_counter()
    closed = time.perf_counter()
    return {"open": opened - started, "close": closed - opened, "both": closed - started}


def standard_library(size: int, directory: str) -> Figures:
    started = time.perf_counter()
    memory = shared_memory.SharedMemory(create=True, size=size)
    memory.unlink()
    assert memory.buf is not None
    memory.buf[:] = bytes(size)
    opened = time.perf_counter()
    memory.close()
    closed = time.perf_counter()
    return {"open": opened - started, "close": closed - opened, "both": closed - started}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=1, rounds=200)
    size, directory = arguments.mib * MIB, arguments.directory
    outcome = Outcome(
        "Fixed cost",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [Column("both", "open and close, ms", 1e3), Column("open", "open, ms", 1e3), Column("close", "close, ms", 1e3)],
        take_turns(
            {
                "mmap.madvise": lambda: madvise(size, directory),
                "multiprocessing.shared_memory": lambda: standard_library(size, directory),
                "aioshm": lambda: with_aioshm(size, directory),
            },
            arguments.rounds,
            prime=size,
        ),
    )
    outcome.quote("open and close, median, seconds", "aioshm", "both")
    outcome.quote("open and close, p99, seconds", "aioshm", "both", 0.99)
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
