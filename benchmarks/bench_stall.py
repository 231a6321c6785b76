"""How long the event loop stands still while a region is opened and closed, beside the naive way in a thread.

The naive way is `await asyncio.to_thread(memory.madvise, MADV_POPULATE_WRITE)`: off the loop by its looks, but
`mmap.madvise` holds the interpreter lock, and so does `mmap.close`. First touch by NumPy in a thread lets go of it
while it touches. `nothing` is the same heartbeat while nothing is opened: what the machine itself does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import os
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
)

import aioshm

Way = Callable[[int, str, Heartbeat], Coroutine[Any, Any, None]]

USE = 0.05  # seconds between open and close


async def nothing(size: int, directory: str, heart: Heartbeat) -> None:
    await asyncio.sleep(0.5)


async def naive(size: int, directory: str, heart: Heartbeat) -> None:
    await in_thread(size, directory, heart, lambda memory: memory.madvise(MADV_POPULATE_WRITE))


async def first_touch(size: int, directory: str, heart: Heartbeat) -> None:
    def touch(memory: mmap.mmap) -> None:
        import numpy

        numpy.frombuffer(memory, dtype=numpy.uint8)[:: mmap.PAGESIZE] = 0

    await in_thread(size, directory, heart, touch)


async def in_thread(size: int, directory: str, heart: Heartbeat, work: Callable[[mmap.mmap], object]) -> None:
    heart.enter("open")
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        try:
            await asyncio.to_thread(work, memory)
            heart.enter("use")
            await asyncio.sleep(USE)
            heart.enter("close")
        finally:
            await asyncio.to_thread(memory.close)
    finally:
        await asyncio.to_thread(os.close, fd)


async def with_aioshm(size: int, directory: str, heart: Heartbeat) -> None:
    heart.enter("open")
    async with aioshm.open_region(region_name("stall"), size, directory=directory):
        heart.enter("use")
        await asyncio.sleep(USE)
        heart.enter("close")


def measured(name: str, size: int, directory: str, traces: list[dict[str, Any]]) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with Heartbeat() as heart:
            await WAYS[name](size, directory, heart)
        seconds = time.perf_counter() - started
        traces.append({**heart.trace(), "longest": heart.figures()["longest"]})
        return {**heart.figures(), "seconds": seconds}

    return asyncio.run(main())


WAYS: dict[str, Way] = {
    "nothing": nothing,
    "mmap.madvise in a thread": naive,
    "NumPy's first touch in a thread": first_touch,
    "aioshm": with_aioshm,
}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=7)
    size = arguments.mib * MIB
    ways = [name for name, way in WAYS.items() if way is not first_touch or importlib.util.find_spec("numpy")]
    traces: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    outcome = Outcome(
        "Loop stall during open and close",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [
            Column("longest", "longest stall, ms", 1e3),
            Column("longest open", "in open, ms", 1e3),
            Column("longest use", "in use, ms", 1e3),
            Column("longest close", "in close, ms", 1e3),
            Column("p99", "p99, ms", 1e3),
            Column("beats", "beats", 1, 0),
            Column("seconds", "all of it, s"),
        ],
        take_turns(
            {name: lambda name=name: measured(name, size, arguments.directory, traces[name]) for name in ways},  # type: ignore[misc]
            arguments.rounds,
            prime=size,
        ),
    )
    outcome.compare("longest stall, naive over aioshm", "mmap.madvise in a thread", "aioshm", "longest")
    outcome.compare("longest stall, aioshm over nothing", "aioshm", "nothing", "longest")
    outcome.quote("p99, aioshm, seconds", "aioshm", "p99")
    # Of each contender the round in the middle, by its longest stall; the first was discarded.
    middle = arguments.rounds // 2
    outcome.traces = {name: sorted(traces[name][1:], key=lambda trace: trace["longest"])[middle] for name in ways}
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
