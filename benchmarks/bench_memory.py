"""Memory beyond the region: what the process itself, its threads and the kernel take, while it opens and afterwards.

Each open is in a fresh process that has opened before. `anonymous` is the process's own resident memory (the region's
is counted apart, as RssShmem), `page tables` VmPTE, and `reserved` the address space for data and thread stacks, of
which only what is touched is resident. `Python` is the peak of tracemalloc, in an open of its own, for it slows down.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

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

SHOWN = ("anonymous, peak", "anonymous, closed", "page tables, peak", "page tables, open", "reserved, peak", "Python")
FIGURES = {"anonymous": "RssAnon", "page tables": "VmPTE", "reserved": "VmData"}


def taken() -> Figures:
    text = Path("/proc/self/status").read_text()
    return {name: float(text.split(f"{key}:")[1].split()[0]) * 1024 for name, key in FIGURES.items()}


def with_aioshm(size: int, directory: str) -> Figures:
    """In the other process."""

    async def opened(size: int, *, watch: bool) -> Figures:
        peak = before = taken()
        name = region_name("memory")
        opening = asyncio.create_task(enter(aioshm.open_region(name, size, directory=directory)))
        while watch and not opening.done():
            await asyncio.sleep(0.001)
            peak = {key: max(value, peak[key]) for key, value in taken().items()}
        region = await opening
        after = taken()
        beyond = os.stat(region.path).st_blocks * 512 - size
        await region.aclose()
        closed = taken()
        return {
            **{f"{key}, peak": max(value, after[key]) - before[key] for key, value in peak.items()},
            **{f"{key}, open": after[key] - before[key] for key in FIGURES},
            **{f"{key}, closed": closed[key] - before[key] for key in FIGURES},
            "file": float(beyond),
        }

    async def enter(opening: object) -> aioshm.Region:
        return await opening.__aenter__()  # type: ignore[attr-defined, no-any-return] # closed by aclose

    async def main() -> Figures:
        await opened(2 * MIB, watch=True)
        figures = await opened(size, watch=True)
        tracemalloc.start()
        await opened(size, watch=False)
        figures["Python"] = float(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return figures

    return asyncio.run(main())


def naive(size: int, directory: str) -> Figures:
    """In the other process."""
    before = taken()
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE)
        after = taken()
    closed = taken()
    return {
        **{f"{key}, peak": after[key] - before[key] for key in FIGURES},
        **{f"{key}, open": after[key] - before[key] for key in FIGURES},
        **{f"{key}, closed": closed[key] - before[key] for key in FIGURES},
    }


def in_a_process(way: Callable[[int, str], Figures], size: int, directory: str) -> Figures:
    with servant() as pipe:
        pipe.send((way, size, directory))
        figures: Figures = pipe.recv()
        return figures


def main() -> None:
    arguments = parse_arguments(__doc__, mib=1024, rounds=5)
    size, directory = arguments.mib * MIB, arguments.directory
    outcome = Outcome(
        "Memory beyond the region",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [
            *(Column(key, f"{key}, KiB", 1 / 1024, 0) for key in SHOWN),
        ],
        take_turns(
            {
                "mmap.madvise": lambda: in_a_process(naive, size, directory),
                "aioshm": lambda: in_a_process(with_aioshm, size, directory),
            },
            arguments.rounds,
            prime=size,
        ),
    )
    outcome.quote("anonymous, peak, bytes", "aioshm", "anonymous, peak")
    outcome.quote("anonymous, closed, bytes", "aioshm", "anonymous, closed")
    outcome.quote("page tables, open, bytes", "aioshm", "page tables, open")
    outcome.quote("Python, peak, bytes", "aioshm", "Python")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
