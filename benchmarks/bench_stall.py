"""How long the event loop stands still while a region is opened and closed, beside the naive way in a thread.

The naive way is `await asyncio.to_thread(memory.madvise, MADV_POPULATE_WRITE)`: off the loop by its looks, but
`mmap.madvise` holds the interpreter lock. `nothing` is the same heartbeat while nothing is opened: what the machine
itself does.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Coroutine
from typing import Any

from harness import (
    MADV_POPULATE_WRITE,
    MIB,
    Column,
    Figures,
    Heartbeat,
    Outcome,
    parse_arguments,
    publish,
    region_name,
    take_turns,
    unnamed_file,
)

import aioshm

Way = Callable[[int, str], Coroutine[Any, Any, None]]

USE = 0.02  # seconds between open and close


async def nothing(size: int, directory: str) -> None:
    await asyncio.sleep(0.5)


async def naive(size: int, directory: str) -> None:
    with unnamed_file(size, directory) as fd:
        memory = mmap.mmap(fd, size)
        try:
            await asyncio.to_thread(memory.madvise, MADV_POPULATE_WRITE)
            await asyncio.sleep(USE)
        finally:
            await asyncio.to_thread(memory.close)


async def with_aioshm(size: int, directory: str) -> None:
    async with aioshm.open_region(region_name("stall"), size, directory=directory):
        await asyncio.sleep(USE)


def measured(way: Way, size: int, directory: str) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with Heartbeat() as heart:
            await way(size, directory)
        return {**heart.figures(), "seconds": time.perf_counter() - started}

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=7)
    size = arguments.mib * MIB
    contenders = {
        "nothing": lambda: measured(nothing, size, arguments.directory),
        "mmap.madvise in a thread": lambda: measured(naive, size, arguments.directory),
        "aioshm": lambda: measured(with_aioshm, size, arguments.directory),
    }
    outcome = Outcome(
        "Loop stall during open and close",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [
            Column("longest", "longest stall, ms", 1e3),
            Column("p99", "p99, ms", 1e3),
            Column("beats", "beats", 1, 0),
            Column("seconds", "all of it, s"),
        ],
        take_turns(contenders, arguments.rounds, prime=size),
    )
    outcome.compare("longest stall, naive over aioshm", "mmap.madvise in a thread", "aioshm", "longest")
    outcome.compare("longest stall, aioshm over nothing", "aioshm", "nothing", "longest")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
