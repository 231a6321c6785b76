"""What waiting for a region costs: how soon a joiner is in when it is ready, and the CPU that waiting takes.

The joiner is another process. It waits while the creator populates and initializes: a random time, so that no pace of
its own can be met. Latency is from the creator's open returning to the joiner's, by the
machine's one monotonic clock. In a cohort it is from the first rank's open returning to the last one's. CPU time is the
waiting process's own, from its call to its return.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from harness import MIB, Column, Figures, Outcome, parse_arguments, publish, quantile, region_name, take_turns
from processes import servant

import aioshm


def join(name: str, size: int, directory: str, rank: int | None, world: int | None) -> tuple[float, float]:
    """In the other process: open, and return when it was in and the CPU time that took."""

    async def main() -> tuple[float, float]:
        before = resource.getrusage(resource.RUSAGE_SELF)
        async with aioshm.open_region(
            name, size, directory=directory, local_rank=rank, local_world_size=world, timeout=None
        ):
            there = time.monotonic()
            after = resource.getrusage(resource.RUSAGE_SELF)
        return there, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return asyncio.run(main())


def latency(pipe: Connection, size: int, directory: str, pause: float) -> Figures:
    """One joiner without a cohort, called as soon as we are the creator; it waits through populate and `initialize`."""
    name = region_name("wait")
    called = False

    def call(_: aioshm.Progress) -> None:
        nonlocal called
        if not called:
            pipe.send((join, name, size, directory, None, None))
        called = True

    async def initialize(region: aioshm.Region) -> None:
        await asyncio.sleep(pause)

    async def main() -> Figures:
        async with aioshm.open_region(name, size, directory=directory, initialize=initialize, on_progress=call):
            ready = time.monotonic()
            there, cpu = await asyncio.to_thread(pipe.recv)
        return {"latency": there - ready, "cpu": cpu}

    return asyncio.run(main())


def latency_in_cohort(pipe: Connection, size: int, directory: str, pause: float) -> Figures:
    """Two ranks, one of which comes later and has its share to populate."""

    async def main() -> Figures:
        name = region_name("wait")
        pipe.send((join, name, size, directory, 1, 2))
        await asyncio.sleep(pause)
        async with aioshm.open_region(name, size, directory=directory, local_rank=0, local_world_size=2):
            ready = time.monotonic()
            there, cpu = await asyncio.to_thread(pipe.recv)
        return {"latency": abs(there - ready), "cpu": cpu}

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=64, rounds=200, seconds=30.0)
    size, directory = arguments.mib * MIB, arguments.directory
    with servant() as pipe:

        def repeated(measure: Callable[[Connection, int, str, float], Figures]) -> Callable[[], Figures]:
            return lambda: measure(pipe, size, directory, random.uniform(0.03, 0.13))

        values = take_turns(
            {"joiner": repeated(latency), "two ranks": repeated(latency_in_cohort)}, arguments.rounds, prime=size
        )
        for name, measure in (("joiner", latency), ("two ranks", latency_in_cohort)):
            found = measure(pipe, MIB, directory, arguments.seconds)
            values[f"{name}, waits {arguments.seconds:g} s"] = {"cpu": [found["cpu"]], "latency": [found["latency"]]}
    for figures in values.values():
        figures["p99"] = [quantile(figures["latency"], 0.99)]
    outcome = Outcome(
        "Waiting",
        {"MiB": arguments.mib, "rounds": arguments.rounds, "seconds": arguments.seconds},
        [Column("latency", "latency, ms", 1e3), Column("p99", "p99, ms", 1e3), Column("cpu", "CPU, ms", 1e3)],
        values,
    )
    for name in ("joiner", "two ranks"):
        outcome.quote(f"latency p50, {name}, seconds", name, "latency")
        outcome.quote(f"latency p99, {name}, seconds", name, "latency", 0.99)
        outcome.quote(f"CPU while waiting, {name}, seconds", f"{name}, waits {arguments.seconds:g} s", "cpu")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
