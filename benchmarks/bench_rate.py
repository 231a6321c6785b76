"""Rate over threads and size: whole opens of aioshm beside what the kernel and the memory give to as many threads.

`4 KiB` is MADV_POPULATE_WRITE of a file in shared memory, without the interpreter lock. `huge fault` is the kernel's
own way to huge pages, in private memory: what a machine gives where nothing has to be asked for. `memset` writes memory
that is mapped already, in huge pages where they can be had: faster than that no memory can be made.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable

from harness import (
    GIB,
    MIB,
    Column,
    Contender,
    Figures,
    Outcome,
    fitting,
    parse_arguments,
    publish,
    region_name,
    take_turns,
    unnamed_file,
)
from memory import MADV_HUGEPAGE, MADV_POPULATE_WRITE, advise, fill, in_threads, make_huge, mapped

import aioshm


def with_aioshm(size: int, threads: int, directory: str) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(region_name("rate"), size, directory=directory, threads=threads) as region:
            seconds = time.perf_counter() - started
        return {"rate": size / seconds, "populate": region.report.rate, "huge": region.report.huge_share or 0.0}

    return asyncio.run(main())


def small_pages(size: int, threads: int, directory: str) -> Figures:
    with unnamed_file(size, directory) as fd, mapped(size, fd) as address:
        return _timed(size, threads, address, lambda start, length: advise(start, length, MADV_POPULATE_WRITE))


def huge_fault(size: int, threads: int, directory: str) -> Figures:
    with mapped(size) as address:
        advise(address, size, MADV_HUGEPAGE)
        return _timed(size, threads, address, lambda start, length: advise(start, length, MADV_POPULATE_WRITE))


def write(size: int, threads: int, directory: str) -> Figures:
    with unnamed_file(size, directory) as fd, mapped(size, fd) as address:
        in_threads(threads, address, size, make_huge)
        return _timed(size, threads, address, fill)


def _timed(size: int, threads: int, address: int, work: Callable[[int, int], object]) -> Figures:
    started = time.perf_counter()
    in_threads(threads, address, size, work)
    return {"rate": size / (time.perf_counter() - started)}


WAYS: dict[str, Callable[[int, int, str], Figures]] = {
    "4 KiB": small_pages,
    "huge fault": huge_fault,
    "memset": write,
    "aioshm": with_aioshm,
}


def label(way: str, size: int, threads: int) -> str:
    return f"{way}, {size} MiB, {threads} thread{'s' * (threads > 1)}"


def main() -> None:
    counts = _thread_counts()
    arguments = parse_arguments(__doc__, mib=2048, rounds=5, smaller=[64, 256, 1024], threads=counts)
    directory = arguments.directory
    sizes = fitting(sorted({*(size for size in arguments.smaller if size < arguments.mib), arguments.mib}), directory)
    contenders: dict[str, Contender] = {}
    primes: dict[str, int] = {}
    for size in sizes:
        for threads in arguments.threads:
            for way, run in WAYS.items():
                name = label(way, size, threads)
                contenders[name] = functools.partial(run, size * MIB, threads, directory)
                # More than is needed: in a tenth of the turns the kernel gave other pages than those just freed, and
                # the host had to find them at 1 GiB/s, once for this contender and once for that.
                primes[name] = size * MIB * 5 // 2
    outcome = Outcome(
        "Rate over threads and size",
        {"rounds": arguments.rounds},
        [
            Column("rate", "GiB/s", 1 / GIB),
            Column("populate", "of it populating, GiB/s", 1 / GIB),
            Column("huge", "huge pages, %", 100, 0),
        ],
        take_turns(contenders, arguments.rounds, prime=primes),
    )
    for threads in arguments.threads:
        small, fault, memset, ours = (label(way, sizes[-1], threads) for way in WAYS)
        outcome.compare(f"rate, aioshm over memset, threads: {threads}", ours, memset, "rate")
        outcome.compare(f"rate, aioshm over huge fault, threads: {threads}", ours, fault, "rate")
        outcome.compare(f"rate, huge fault over memset, threads: {threads}", fault, memset, "rate")
        outcome.compare(f"rate, aioshm over 4 KiB, threads: {threads}", ours, small, "rate")
    for way in WAYS:
        outcome.traces[way] = {
            str(threads): [[size, outcome.median(label(way, size, threads), "rate") / GIB] for size in sizes]
            for threads in arguments.threads
        }
    publish(outcome, arguments.json)


def _thread_counts() -> list[int]:
    """1, 2, 4, … and as many as there are processors, but not more than aioshm would start."""
    most = min(len(os.sched_getaffinity(0)), 16)
    return sorted({1 << power for power in range(most.bit_length())} | {most})


if __name__ == "__main__":
    main()
