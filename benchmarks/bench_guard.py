"""What the guard costs: populating with `memory_policy="guard"` beside `"ignore"`, inside a memory group with a limit.

A level without a limit is hardly looked at. So where this process may make a memory group (root, cgroup v1 or v2), it
moves into one whose limit is far above what is populated, and every chunk is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from harness import MIB, Column, Figures, Outcome, parse_arguments, publish, region_name, take_turns

import aioshm

sys.path.append(str(Path(__file__).parents[1] / "tests"))


def populate(size: int, directory: str, policy: str) -> Figures:
    async def main() -> Figures:
        async with aioshm.open_region(
            region_name("guard"), size, directory=directory, memory_policy=policy, threads=1
        ) as region:
            return {"rate": region.report.rate}

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
            "Guard",
            {"MiB": arguments.mib, "rounds": arguments.rounds, "memory group": group},
            [Column("rate", "GiB/s", 1 / (1 << 30))],
            take_turns(
                {
                    policy: lambda policy=policy: populate(size, directory, policy)  # type: ignore[misc]
                    for policy in ("guard", "ignore")
                },
                arguments.rounds,
                prime=size,
            ),
        )
    outcome.compare("rate, ignore over guard", "ignore", "guard", "rate")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
