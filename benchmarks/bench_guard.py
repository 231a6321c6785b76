"""What looking after a populate costs: the guard alone, and guard, progress and reports together, beside none of them.

Whole opens are timed, in one thread each. `all` is the defaults with `on_progress`, `none` is `memory_policy="ignore"`
without; the reports are made in either case, within what is timed, as is what the log would be told.

A level without a limit is hardly looked at. So where this process may make a memory group (root, cgroup v1 or v2), it
moves into one whose limit is far above what is populated, and every chunk is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from harness import GIB, MIB, Column, Figures, Outcome, parse_arguments, publish, region_name, take_turns

import aioshm

sys.path.append(str(Path(__file__).parents[1] / "tests"))


def opened(size: int, directory: str, policy: Literal["guard", "ignore"], *, told: bool) -> Figures:
    told_of: list[aioshm.Progress] = []

    async def main() -> Figures:
        before = time.process_time()
        started = time.perf_counter()
        async with aioshm.open_region(
            region_name("guard"),
            size,
            directory=directory,
            memory_policy=policy,
            threads=1,
            on_progress=told_of.append if told else None,
        ) as region:
            seconds, cpu = time.perf_counter() - started, time.process_time() - before
        return {"seconds": seconds, "cpu": cpu, "rate": region.report.rate, "told": float(len(told_of))}

    return asyncio.run(main())


@contextlib.contextmanager
def limited_group() -> Iterator[str]:
    """Be in a memory group of a TiB, where one can be made; yield what it is."""
    from cgroups import MemoryGroup, find_memory_controller

    controller = find_memory_controller()
    if controller is None or os.geteuid() != 0:
        yield "none to be had"
        return
    group = MemoryGroup.make(controller, limit=1 << 40, parent=None)
    own = Path(f"/proc/{os.getpid()}/cgroup").read_text().splitlines()
    back = next(line.split(":", 2)[2] for line in own if "memory" in line.split(":")[1] or controller.version == 2)
    group.enter()
    try:
        yield f"v{controller.version}, limit 1 TiB"
    finally:
        (controller.mount / back.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.remove()


def main() -> None:
    arguments = parse_arguments(__doc__, mib=1024, rounds=15)
    size, directory = arguments.mib * MIB, arguments.directory
    with limited_group() as group:
        outcome = Outcome(
            "Guard, progress and reports",
            {"MiB": arguments.mib, "rounds": arguments.rounds, "memory group": group},
            [
                Column("seconds", "open, ms", 1e3, 1),
                Column("cpu", "CPU, ms", 1e3, 1),
                Column("rate", "populate, GiB/s", 1 / GIB),
                Column("told", "progress calls", 1, 0),
            ],
            take_turns(
                {
                    "none": lambda: opened(size, directory, "ignore", told=False),
                    "guard": lambda: opened(size, directory, "guard", told=False),
                    "all": lambda: opened(size, directory, "guard", told=True),
                },
                arguments.rounds,
                prime=size,
            ),
        )
    for key in ("seconds", "cpu"):
        for what in ("guard", "all"):
            ratio = outcome.compare(f"{key}, {what} over none", what, "none", key)
            outcome.figures[f"{key}, share of {what}"] = ratio - 1
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
