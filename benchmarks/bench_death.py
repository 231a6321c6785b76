"""How soon the others know: from SIGKILL of one rank until each of its peers has its PeerLostError, by phase."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

from harness import MIB, Column, Figures, Outcome, parse_arguments, publish, region_name, take_turns
from processes import child, fork, running

import aioshm

WORLD = 4  # one of them never comes: the others wait for it, and for nothing else


def be_rank(rank: int, name: str, size: int, directory: str, said: Any) -> None:
    async def main() -> None:
        try:
            async with aioshm.open_region(
                name, size, local_rank=rank, local_world_size=WORLD, directory=directory, threads=1, on_progress=tell
            ):
                raise AssertionError("a rank never came")
        except aioshm.PeerLostError:
            said.put(("lost", time.perf_counter()))

    def tell(progress: aioshm.Progress) -> None:
        said.put(("begun" if progress.done < progress.total else "populated", rank))

    asyncio.run(main())


def kill_one(name: str, size: int, directory: str, until: str) -> Figures:
    """Start all ranks but the last, kill rank 0 when all have said `until`, and time the others."""
    said = fork.SimpleQueue()
    ranks = [child(be_rank, rank, name, size, directory, said) for rank in range(WORLD - 1)]
    with running(ranks):
        known = _kill_first(ranks, said, until)
    return {"first": min(known), "last": max(known)}


def _kill_first(ranks: list[BaseProcess], said: Any, until: str) -> list[float]:
    reached: set[int] = set()
    while len(reached) < len(ranks):
        what, rank = said.get()
        if what == until or (what, until) == ("populated", "begun"):
            reached.add(rank)
    time.sleep(0.05)  # the peers look every 20 ms, and who was never seen is not lost but missing
    victim = ranks[0].pid
    assert victim is not None
    killed = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    known: list[float] = []
    while len(known) < len(ranks) - 1:
        what, when = said.get()
        if what == "lost":
            known.append(when - killed)
    return known


def main() -> None:
    arguments = parse_arguments(__doc__, mib=1024, rounds=11)
    size, directory = arguments.mib * MIB, arguments.directory
    small = 64 * MIB
    outcome = Outcome(
        "Death of a rank",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [Column("first", "first peer, ms", 1e3), Column("last", "last peer, ms", 1e3)],
        take_turns(
            {
                "while all populate": lambda: kill_one(region_name("populate"), size, directory, "begun"),
                "while all wait": lambda: kill_one(region_name("wait"), small, directory, "populated"),
            },
            arguments.rounds,
        ),
    )
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
