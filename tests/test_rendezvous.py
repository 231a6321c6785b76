"""Entering: stubs, leftovers, mismatches, a name that others delete, a gate that others hold."""

from __future__ import annotations

import asyncio
import os

import pytest
from ranks import RankError
from tracing import traced

import aioshm
from aioshm import _rendezvous
from aioshm._locks import GATE, READY_BIT, WORLD, Description

MIB = 1 << 20


def open_region(name, size=MIB, **options):
    return aioshm.open_region(name, size, threads=1, **options)


@pytest.fixture
def outsider(path):
    """Return what opens the region's file as another process would: a description with locks of its own."""
    opened = []

    def make(*, size: int | None = None, ready: bool = False) -> Description:
        description = Description(str(path), os.O_CREAT)
        opened.append(description)
        if size is not None:
            os.ftruncate(description.fd, size)
        if ready:
            os.fchmod(description.fd, 0o600 | READY_BIT)
        return description

    yield make
    for description in opened:
        description.close()
    path.unlink(missing_ok=True)


def test_abandoned_stub_is_taken_over_at_once(run, name, path):
    """vllm #50358: its maker died between open and ftruncate, and the others wait for 30 s."""

    async def main():
        path.touch(mode=0o600)
        inode = path.stat().st_ino
        async with asyncio.timeout(1), open_region(name) as region:
            assert region.created
            assert not region.report.recycled
            assert path.stat().st_ino == inode
            assert path.stat().st_size == MIB

    run(main())
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o600, 0o700], ids=["never finished", "finished"])
@pytest.mark.parametrize("size", [MIB, 3 * MIB, 7])
def test_leftover_is_recycled_and_zero_filled(run, name, path, mode, size):
    async def main():
        path.write_bytes(b"\xaa" * size)
        path.chmod(mode)
        inode = path.stat().st_ino
        async with asyncio.timeout(1), open_region(name) as region:
            assert region.created
            assert region.report.recycled
            assert bytes(region.buffer) == bytes(MIB)
            assert path.stat().st_ino != inode
        assert not path.exists()

    run(main())


def test_leftover_is_made_anew_by_one_of_many(run, name, path):
    async def main():
        path.write_bytes(b"\xaa" * MIB)
        path.chmod(0o700)
        openings = [open_region(name) for _ in range(6)]
        regions = await asyncio.gather(*(opening.__aenter__() for opening in openings))
        assert sum(region.created for region in regions) == 1
        assert not any(any(region.buffer[:100]) for region in regions)
        await asyncio.gather(*(region.aclose() for region in regions))
        assert not path.exists()

    run(main())


@pytest.mark.parametrize("asked", [MIB - 1, MIB + 1, 1, 5 * MIB])
def test_size_mismatch_names_both_and_leaves_the_living_alone(run, name, path, asked):
    """CPython #153279: an attach that failed destroyed the owner's block."""

    async def main():
        async with open_region(name) as region:
            region.buffer[:5] = b"alive"
            with pytest.raises(aioshm.RegionMismatchError, match=rf"size {MIB}\b.* size {asked}\b") as caught:
                await open_region(name, asked).__aenter__()
            assert (caught.value.field, caught.value.expected, caught.value.found) == ("size", asked, MIB)
            assert path.exists()
            async with open_region(name) as other:
                assert not other.created
                assert bytes(other.buffer[:5]) == b"alive"
        assert not path.exists()

    run(main())


def test_mismatching_joiner_that_is_the_last_one_out_removes_the_name(run, name, path, monkeypatch):
    """It has the gate, those inside leave and see it there, and only then it finds that it does not fit."""
    real = _rendezvous._check_size

    async def main():
        region = await open_region(name).__aenter__()

        def leave_first(*arguments):
            assert not region._tenancy.seat.leave()
            assert path.exists()
            real(*arguments)

        monkeypatch.setattr(_rendezvous, "_check_size", leave_first)
        with pytest.raises(aioshm.RegionMismatchError):
            await open_region(name, 2 * MIB).__aenter__()
        assert not path.exists()
        await region.aclose()

    run(main())


@pytest.mark.parametrize("successor", [False, True])
def test_name_deleted_while_forming(run, name, path, successor):
    """It could never be found, so nobody gets it; what stands at the path by then is somebody else's."""

    async def main():
        def clean_up(_):
            if path.exists() and path.stat().st_size:
                path.unlink()
                if successor:
                    path.write_bytes(b"mine")

        with pytest.raises(aioshm.RegionRemovedError, match="deleted while the region was being made") as caught:
            await open_region(name, on_progress=clean_up).__aenter__()
        assert caught.value.path == str(path)
        if successor:
            assert path.read_bytes() == b"mine"
            path.unlink()
        assert not path.exists()

    run(main())


def test_joiner_of_a_region_deleted_while_forming_makes_its_own(run, name, path, outsider):
    async def main():
        maker = outsider()
        assert maker.try_exclusive(GATE)
        task = asyncio.create_task(open_region(name).__aenter__())
        await asyncio.sleep(0)
        path.unlink()
        maker.close()
        region = await asyncio.wait_for(task, 1)
        assert region.created
        assert path.exists()
        await region.aclose()
        assert not path.exists()

    run(main())


def test_name_deleted_while_live_does_not_disturb_the_living(run, name, path):
    async def main():
        first = await open_region(name).__aenter__()
        second = await open_region(name).__aenter__()
        path.unlink()
        first.buffer[3] = 33
        assert second.buffer[3] == 33
        third = await open_region(name).__aenter__()  # nobody can find the old one: this is another
        assert third.created
        assert third.buffer[3] == 0
        inode = path.stat().st_ino
        await first.aclose()
        assert second.buffer[3] == 33
        await second.aclose()  # the last one out of the old, which owns the name no more
        assert path.stat().st_ino == inode
        async with open_region(name) as fourth:
            assert not fourth.created
        await third.aclose()
        assert not path.exists()

    run(main())


def test_name_deleted_between_open_and_look_is_not_joined(run, name, path, monkeypatch):
    """Nobody else could join there, and two regions of one name would each take themselves for the one."""
    real = _rendezvous._open
    opened = []

    def then_delete(request):
        opened.append(real(request))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    async def main():
        async with open_region(name) as first:
            monkeypatch.setattr(_rendezvous, "_open", then_delete)
            async with open_region(name) as second:
                assert second.created
                assert path.stat().st_ino == second._tenancy.seat.description.status().st_ino
            assert not first.closed

    run(main())
    assert len(opened) == 2


@pytest.mark.parametrize("size", [0, MIB])
@pytest.mark.parametrize("timeout", [0, 0.2])
def test_gate_held_by_one_that_never_finishes_times_out(run, name, path, outsider, size, timeout):
    """A shared gate over a region without the ready bit: nobody is at work, and nobody may take it away."""

    async def main():
        stranger = outsider(size=size)
        assert stranger.try_shared(GATE)
        with pytest.raises(aioshm.JoinTimeoutError, match="neither finishes nor abandons") as caught:
            async with asyncio.timeout(5):
                await open_region(name, timeout=timeout).__aenter__()
        assert caught.value.waited >= timeout
        assert (caught.value.name, caught.value.path) == (name, str(path))
        assert path.stat().st_ino == stranger.status().st_ino
        assert stranger.try_exclusive(GATE)  # the one that gave up holds nothing

    run(main())


def test_gate_that_is_let_go_in_time_is_taken(run, name, path, outsider):
    async def main():
        stranger = outsider(size=MIB)
        assert stranger.try_shared(GATE)
        task = asyncio.create_task(open_region(name, timeout=None).__aenter__())
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        stranger.close()
        region = await asyncio.wait_for(task, 1)
        assert region.created
        assert region.report.recycled
        assert region.report.wait_seconds >= 0.1
        await region.aclose()

    run(main())


def test_living_creator_is_never_timed_out(run, name, outsider):
    async def main():
        maker = outsider()
        assert maker.try_exclusive(GATE)
        task = asyncio.create_task(open_region(name, timeout=0.05).__aenter__())
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        os.ftruncate(maker.fd, MIB)
        os.fchmod(maker.fd, 0o600 | READY_BIT)
        assert maker.try_shared(WORLD.at(0))
        assert maker.try_shared(GATE)
        region = await asyncio.wait_for(task, 1)
        assert not region.created
        await region.aclose()
        assert maker.try_exclusive(GATE)

    run(main())


def test_time_spent_waiting_for_a_living_creator_is_not_counted(run, name, outsider):
    """Only when it dies and leaves another holding the gate does the clock start."""

    async def main():
        maker, stranger = outsider(), outsider()
        assert maker.try_exclusive(GATE)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(open_region(name, timeout=0.3).__aenter__())
        await asyncio.wait([task], timeout=0.4)
        assert maker.try_shared(GATE)
        assert stranger.try_shared(GATE)
        idle = loop.time()
        maker.close()
        with pytest.raises(aioshm.JoinTimeoutError) as caught:
            await task
        assert loop.time() - idle > 0.25
        assert caught.value.waited < 0.4 + 0.3

    run(main())


def test_another_local_world_size_is_named(run, name, path, outsider):
    async def main():
        member = outsider(size=MIB, ready=True)
        assert member.try_shared(GATE)
        assert member.try_shared(WORLD.at(4))
        with pytest.raises(
            aioshm.RegionMismatchError, match="exists as a cohort of 4 ranks, but was opened without ranks"
        ) as caught:
            await open_region(name).__aenter__()
        assert (caught.value.field, caught.value.expected, caught.value.found) == ("local_world_size", 0, 4)
        assert path.exists()
        member.unlock(WORLD)
        assert member.try_shared(WORLD.at(0))
        async with open_region(name) as region:
            assert not region.created
        assert path.exists()
        assert member.try_exclusive(GATE)

    run(main())


@pytest.mark.parametrize("call", ["ftruncate", "fchmod"])
def test_fault_while_forming_passes_raw_and_leaves_nothing(ranks, name, path, call):
    rank = ranks.start()
    rank.ask("hook", call="warm_up")
    with traced(rank.pid, f"{call}:error=EIO", path=path), pytest.raises(RankError) as caught:
        rank.open(MIB)
    assert caught.value.answer["error"] == "OSError"
    assert not path.exists()
    assert rank.ask("memory") == {"mapped": [], "descriptions": 0}
    assert rank.open(MIB)["created"]
    rank.ask("close")
