"""SIGKILL and SIGSTOP at any moment of making, joining, leaving: the others go on, and at most a leftover remains."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable

import pytest
from ranks import Rank, RankError
from tracing import traced

import aioshm
from aioshm import _rendezvous
from aioshm._locks import GATE, Description

MIB = 1 << 20
SIZE = 4 * MIB
OPTIONS = {"threads": 1}
WITHIN = 1.0  # seconds until another has taken over, or joined


@pytest.fixture
def looks(monkeypatch) -> Callable[[], asyncio.Event]:
    """Return a new event that is set at this process's next look at a region."""
    event = asyncio.Event()
    real = _rendezvous._look

    def look(*arguments):
        found = real(*arguments)
        event.set()
        return found

    def fresh() -> asyncio.Event:
        nonlocal event
        event = asyncio.Event()
        return event

    monkeypatch.setattr(_rendezvous, "_look", look)
    return fresh


def has_open(pid: int, path) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}") == str(path):
                return True
        except FileNotFoundError:
            continue
    return False


def gate_is_held(path) -> bool:
    try:
        description = Description(str(path), 0)
    except FileNotFoundError:
        return False
    try:
        return description.find_held(GATE) is not None
    finally:
        description.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_stopped(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def open_here(name, **options):
    return aioshm.open_region(name, SIZE, **OPTIONS, **options)


@pytest.mark.parametrize("waiting", [True, False], ids=["with a waiting joiner", "nobody waiting"])
def test_creator_killed_before_any_of_its_calls(run, ranks, name, path, looks, waiting):
    """The child is stopped before its nth call that others could notice, then killed; beginning to end."""
    forker = ranks.start()

    async def main():
        for point in itertools.count(1):
            at = forker.ask("hook", call="fork", name=name, size=SIZE, phase="enter", point=point, options=OPTIONS)[
                "at"
            ]
            opening = open_here(name)
            if waiting:
                looked = looks()
                task = asyncio.create_task(opening.__aenter__())
                await looked.wait()
                forker.ask("hook", call="end_child")
            else:
                forker.ask("hook", call="end_child")
                task = asyncio.create_task(opening.__aenter__())
            region = await asyncio.wait_for(task, WITHIN)
            assert bytes(region.buffer) == bytes(SIZE), at
            assert path.stat().st_size == SIZE
            assert region.created or waiting, at
            await region.aclose()
            assert not path.exists(), at
            if at == "inside":
                return point
        raise AssertionError

    assert run(main()) > 12  # open, three locks, ftruncate, mapping, advice, fchmod, downgrade: it did enumerate


@pytest.mark.parametrize("phase", ["enter", "leave"])
def test_joiner_killed_before_any_of_its_calls_leaves_the_living_alone(run, ranks, name, path, phase):
    forker = ranks.start()

    async def main():
        async with open_here(name) as mine:
            mine.buffer[8:16] = b"from two"
            for point in itertools.count(1):
                at = forker.ask("hook", call="fork", name=name, size=SIZE, phase=phase, point=point, options=OPTIONS)[
                    "at"
                ]
                forker.ask("hook", call="end_child")
                assert bytes(mine.buffer[8:16]) == b"from two", at
                async with asyncio.timeout(WITHIN), open_here(name) as other:
                    assert not other.created, at
                    assert bytes(other.buffer[8:16]) == b"from two", at
                assert path.exists()
                if at in ("inside", "outside"):
                    break
        assert not path.exists()
        return point

    assert run(main()) > 5


@pytest.mark.parametrize("watching", [True, False], ids=["with an opener beside", "nobody beside"])
def test_last_one_out_killed_before_any_of_its_calls(run, ranks, name, path, looks, watching):
    """Whoever comes next joins what the dying one still held, or makes it anew, zero-filled; a leftover is recycled."""
    forker = ranks.start()
    left_over = []

    async def main():
        for point in itertools.count(1):
            at = forker.ask("hook", call="fork", name=name, size=SIZE, phase="leave", point=point, options=OPTIONS)[
                "at"
            ]
            assert at != "died"
            opening = open_here(name)
            if watching:
                looked = looks()
                task = asyncio.create_task(opening.__aenter__())
                await looked.wait()
                forker.ask("hook", call="end_child")
            else:
                forker.ask("hook", call="end_child")
                left_over.append(path.exists())
                task = asyncio.create_task(opening.__aenter__())
            region = await asyncio.wait_for(task, WITHIN)
            assert region.created or watching, at
            assert region.report.recycled == (left_over[-1] if left_over else region.report.recycled), at
            assert bytes(region.buffer[:8]) == (bytes(8) if region.created else b"from one"), at
            assert not any(region.buffer[8:]), at
            await region.aclose()
            assert not path.exists(), at
            if at == "outside":
                return point
        raise AssertionError

    assert run(main()) >= 5  # the gate, unlink, munmap, close, and past the end
    if not watching:
        assert left_over[0]
        assert not left_over[-1]


@pytest.mark.parametrize("call", ["openat", "fcntl", "ftruncate", "madvise", "fchmod", "unlink"])
def test_killed_by_the_kernel_at_every_system_call_of_a_kind(run, ranks, name, path, call):
    """The same from outside: the tracer kills at the system call itself, in whichever thread makes it."""

    def answers(rank: Rank) -> bool:
        try:
            rank.answer()
        except RankError:
            return False
        return True

    async def main():
        for nth in itertools.count(1):
            rank = ranks.start()
            rank.ask("hook", call="warm_up")
            # madvise names addresses, not the file; the other calls matter for this file alone.
            with traced(rank.pid, f"{call}:signal=SIGKILL:when={nth}", path=None if call == "madvise" else path):
                rank.send("open", name=name, size=SIZE, options=OPTIONS)
                # Before it holds the gate, this process might become the maker, and the call in question never come.
                wait_until(lambda rank=rank: gate_is_held(path) or rank.process.poll() is not None)
                async with asyncio.timeout(2 * WITHIN), open_here(name) as region:  # what is traced is slow to die
                    assert not any(region.buffer)
                survived = answers(rank)
                if survived:  # it is the last one inside now
                    rank.send("close")
                    survived = answers(rank)
            async with asyncio.timeout(WITHIN), open_here(name) as region:
                assert region.created
                assert not any(region.buffer)
            assert not path.exists()
            if survived:
                return nth
        raise AssertionError

    assert run(main()) > 1


MOMENTS = {
    "before sizing": ("os.ftruncate", 1),
    "in preflight": ("aioshm._preflight.check", 1),
    "in populate": ("aioshm._libc.try_madvise", 5),
    "before the ready bit": ("os.fchmod", 1),
    "before the gate opens": ("aioshm._locks.Description.try_shared", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_several_wait_when_the_creator_is_killed_and_one_takes_over(ranks, name, path, moment):
    creator, *others = ranks.start_many(4)
    where, nth = MOMENTS[moment]
    creator.ask("hook", call="stop_at", where=where, nth=nth)
    creator.send("open", name=name, size=SIZE, options=OPTIONS)
    assert creator.answer() == {"stopped": where}
    for rank in others:
        rank.send("open", name=name, size=SIZE, options=OPTIONS)
    for rank in others:
        wait_until(lambda rank=rank: has_open(rank.pid, path))
        with pytest.raises(TimeoutError):  # it is not seen before it is finished: CPython #92408
            rank.answer(0)
    killed = time.monotonic()
    creator.kill()
    answers = [rank.answer() for rank in others]
    assert time.monotonic() - killed < WITHIN
    # Once the bit is set it is finished, and the first to look may join it without a creator.
    assert sum(answer["created"] for answer in answers) in ((0, 1) if moment == "before the gate opens" else (1,))
    assert len({answer["inode"] for answer in answers}) == 1
    others[0].ask("write", offset=SIZE - 5, text="alive")
    assert others[2].ask("read", offset=SIZE - 5, length=5)["text"] == "alive"
    for rank in others:
        rank.ask("close")
    assert not path.exists()


def test_creator_killed_after_finishing_is_not_missed(ranks, name, path):
    creator, second, late = ranks.start_many(3)
    made = creator.open(SIZE)
    creator.ask("write", offset=0, text="data of the dead")
    second.open(SIZE)
    creator.kill()
    assert second.ask("read", offset=0, length=16)["text"] == "data of the dead"
    joined = late.open(SIZE)
    assert (joined["created"], joined["inode"]) == (False, made["inode"])
    second.ask("close")
    assert late.ask("read", offset=0, length=16)["text"] == "data of the dead"
    late.ask("close")
    assert not path.exists()


def test_all_killed_inside_leave_one_file_that_the_next_open_recycles(ranks, name, path):
    first = ranks.start_many(3)
    for rank in first:
        rank.open(SIZE)
    first[0].ask("write", offset=0, text="old bytes")
    for rank in first:
        rank.kill()
    assert path.stat().st_size == SIZE  # nobody was left to remove it
    old = path.stat().st_ino
    second = ranks.start_many(4)
    for rank in second:
        rank.send("open", name=name, size=SIZE, options=OPTIONS)
    answers = [rank.answer() for rank in second]
    assert sorted(answer["created"] for answer in answers) == [False, False, False, True]
    assert any(answer["report"]["recycled"] for answer in answers)
    assert path.stat().st_ino == answers[0]["inode"]
    assert old != answers[0]["inode"]
    for rank in second:
        assert rank.ask("read", offset=0, length=9)["text"] == "\0" * 9
        rank.ask("close")
    assert not path.exists()


@pytest.mark.parametrize("moment", ["before sizing", "in populate"])
def test_creator_stopped_for_longer_than_the_timeout_is_waited_for(ranks, name, path, moment):
    creator, joiner = ranks.start_many(2)
    where, nth = MOMENTS[moment]
    creator.ask("hook", call="stop_at", where=where, nth=nth)
    creator.send("open", name=name, size=SIZE, options=OPTIONS)
    assert creator.answer() == {"stopped": where}
    wait_until_stopped(creator.pid)
    joiner.send("open", name=name, size=SIZE, options={**OPTIONS, "timeout": 0.2})
    with pytest.raises(TimeoutError):  # slowness is not punished: five times its time-out, and it still waits
        joiner.answer(1.0)
    creator.resume()
    made, joined = creator.answer(), joiner.answer(WITHIN)
    assert (made["created"], joined["created"]) == (True, False)
    assert made["inode"] == joined["inode"]
    joiner.ask("close")
    creator.ask("close")
    assert not path.exists()


def test_every_rank_has_the_error_of_a_creator_that_fails_its_check(ranks, name, path):
    """vllm #50358: the creator fails, the others wait 30 s on a stub. Here each finds out for itself, at once."""
    too_much = 1 << 50
    creator, *others = ranks.start_many(4)
    creator.ask("hook", call="stop_at", where="aioshm._preflight.check")
    creator.send("open", name=name, size=too_much, options={})
    assert creator.answer() == {"stopped": "aioshm._preflight.check"}
    wait_until_stopped(creator.pid)
    for rank in others:
        rank.send("open", name=name, size=too_much, options={})
    for rank in others:
        wait_until(lambda rank=rank: has_open(rank.pid, path))
    creator.resume()
    messages = [creator.answer()]
    failed = time.monotonic()
    messages += [rank.answer() for rank in others]
    assert time.monotonic() - failed < 0.1 * len(others)
    # /dev/shm without a limit of its own leaves the host's memory to say no.
    assert {message["error"] for message in messages} in ({"InsufficientSpaceError"}, {"InsufficientMemoryError"})
    assert not path.exists()
