"""A cohort of ranks: arrival, shares, release, and each of its errors, as tasks and as processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading

import pytest
from conftest import loop_factory
from ranks import RankError
from table import wait_held

import aioshm
from aioshm._locks import CLAIM
from aioshm._open import _share

MIB = 1 << 20


def open_rank(name, rank, world, size=4 * MIB, **options):
    return aioshm.open_region(name, size, local_rank=rank, local_world_size=world, **options)


def cohort(rank, world, **options):
    return {"local_rank": rank, "local_world_size": world, **options}


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_all_ranks_share_one_region_whose_name_is_gone(run, name, path, world):
    async def rank(index):
        async with open_rank(name, index, world) as region:
            assert not path.exists()
            assert (region.local_rank, region.local_world_size) == (index, world)
            region.buffer[index] = index + 1
            arrived.append(index)
            if len(arrived) == world:
                everybody.set()
            await everybody.wait()
            assert list(region.buffer[:world]) == [n + 1 for n in range(world)]
            return region

    arrived: list[int] = []
    everybody = asyncio.Event()

    async def main():
        regions = await asyncio.gather(*map(rank, range(world)))
        assert sum(region.created for region in regions) == 1
        assert sum(region.report.populated for region in regions) == 4 * MIB

    run(main())


def test_shares_cover_the_region_once_on_huge_page_borders(run, name):
    class Fake:
        length, page = 11 * MIB + 4096, 4096

    for world in (1, 2, 3, 5, 8):
        requests = [type("Request", (), cohort(rank, world, is_cohort=True)) for rank in range(world)]
        shares = [_share(request, Fake) for request in requests]
        assert shares[0].start == 0
        assert shares[-1].stop == Fake.length
        assert all(one.stop == other.start for one, other in itertools.pairwise(shares))
        assert all(share.start % (2 * MIB) == 0 for share in shares)


def test_every_rank_has_the_whole_region_after_the_release(ranks, name):
    first, second = ranks.start_many(2)
    for index, rank in enumerate((first, second)):
        rank.send("open", name=name, size=8 * MIB, options=cohort(index, 2))
    answers = [rank.answer() for rank in (first, second)]
    assert {answer["inode"] for answer in answers} == {answers[0]["inode"]}
    assert [answer["report"]["populated"] for answer in answers] == [4 * MIB, 4 * MIB]
    first.ask("write", offset=7 * MIB, text="in the other's share")
    assert second.ask("read", offset=7 * MIB, length=20)["text"] == "in the other's share"


def test_ranks_in_threads_with_a_loop_each(run, name, path):
    world, seen = 6, []

    async def rank(index):
        async with open_rank(name, index, world) as region:
            seen.append((region.created, os.fstat(region._tenancy.seat.description.fd).st_ino))

    def thread(index):
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(rank(index))

    threads = [threading.Thread(target=thread, args=(index,)) for index in range(world)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(seen) == world
    assert len({inode for _, inode in seen}) == 1
    assert sum(created for created, _ in seen) == 1
    assert not path.exists()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_may_arrive_in_any_order_and_anyhow(run, ranks, name, path, seed):
    """Two processes, and two tasks here; each comes only when the one before it is inside, or has made the region."""
    world = 4
    order = random.Random(seed).sample(range(world), world)
    crew = dict(zip(order[:2], ranks.start_many(2), strict=True))

    async def main():
        tasks = []
        for index in order:
            if index in crew:
                crew[index].send("open", name=name, size=4 * MIB, options=cohort(index, world))
            else:
                tasks.append(asyncio.ensure_future(enter(index)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        for rank in crew.values():
            assert "error" not in rank.answer()

    async def enter(index):
        async with open_rank(name, index, world):
            assert not path.exists()

    run(main())


def test_missing_ranks_are_named_and_told_that_ranks_are_per_host(run, name, path):
    async def main():
        return await asyncio.gather(late(0), late(2), return_exceptions=True)

    async def late(index):
        async with open_rank(name, index, 4, timeout=0.3):
            pytest.fail("ranks 1 and 3 never came")

    # The second may see the first give up a moment before its own time is up.
    errors = run(main())
    first = next(error for error in errors if isinstance(error, aioshm.JoinTimeoutError))
    assert isinstance(first, TimeoutError)
    assert first.missing == (1, 3)
    assert first.local_world_size == 4
    assert "Local ranks 1, 3 of 4 never came" in str(first)
    assert "Ranks are local" in str(first)
    for error in errors:
        assert isinstance(error, (aioshm.JoinTimeoutError, aioshm.PeerLostError))
        assert error.missing == (1, 3)
    assert not path.exists()


def test_a_peer_that_gave_up_is_lost_and_says_who_never_came(ranks, name, path):
    patient, hasty = ranks.start_many(2)
    patient.send("open", name=name, size=MIB, options=cohort(0, 3, timeout=60))
    hasty.send("open", name=name, size=MIB, options=cohort(1, 3, timeout=0.5))
    assert hasty.answer()["error"] == "JoinTimeoutError"
    answer = patient.answer()
    assert answer["error"] == "PeerLostError"
    assert f"rank 1 (pid {hasty.pid}) went away" in answer["message"]
    assert "Local rank 2 had never come." in answer["message"]
    assert not path.exists()


def test_a_taken_rank_is_refused_and_its_owner_left_alone(ranks, name, path):
    owner, twin, last = ranks.start_many(3)
    owner.send("open", name=name, size=MIB, options=cohort(0, 2))
    wait_held(path, CLAIM.at(0))
    with pytest.raises(RankError) as caught:
        twin.open(MIB, **cohort(0, 2))
    assert caught.value.answer["error"] == "RankInUseError"
    assert caught.value.answer["facts"]["local_rank"] == 0
    assert caught.value.answer["facts"]["pid"] == owner.pid
    last.open(MIB, **cohort(1, 2))
    assert "error" not in owner.answer()


@pytest.mark.parametrize(
    ("options", "mismatch"),
    [
        (cohort(1, 3), ("local_world_size", 3, 2)),
        (cohort(None, None), ("local_world_size", 0, 2)),
        (cohort(1, 2, size=2 * MIB), ("size", 2 * MIB, MIB)),
    ],
    ids=["another world size", "no cohort", "another size"],
)
def test_a_rank_of_another_cohort_is_refused(ranks, name, path, options, mismatch):
    first, stranger, second = ranks.start_many(3)
    first.send("open", name=name, size=MIB, options=cohort(0, 2))
    wait_held(path, CLAIM.at(0))
    size = options.pop("size", MIB)
    with pytest.raises(RankError) as caught:
        stranger.open(size, **options)
    answer = caught.value.answer
    assert answer["error"] == "RegionMismatchError"
    assert tuple(answer["facts"][fact] for fact in ("field", "expected", "found")) == mismatch
    second.open(MIB, **cohort(1, 2))
    assert "error" not in first.answer()


def test_a_name_deleted_from_outside_is_said_so(ranks, name, path):
    first = ranks.start()
    first.send("open", name=name, size=MIB, options=cohort(0, 2))
    wait_held(path, CLAIM.at(0))
    path.unlink()
    assert first.answer()["error"] == "RegionRemovedError"


def test_a_late_stranger_gets_a_time_out_and_no_second_region(ranks, name, path):
    crew = ranks.start_many(2)
    for index, rank in enumerate(crew):
        rank.send("open", name=name, size=MIB, options=cohort(index, 2))
    assert all("error" not in rank.answer() for rank in crew)
    stranger = ranks.start()
    with pytest.raises(RankError) as caught:
        stranger.ask("open", name=name, size=MIB, options=cohort(1, 2, timeout=0.3))
    assert caught.value.answer["error"] == "JoinTimeoutError"
    assert not path.exists()


def test_two_cohorts_of_one_name_one_after_the_other_are_two_regions(run, name):
    async def rank(index, round_):
        async with open_rank(name, index, 3, size=MIB) as region:
            clean = region.buffer[index] == 0
            region.buffer[index] = round_
            return clean

    async def main():
        for round_ in range(1, 4):
            assert all(await asyncio.gather(*(rank(index, round_) for index in range(3))))

    run(main())


def test_initialize_runs_once_on_the_creator_when_all_is_populated(run, name):
    calls = []

    async def initialize(region):
        calls.append(region.local_rank)
        assert region.created
        assert os.fstat(region._tenancy.seat.description.fd).st_blocks * 512 == 4 * MIB
        region.buffer[:5] = b"hello"

    async def rank(index):
        async with open_rank(name, index, 4, initialize=initialize) as region:
            assert bytes(region.buffer[:5]) == b"hello"
            return region.created

    async def main():
        assert sum(await asyncio.gather(*map(rank, range(4)))) == 1

    run(main())
    assert len(calls) == 1


def test_initialize_that_raises_reaches_its_caller_raw_and_the_others_as_peer_lost(run, name, path):
    class BrokenError(Exception):
        pass

    async def initialize(region):
        raise BrokenError

    async def rank(index):
        async with open_rank(name, index, 3, initialize=initialize):
            pytest.fail("not to be entered")

    async def main():
        return await asyncio.gather(*map(rank, range(3)), return_exceptions=True)

    kinds = sorted(type(error).__name__ for error in run(main()))
    assert kinds == ["BrokenError", "PeerLostError", "PeerLostError"]
    assert not path.exists()


def test_initialize_without_a_cohort_precedes_every_joiner(run, name):
    async def initialize(region):
        await asyncio.sleep(0)
        region.buffer[:5] = b"hello"

    async def one():
        async with aioshm.open_region(name, MIB, initialize=initialize) as region:
            assert bytes(region.buffer[:5]) == b"hello"

    async def main():
        await asyncio.gather(*(one() for _ in range(5)))

    run(main())


def test_initialize_is_cancelled_when_a_peer_is_lost(run, ranks, name, path):
    peer = ranks.start()
    started = asyncio.Event()
    ended = []

    async def initialize(region):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def creator():
        async with open_rank(name, 0, 2, size=MIB, initialize=initialize):
            pytest.fail("not to be entered")

    async def main():
        task = asyncio.ensure_future(creator())
        await asyncio.to_thread(wait_held, path, CLAIM.at(0))
        peer.send("open", name=name, size=MIB, options=cohort(1, 2))
        await started.wait()
        peer.kill()
        with pytest.raises(aioshm.PeerLostError) as caught:
            await task
        assert caught.value.lost == (1,)
        assert caught.value.pids == (peer.pid,)

    run(main())
    assert ended == [True]
    assert not path.exists()
