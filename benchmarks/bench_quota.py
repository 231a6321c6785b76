"""What the threads' rests are for: populating under a CPU quota, beside threads that run flat out.

Runs in a control group with a quota, which takes root. For how long the group was kept from running is told by the
kernel (cpu.stat); the heartbeat only sleeps, for with a fifth of a processor there is none to spare for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness import MIB, Column, Figures, Heartbeat, Outcome, parse_arguments, publish, region_name, take_turns

import aioshm
from aioshm import _pace

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cgroups import CpuGroup

QUOTA = 0.2


class Sleeper(Heartbeat):
    """A heartbeat that allocates nothing."""

    async def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(self.INTERVAL)
            now = time.perf_counter()
            self.beats.append((now, now - last - self.INTERVAL))
            last = now


def populate(size: int, directory: str, group: CpuGroup, share: float) -> Figures:
    async def main() -> Figures:
        before = group.throttled
        async with Sleeper() as heart, contextlib.AsyncExitStack() as stack:
            region = await stack.enter_async_context(
                aioshm.open_region(region_name("quota"), size, directory=directory, huge_pages="off")
            )
            figures = {"rate": region.report.rate, "throttled": group.throttled - before, **heart.figures()}
        return figures

    time.sleep(0.2)  # what was used before is forgotten: another period
    normal, _pace._OF_QUOTA = _pace._OF_QUOTA, share
    try:
        return asyncio.run(main())
    finally:
        _pace._OF_QUOTA = normal


@contextlib.contextmanager
def limited_group() -> Iterator[CpuGroup]:
    group = CpuGroup.make(QUOTA)
    if group is None:
        print("left out: it takes root, and a processor controller to make a group in", file=sys.stderr)
        raise SystemExit(0)
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    back = next(path for _, names, path in own if "cpu" in names.split(",") or (group.version == 2 and not names))
    group.enter()
    try:
        yield group
    finally:
        (group.path.parent / back.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.remove()


def main() -> None:
    arguments = parse_arguments(__doc__, mib=256, rounds=7)
    size, directory = arguments.mib * MIB, arguments.directory
    with limited_group() as group:
        outcome = Outcome(
            "CPU quota",
            {"MiB": arguments.mib, "rounds": arguments.rounds, "quota": QUOTA},
            [
                Column("throttled", "kept from running, ms", 1e3),
                Column("p99", "p99, ms", 1e3),
                Column("longest", "longest stall, ms", 1e3),
                Column("rate", "GiB/s", 1 / (1 << 30)),
            ],
            take_turns(
                {
                    "flat out": lambda: populate(size, directory, group, 1e9),
                    "with rests": lambda: populate(size, directory, group, _pace._OF_QUOTA),
                },
                arguments.rounds,
            ),
        )
    for key in ("throttled", "p99", "longest", "rate"):
        outcome.compare(f"{key}, flat out over with rests", "flat out", "with rests", key)
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
