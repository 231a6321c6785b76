"""How soon a cancelled open is over: cancelled at random moments, from `task.cancel()` until nothing is held any more.

`felt` is until the last thread that populated or looked has stopped: what is left then is giving back what was taken,
which takes as long as there is much of it. `returned` is until the cancelled await comes back, giving back included.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time

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
            asked = time.perf_counter()
            task.cancel()
            while _at_work():  # noqa: ASYNC110 - a thread's end sets no event of ours
                await asyncio.sleep(0.0002)
            felt = time.perf_counter() - asked
            returned = await task
        return {} if not returned else {"felt": felt, "returned": returned - asked, "stall": heart.figures()["longest"]}

    return asyncio.run(main())


def _at_work() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return any(name.startswith("aioshm-") and not name.startswith(GIVING_BACK) for name in names)


def main() -> None:
    arguments = parse_arguments(__doc__, mib=4096, rounds=30)
    sizes = fitting([arguments.mib], arguments.directory) or [1024]
    size, directory = sizes[0] * MIB, arguments.directory
    seconds = sorted(whole(size, directory) for _ in range(3))[1]

    def at_random() -> Figures:
        while True:
            figures = cancelled(size, directory, random.uniform(0.0, seconds))
            if figures:  # else it was open before it could be cancelled
                return figures

    outcome = Outcome(
        "Cancellation",
        {"MiB": sizes[0], "rounds": arguments.rounds, "an open takes, ms": round(seconds * 1e3)},
        [
            Column("felt", "felt, ms", 1e3),
            Column("returned", "returned, ms", 1e3),
            Column("stall", "longest stall of the loop, ms", 1e3),
        ],
        take_turns({"at random moments": at_random}, arguments.rounds, prime=size),
    )
    outcome.quote("felt, median, seconds", "at random moments", "felt")
    outcome.quote("felt, longest, seconds", "at random moments", "felt", 1.0)
    outcome.quote("returned, longest, seconds", "at random moments", "returned", 1.0)
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
