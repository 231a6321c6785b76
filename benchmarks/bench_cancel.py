"""How soon a cancelled open is over: cancelled at random moments, from `task.cancel()` until nothing is held any more.

`felt` is until the last thread that populated or looked has stopped: what is left then is giving back what was taken,
which takes as long as there is much of it. `returned` is until the cancelled await comes back, giving back included.

Beside it what the machine itself takes: threads that populate as much private memory by the kernel's own huge-page
faults, and look at a flag between two of them. Nobody can stop sooner than that, and where a virtual machine's host
has to find the memory, one of them can take long.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable

import memory
from harness import MIB, Column, Figures, Heartbeat, Outcome, fitting, parse_arguments, publish, region_name, take_turns

import aioshm

GIVING_BACK = "aioshm-release"


async def open_until_cancelled(size: int, directory: str) -> float:
    """Open; return when the cancellation came out."""
    try:
        async with aioshm.open_region(region_name("cancel"), size, directory=directory):
            return 0.0
    except asyncio.CancelledError:
        return time.perf_counter()


def whole(size: int, directory: str) -> float:
    """Return the seconds that an open takes which nobody cancels."""

    async def main() -> float:
        started = time.perf_counter()
        async with aioshm.open_region(region_name("cancel"), size, directory=directory):
            return time.perf_counter() - started

    return asyncio.run(main())


def cancelled(size: int, directory: str, after: float) -> Figures:
    async def main() -> Figures:
        task = asyncio.create_task(open_until_cancelled(size, directory))
        await asyncio.sleep(after)
        if task.done():
            return {}
        async with Heartbeat() as heart:
            asked, felt = await stop_and_wait(task.cancel, _at_work)
            returned = await task
        return {} if not returned else {"felt": felt, "returned": returned - asked, "stall": heart.figures()["longest"]}

    return asyncio.run(main())


def stopped(size: int, after: float) -> Figures:
    """The kernel's own huge-page faults, in a thread for each processor, which looks at a flag before each."""
    stop = threading.Event()

    def fault(address: int, length: int) -> None:
        memory.advise(address, length, memory.MADV_HUGEPAGE)
        for start in range(address, address + length, memory.HUGE_PAGE):
            if stop.is_set():
                return
            memory.advise(start, memory.HUGE_PAGE, memory.MADV_POPULATE_WRITE)

    async def main() -> Figures:
        with memory.mapped(size) as address:
            count = len(os.sched_getaffinity(0))
            crew = threading.Thread(target=memory.in_threads, args=(count, address, size, fault))
            crew.start()
            await asyncio.sleep(after)
            if not crew.is_alive():
                return {}
            async with Heartbeat() as heart:
                _, felt = await stop_and_wait(stop.set, crew.is_alive)
            return {"felt": felt, "stall": heart.figures()["longest"]}

    return asyncio.run(main())


async def stop_and_wait(stop: Callable[[], object], at_work: Callable[[], bool]) -> tuple[float, float]:
    """Return when it was to stop, and the seconds until nothing is at work any more."""
    asked = time.perf_counter()
    stop()
    while at_work():  # noqa: ASYNC110 - a thread's end sets no event of ours
        await asyncio.sleep(0.0002)
    return asked, time.perf_counter() - asked


def _at_work() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return any(name.startswith("aioshm-") and not name.startswith(GIVING_BACK) for name in names)


def main() -> None:
    arguments = parse_arguments(__doc__, mib=4096, rounds=30)
    sizes = fitting([arguments.mib], arguments.directory) or [1024]
    size, directory = sizes[0] * MIB, arguments.directory
    seconds = sorted(whole(size, directory) for _ in range(3))[1]

    def at_random(once: Callable[[float], Figures]) -> Figures:
        while True:
            figures = once(random.uniform(0.0, seconds))
            if figures:  # else it was over before it could be stopped
                return figures

    outcome = Outcome(
        "Cancellation",
        {"MiB": sizes[0], "rounds": arguments.rounds, "an open takes, ms": round(seconds * 1e3)},
        [
            Column("felt", "felt, ms", 1e3),
            Column("returned", "returned, ms", 1e3),
            Column("stall", "longest stall of the loop, ms", 1e3),
        ],
        take_turns(
            {
                "an open, cancelled": lambda: at_random(lambda after: cancelled(size, directory, after)),
                "huge-page faults, stopped": lambda: at_random(lambda after: stopped(size, after)),
            },
            arguments.rounds,
            prime=size,
        ),
    )
    outcome.quote("felt, median, seconds", "an open, cancelled", "felt")
    outcome.quote("felt, longest, seconds", "an open, cancelled", "felt", 1.0)
    outcome.quote("returned, longest, seconds", "an open, cancelled", "returned", 1.0)
    outcome.quote("huge-page faults, felt, longest, seconds", "huge-page faults, stopped", "felt", 1.0)
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
