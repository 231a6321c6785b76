"""Waiting that costs nothing: whatever happens to the file wakes who waits, and without inotify looks still do."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import threading
import time
import warnings

import pytest
from conftest import loop_factory

import aioshm
from aioshm import _bell, _libc
from aioshm._backoff import LONGEST, SHORTEST
from aioshm._bell import LONGEST_WITH_BELL, Bell
from aioshm._locks import BROKEN_BIT, READY_BIT, Description
from aioshm._threads import run_aside

MIB = 1 << 20
FOREVER = 1e6

HAPPENINGS = {
    "a bit is set": lambda other, path: other.mark(READY_BIT),
    "another bit is set": lambda other, path: other.mark(BROKEN_BIT),
    "it is sized": lambda other, path: os.ftruncate(other.fd, MIB),
    "its name is removed": lambda other, path: other.unlink(str(path)),
    "a description is closed": lambda other, path: other.close(),
    "somebody rings": lambda other, path: other.ring(),
}


@pytest.fixture
def description(path):
    description = Description(str(path), os.O_CREAT | os.O_EXCL)
    yield description
    description.close()
    path.unlink(missing_ok=True)


@pytest.fixture
def no_net(monkeypatch):
    """Let nobody look again unless it rang."""
    monkeypatch.setattr(_bell, "backoff", lambda longest=0: itertools.repeat(FOREVER))


@pytest.fixture
def no_inotify():
    """Use up this user's inotify instances."""
    taken = []
    try:
        while len(taken) < 10_000:
            taken.append(_libc.inotify_init())
    except OSError:
        yield
    else:
        pytest.skip("this user has more inotify instances than a test should take")
    finally:
        for fd in taken:
            os.close(fd)


@pytest.fixture
def someone_waits(monkeypatch):
    """An event that is set when somebody waits for a bell."""
    waits, wait = asyncio.Event(), Bell.wait

    async def noted(bell, at_most=None):
        waits.set()
        await wait(bell, at_most)

    monkeypatch.setattr(Bell, "wait", noted)
    return waits


async def soon(awaitable):
    async with asyncio.timeout(10):
        return await awaitable


@pytest.mark.parametrize("happening", HAPPENINGS.values(), ids=HAPPENINGS.keys())
def test_what_happens_to_the_file_wakes(run, no_net, description, path, happening):
    async def main():
        other = Description(str(path), 0)
        try:
            with Bell(description) as bell:
                waiting = asyncio.create_task(bell.wait())
                await asyncio.sleep(0)
                happening(other, path)
                await soon(waiting)
        finally:
            other.close()

    run(main())


def test_what_happened_between_two_waits_is_not_lost(run, no_net, description):
    async def main():
        with Bell(description) as bell:
            description.ring()
            await soon(bell.wait())
            description.ring()
            await asyncio.sleep(0.01)  # it is read, and nobody waits
            await soon(bell.wait())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await bell.wait()

    run(main())


def test_the_death_of_who_has_it_open_wakes(run, no_net, ranks, name, path):
    rank = ranks.start()
    rank.open(MIB)
    description = Description(str(path), 0)

    async def main():
        with Bell(description) as bell:
            waiting = asyncio.create_task(bell.wait())
            await asyncio.sleep(0)
            rank.process.kill()
            await soon(waiting)

    run(main())
    rank.process.wait(10)
    description.close()
    path.unlink()


def test_rung_all_the_time_it_rests_between_looks(run, no_net, description):
    rest, looks = 0.02, 0

    async def main():
        nonlocal looks
        loop = asyncio.get_running_loop()
        with Bell(description, rest=rest) as bell:
            began = loop.time()
            while looks < 10:
                description.ring()
                await soon(bell.wait())
                looks += 1
            return loop.time() - began

    assert run(main()) >= 10 * rest


def test_the_rest_is_no_longer_than_whoever_waits_has_time(run, no_net, description):
    async def main():
        with Bell(description, rest=FOREVER) as bell:
            description.ring()
            await soon(bell.wait(0.01))

    run(main())


def test_whose_time_is_up_looks_with_pauses_all_the_same(run, no_net, description):
    async def main():
        loop = asyncio.get_running_loop()
        with Bell(description) as bell:
            began = loop.time()
            for _ in range(20):
                await soon(bell.wait(0.0))
            return loop.time() - began

    assert run(main()) >= 0.01


def test_once_rung_the_pauses_begin_short_again(run, monkeypatch, description):
    begun = []

    def backoff(longest=LONGEST):
        begun.append(longest)
        yield from (SHORTEST, FOREVER)

    monkeypatch.setattr(_bell, "backoff", backoff)

    async def main():
        with Bell(description) as bell:
            await soon(bell.wait())
            asyncio.get_running_loop().call_later(0.01, description.ring)
            await soon(bell.wait())  # rung, for the second pause has no end
            await soon(bell.wait())

    run(main())
    assert begun == [LONGEST_WITH_BELL, LONGEST_WITH_BELL]


class TestRegions:
    """With no net under them: a wait that nothing rings for would never end."""

    def test_a_joiner_is_let_in(self, run, no_net, name, someone_waits):
        async def main():
            ends, begun = asyncio.Event(), asyncio.Event()

            async def initialize(region):
                region.buffer[0] = 7
                begun.set()
                await ends.wait()

            async def create():
                async with aioshm.open_region(name, MIB, initialize=initialize):
                    await joined.wait()

            async def join():
                async with aioshm.open_region(name, MIB) as region:
                    joined.set()
                    return region.created, region.buffer[0]

            joined = asyncio.Event()
            creator = asyncio.create_task(create())
            await begun.wait()
            joiner = asyncio.create_task(join())
            await soon(someone_waits.wait())
            ends.set()
            assert await soon(joiner) == (False, 7)
            await creator

        run(main())

    @pytest.mark.parametrize("initialized", [False, True])
    def test_a_cohort_is_released(self, run, no_net, name, path, initialized):
        async def rank(index):
            async def initialize(region):
                region.buffer[0] = 7

            await asyncio.sleep(0.01 * index)
            async with aioshm.open_region(
                name, MIB, local_rank=index, local_world_size=4, initialize=initialize if initialized else None
            ) as region:
                assert not path.exists()
                return region.buffer[0]

        async def main():
            return await soon(asyncio.gather(*map(rank, range(4))))

        assert run(main()) == [7 if initialized else 0] * 4

    def test_who_waits_for_a_creator_that_fails_starts_over(self, run, no_net, name, someone_waits):
        async def main():
            begun, fails = asyncio.Event(), asyncio.Event()

            async def initialize(region):
                begun.set()
                await fails.wait()
                raise ValueError("as told")

            async def create():
                async with aioshm.open_region(name, MIB, initialize=initialize):
                    pass

            async def join():
                async with aioshm.open_region(name, MIB) as region:
                    return region.created

            creator = asyncio.create_task(create())
            await begun.wait()
            joiner = asyncio.create_task(join())
            await soon(someone_waits.wait())
            fails.set()
            assert await soon(joiner)
            with pytest.raises(ValueError, match="as told"):
                await creator

        run(main())


class TestWithoutInotify:
    @pytest.mark.usefixtures("no_inotify")
    def test_looks_wake_all_the_same(self, run, name, path):
        async def rank(index):
            await asyncio.sleep(0.01 * index)
            async with aioshm.open_region(name, MIB, local_rank=index, local_world_size=3):
                return not path.exists()

        async def main():
            return await soon(asyncio.gather(*map(rank, range(3))))

        assert run(main()) == [True] * 3

    @pytest.mark.usefixtures("no_inotify")
    def test_the_looks_come_at_their_old_pace(self, run, description):
        async def main():
            with Bell(description) as bell:
                assert bell._longest == LONGEST
                await soon(bell.wait())

        run(main())

    def test_a_watch_that_is_refused_leaves_no_descriptor(self, monkeypatch, description):
        def refuse(fd, path):
            raise OSError(28, "no more watches")

        monkeypatch.setattr(_libc, "inotify_add_watch", refuse)
        assert description.watch() is None  # the guard looks for the descriptor


@pytest.mark.parametrize("refusal", [NotImplementedError, OSError(errno.ENOSPC, "no more watches")])
def test_a_loop_that_does_not_watch_descriptors(run, monkeypatch, description, refusal):
    def refuse(*_):
        raise refusal

    async def main():
        if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)
        else:
            pytest.skip("uvloop's methods cannot be replaced")
        with Bell(description) as bell:
            assert bell._longest == LONGEST
            await soon(bell.wait())

    run(main())


@pytest.mark.parametrize("threads", [True, False], ids=["in a thread", "where there are no threads"])
def test_the_loop_does_not_wait_for_a_watch_to_be_closed(run, monkeypatch, description, threads):
    """Closing an inotify descriptor takes the kernel up to 20 ms."""
    closers, closed, close = [], threading.Event(), os.close

    def note(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:inotify":
            closers.append(threading.current_thread() is threading.main_thread())
            closed.set()
        close(fd)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    async def main():
        monkeypatch.setattr(os, "close", note)
        if not threads:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        with Bell(description):
            pass
        assert closed.wait(10)
        monkeypatch.undo()

    run(main())
    assert closers == [not threads]


def test_a_wait_that_is_closed_after_its_loop_leaves_no_descriptor(description):
    async def wait():
        with Bell(description) as bell:
            while True:
                await bell.wait()

    async def begin():
        waiting = wait()
        waiting.send(None)
        return waiting

    loop = (loop_factory() or asyncio.new_event_loop)()
    waiting = loop.run_until_complete(begin())
    loop.close()
    waiting.close()  # the guard looks for the descriptor


@pytest.mark.parametrize("world", [None, 2])
def test_where_nobody_may_ring_the_region_opens_all_the_same(run, name, path, monkeypatch, world):
    """Nor is a region emptied by its creator under those whom it has let in already."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "as of an immutable file")

    async def open_as(rank):
        places = {} if world is None else {"local_rank": rank, "local_world_size": world}
        async with aioshm.open_region(name, MIB, **places) as region:
            return region.size

    async def main():
        return await soon(asyncio.gather(*map(open_as, range(2))))

    monkeypatch.setattr(os, "utime", refuse)
    assert run(main()) == [MIB, MIB]
    assert not path.exists()


def test_a_forked_child_has_no_part_in_it(description):
    fd = description.watch()
    child = os.fork()
    if not child:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    description.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_who_closes_waits_for_the_watch_to_be_closed(description):
    """So nothing is left of an open that was cancelled."""
    goes_on = threading.Event()
    description.watch()
    description.unwatch(lambda close: run_aside(lambda: (goes_on.wait(10), close()), name="test"))
    assert description.is_slow_to_close
    closing = threading.Thread(target=description.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    goes_on.set()
    closing.join(10)
    assert not closing.is_alive()


def test_a_forked_child_does_not_wait_for_it(description):
    goes_on = threading.Event()
    description.watch()
    description.unwatch(lambda close: run_aside(lambda: (goes_on.wait(10), close()), name="test"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, and that is the point
        child = os.fork()
    if not child:
        os._exit(0 if description.closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not goes_on.is_set()
    goes_on.set()


@pytest.mark.slow
def test_waiting_costs_a_hundredth_of_a_processor_at_most(run, name, someone_waits):
    """CPU of this process, which does nothing but wait, in relation to the time that passes."""

    async def join():
        async with aioshm.open_region(name, MIB, local_rank=0, local_world_size=2):
            pass

    async def main():
        joining = asyncio.create_task(join())
        await soon(someone_waits.wait())
        await asyncio.sleep(0.5)  # the pauses have grown
        began, used = time.monotonic(), cpu_seconds()
        await asyncio.sleep(3)
        share = (cpu_seconds() - used) / (time.monotonic() - began)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        return share

    assert run(main()) < 0.01


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
