"""Cohorts in numbers: hundreds of rounds, many ranks, and the slowest poller."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from table import wait_held

import aioshm
from aioshm import _roster
from aioshm._bell import Bell
from aioshm._locks import READY

MIB = 1 << 20
ROUNDS = 500


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eight_processes_five_hundred_rounds(ranks, name, path):
    """All ready each round, one creator, one inode, no name when any returns, every share as its rank wrote it."""
    world = 8
    crew = ranks.start_many(world)
    for index, rank in enumerate(crew):
        rank.send("cohort_rounds", name=name, size=4 * MIB, count=ROUNDS, rank=index, world=world)
    answers = [rank.answer(timeout=390) for rank in crew]
    assert [answer.get("message") for answer in answers] == [None] * world
    for round_ in range(ROUNDS):
        seen = [answer["rounds"][round_] for answer in answers]
        assert sum(one["created"] for one in seen) == 1
        assert len({one["inode"] for one in seen}) == 1
        assert not any(one["named"] for one in seen)
    assert not path.exists()


@pytest.mark.slow
def test_sixty_four_processes_in_one_round(ranks, name, path):
    world = 64
    crew = ranks.start_many(world)
    for index, rank in enumerate(crew):
        rank.send("cohort_rounds", name=name, size=4 * MIB, count=1, rank=index, world=world)
    answers = [rank.answer(timeout=60) for rank in crew]
    assert [answer.get("message") for answer in answers] == [None] * world
    assert sum(answer["rounds"][0]["created"] for answer in answers) == 1
    assert len({answer["rounds"][0]["inode"] for answer in answers}) == 1


@pytest.mark.slow
def test_256_ranks_as_tasks_of_one_loop(run, name):
    async def rank(index):
        async with aioshm.open_region(name, 4 * MIB, local_rank=index, local_world_size=256, timeout=60) as region:
            return region.created

    async def main():
        return await asyncio.gather(*map(rank, range(256)))

    assert sum(run(main())) == 1


def test_the_slowest_poller_sees_the_release_when_all_others_have_left(run, monkeypatch, name, path):
    """Rank 0 looks, sees one missing, and then does not look again before everybody else is done and gone."""
    gate = asyncio.Event()
    slept = asyncio.Event()
    make_bell = _roster.Roster._bell

    class Deaf(Bell):
        async def wait(self, at_most=None):
            slept.set()
            await gate.wait()

    def bell(roster):
        return Deaf(roster._description) if roster._request.local_rank == 0 else make_bell(roster)

    monkeypatch.setattr(_roster.Roster, "_bell", bell)

    async def rank(index):
        async with aioshm.open_region(name, MIB, local_rank=index, local_world_size=3) as region:
            region.buffer[index] = index + 1
            if index == 0:
                assert list(region.buffer[:3]) == [1, 2, 3]

    async def main():
        slowest = asyncio.ensure_future(rank(0))
        await slept.wait()
        await asyncio.gather(rank(1), rank(2))
        assert not path.exists()
        gate.set()
        await slowest

    run(main())


def test_no_rank_that_finished_is_ever_called_lost(run, name):
    """Ranks leave the moment they are released, while others have yet to look: many times, in random order."""

    async def rank(index, world):
        await asyncio.sleep(random.random() * 0.003)
        async with aioshm.open_region(name, MIB, local_rank=index, local_world_size=world):
            pass

    async def main():
        for _ in range(60):
            await asyncio.gather(*(rank(index, 6) for index in range(6)))

    run(main())
    assert not os.path.exists(f"/dev/shm/aioshm-{os.geteuid()}-{name}")


def test_a_dead_rank_started_again_while_its_death_is_noticed_completes_the_cohort(run, monkeypatch, ranks, name, path):
    """Either all are released or none: never one that is, with marks of others that have just given up."""
    dying, again = ranks.start_many(2)
    options = {"local_rank": 0, "local_world_size": 2}
    dying.ask("stop_at", point="chunk")
    dying.send("open", name=name, size=4 * MIB, options=options)
    dying.wait_stopped()
    came: list[int] = []
    lost = _roster.Roster._lost

    def start_again(roster, *arguments):
        came.append(again.open(4 * MIB, **options)["inode"])
        return lost(roster, *arguments)

    async def main():
        async with aioshm.open_region(name, 4 * MIB, local_rank=1, local_world_size=2) as region:
            region.buffer[0] = 7

    async def both():
        other = asyncio.create_task(main())
        await asyncio.to_thread(wait_held, path, READY.at(1))
        monkeypatch.setattr(_roster.Roster, "_lost", start_again)
        dying.kill()
        await other

    run(both())
    assert len(came) == 1
    assert again.ask("read", offset=0, length=1) == {"text": "\7"}
    again.ask("close")
