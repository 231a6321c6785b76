"""The pace of populating: chunks of a time, no more threads than pay, some of a CPU quota left to the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest
from cgroups import CpuGroup
from hypothesis import given
from hypothesis import strategies as st

import aioshm
from aioshm import _cgroup, _libc, _pace
from aioshm._libc import HUGE_PAGE
from aioshm._pace import Rests, duty, next_chunk
from aioshm._populate import Populate
from aioshm._threads import StopFlag

MIB = 1 << 20


@given(chunk=st.integers(1, 32), busy=st.floats(0, 100), waiting=st.floats(0, 100))
def test_next_chunk_aims_at_its_time_in_whole_huge_pages(chunk, busy, waiting):
    length, elapsed = chunk * HUGE_PAGE, busy + waiting
    following = next_chunk(length, busy, elapsed, _pace.LARGEST_CHUNK)
    assert following % HUGE_PAGE == 0
    assert HUGE_PAGE <= following <= min(2 * length, _pace.LARGEST_CHUNK)
    by_this = following / length  # as many times what this one took
    assert following == HUGE_PAGE or busy * by_this <= 0.00202
    assert following == HUGE_PAGE or elapsed * by_this <= 0.00808
    larger = (following + HUGE_PAGE) / length
    assert following in (2 * length, _pace.LARGEST_CHUNK) or busy * larger > 0.00198 or elapsed * larger > 0.00792, (
        "it could have been larger"
    )


@pytest.mark.parametrize(
    ("quota", "cpus", "ranks", "threads", "expected"),
    [
        (None, 64, 1, 16, 1.0),
        (64, 64, 1, 16, 1.0),  # all processors together cannot use it up
        (2.5, 64, 1, 2, 1.0),  # neither can two threads
        (2, 64, 1, 2, 0.85),
        (0.5, 2, 1, 1, 0.425),
        (0.5, 2, 1, 2, 0.2125),
        (4, 64, 8, 1, 0.425),
    ],
)
def test_threads_of_all_ranks_use_85_percent_of_the_quota(quota, cpus, ranks, threads, expected):
    assert duty(quota, cpus=cpus, ranks=ranks, threads=threads) == pytest.approx(expected)


@given(
    share=st.floats(0.01, 0.99),
    chunks=st.lists(st.tuples(st.floats(1e-5, 0.02), st.floats(0, 0.2)), min_size=1, max_size=50),
)
def test_a_thread_is_never_busy_for_more_than_its_share_and_a_moment(share, chunks):
    """Chunks that take processor time, and time in which the thread is kept from working: no credit for long."""
    now = busy = 5.0
    rests, seen = Rests(share, now, busy), [(now, busy)]
    for work, idle in chunks:
        busy, now = busy + work, now + work + idle
        rest = rests.due(now, busy)
        assert rest == 0 or rest >= 0.001
        now += rest
        seen.append((now, busy))
        for then, before in seen[:-1]:
            assert busy - before <= (now - then + 0.012) * share + 1e-9


def test_a_thread_that_is_kept_from_working_does_not_rest():
    rests = Rests(0.5, 0.0, 0.0)
    assert rests.due(0.010, 0.010) == pytest.approx(0.010)  # to 0.020
    assert rests.due(0.035, 0.011) == 0.0
    assert rests.due(0.045, 0.021) == pytest.approx(0.010)  # the time it was kept from working is no credit


def test_a_rest_ends_when_the_work_is_to_stop():
    flag, began = StopFlag(), time.monotonic()
    threading.Timer(0.05, flag.set).start()
    flag.wait(30)
    assert flag
    flag.wait(30)
    assert time.monotonic() - began < 15


@pytest.fixture
def cpu_group():
    """Make a control group with a quota: `cpu_group(0.5)`; needs root."""
    made: list[CpuGroup] = []

    def make(quota: float) -> CpuGroup:
        group = CpuGroup.make(quota)
        if group is None:
            pytest.skip("no processor controller that this process may make groups in")
        made.append(group)
        return group

    yield make
    for group in made:
        group.remove()


@pytest.mark.root
@pytest.mark.parametrize(("quota", "threads"), [(1.5, 1), (0.5, 1), (64, None)])
def test_no_more_threads_than_the_quota(cpu_group, ranks, quota, threads):  # ranks go before their group does
    rank = ranks.start(preexec=cpu_group(quota).enter)
    expected = threads or min(3, len(os.sched_getaffinity(0)))
    assert rank.open(130 * MIB)["report"]["threads"] == expected
    rank.ask("close")


@pytest.mark.root
@pytest.mark.slow
def test_the_quota_is_not_used_up_in_the_middle_of_a_period(cpu_group, ranks):
    """In turns with threads that know no rest: for those the whole process stands still in every period."""
    group = cpu_group(0.2)
    rank = ranks.start(preexec=group.enter)
    rank.ask("hook", call="warm_up")
    stood_still = {"paced": 0.0, "flat out": 0.0}
    for _ in range(4):
        for way, share in (("paced", _pace._OF_QUOTA), ("flat out", 1e9)):
            rank.ask("hook", call="put", where="aioshm._pace._OF_QUOTA", value=share)
            time.sleep(0.2)  # what was used before is forgotten: another period
            before = group.throttled
            report = rank.open(128 * MIB, huge_pages="off")["report"]
            stood_still[way] += group.throttled - before
            assert report["threads"] == 1
            rank.ask("close")
    assert stood_still["flat out"] > 0.1
    assert stood_still["flat out"] > 4 * stood_still["paced"], stood_still


@pytest.fixture
def resting(monkeypatch):
    """Let every chunk be followed by a rest of many seconds, as under a quota of next to nothing."""
    monkeypatch.setattr(_cgroup, "own_cpu_quota", lambda: 1e-5)
    begun, wait = threading.Event(), StopFlag.wait

    def wait_and_tell(flag: StopFlag, seconds: float) -> None:
        assert seconds > 20
        begun.set()
        wait(flag, seconds)

    monkeypatch.setattr(StopFlag, "wait", wait_and_tell)
    return begun


def test_a_cancellation_ends_a_rest(run, name, path, resting):
    async def main():
        async def open_and_close() -> None:
            async with aioshm.open_region(name, 32 * MIB):
                pass

        task = asyncio.create_task(open_and_close())
        await asyncio.to_thread(resting.wait, 30)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 10

    run(main())
    assert not path.exists()


def test_closing_ends_a_rest(run, name, resting):
    async def main():
        async with aioshm.open_region(name, 32 * MIB, populate=False) as region:
            task = asyncio.create_task(region.populate())
            await asyncio.to_thread(resting.wait, 30)
            began = time.monotonic()
        assert time.monotonic() - began < 10
        with pytest.raises(aioshm.RegionClosedError):
            await task
        assert time.monotonic() - began < 10

    run(main())


def slice_of(thread: int) -> float:
    """Return a thread's slice of the scheduler in seconds, as far as the kernel says: only where it was built to."""
    try:
        lines = Path(f"/proc/self/task/{thread}/sched").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "se.slice":
            return int(value) / 1e9
    pytest.skip("this kernel does not tell a thread's slice")


def test_the_loop_has_a_shorter_slice_than_the_threads(run, name, monkeypatch):
    """So it goes first when it wakes up; and neither their share nor anybody else's is touched."""
    seen, take = {}, Populate._take

    def take_and_look(work, size):
        thread = threading.get_native_id()
        seen[thread] = slice_of(thread), os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)
        return take(work, size)

    monkeypatch.setattr(Populate, "_take", take_and_look)
    before = slice_of(threading.get_native_id())

    async def main():
        async with aioshm.open_region(name, 130 * MIB, threads=2):
            pass

    run(main())
    assert len(seen) == 2
    assert set(seen.values()) == {(_pace.SLICE_SECONDS, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))}
    assert slice_of(threading.get_native_id()) == before < _pace.SLICE_SECONDS


@pytest.mark.parametrize("unknown", ["machine", "policy", "call", "library"])
def test_where_a_slice_cannot_be_had_nothing_is_lost(run, name, monkeypatch, unknown):
    def refuse(_):
        raise OSError(errno.ENOSYS, "musl knows no policies")

    if unknown == "machine":
        monkeypatch.setattr(_libc, "_SCHED_SETATTR", None)
    elif unknown == "policy":
        monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_FIFO)
    elif unknown == "library":
        monkeypatch.setattr(os, "sched_getscheduler", refuse)
    else:
        monkeypatch.setattr(_libc, "_SCHED_SETATTR", 100_000)
    assert not _libc.try_slice(0.001)

    async def main():
        async with aioshm.open_region(name, 8 * MIB) as region:
            assert region.report.populated == 8 * MIB

    run(main())
