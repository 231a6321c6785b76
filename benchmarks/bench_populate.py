"""How fast memory is there: `open_region` with its defaults beside one thread of 4 KiB `mmap.madvise`.

Whole opens are timed, from no file to all of it populated: locks, preflight and guard are part of aioshm's time.
Closing is timed as well, for small pages are slow to give back too.
"""

from __future__ import annotations

import asyncio
import mmap
import time

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


def naive(size: int, directory: str) -> Figures:
    started = time.perf_counter()
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE)
        ready = time.perf_counter()
    return _figures(size, started, ready)


def with_aioshm(size: int, directory: str, threads: int | None) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(region_name("populate"), size, directory=directory, threads=threads) as region:
            ready = time.perf_counter()
        share = region.report.huge_share
        return {**_figures(size, started, ready), "huge": share or 0.0, "threads": float(region.report.threads)}

    return asyncio.run(main())


def _figures(size: int, started: float, ready: float) -> Figures:
    return {"rate": size / (ready - started), "close": time.perf_counter() - ready}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=7)
    size, directory = arguments.mib * MIB, arguments.directory
    contenders = {
        "mmap.madvise, 1 thread": lambda: naive(size, directory),
        "aioshm, defaults": lambda: with_aioshm(size, directory, None),
        "aioshm, 1 thread": lambda: with_aioshm(size, directory, 1),
    }
    outcome = Outcome(
        "Populate",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [
            Column("rate", "GiB/s", 1 / (1 << 30)),
            Column("threads", "threads", 1, 0),
            Column("huge", "huge pages, %", 100, 0),
            Column("close", "close, ms", 1e3),
        ],
        take_turns(contenders, arguments.rounds, prime=size),
    )
    outcome.compare("rate, aioshm over mmap.madvise", "aioshm, defaults", "mmap.madvise, 1 thread", "rate")
    outcome.compare("rate, aioshm, 1 thread, over mmap.madvise", "aioshm, 1 thread", "mmap.madvise, 1 thread", "rate")
    outcome.compare("close, mmap.madvise over aioshm", "mmap.madvise, 1 thread", "aioshm, defaults", "close")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
