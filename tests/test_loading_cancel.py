"""A load that is cancelled anywhere, in any way, leaves no file, no thread and no view, and writes nothing any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from cancelling import NOTHING, Stepper, Strike, Way, every_way, for_ever, held
from conftest import loop_factory
from reading import DATA, SIZE, find_open

import aioshm
from aioshm import _loading


@pytest.fixture(autouse=True)
def _as_many_reads_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast they are, so that waits can be counted."""
    monkeypatch.setattr(_loading, "_adapt", lambda size, *_: 2 * size)


async def count_suspensions(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Return at how many points it waits when nobody disturbs it."""
    stepper = Stepper(work())
    await stepper
    return stepper.suspensions


@every_way
def test_cancelled_at_every_wait(run, name, path, file, way: Way, caplog):
    async def main():
        async with aioshm.open_region(name, SIZE, threads=1) as region:
            before = held(path)
            load = aioshm.load_from(file)
            points = await count_suspensions(lambda: load(region))
            assert points > 6  # open, lend, seek, reads, close
            for point in range(1, points + 1):

                async def step(strike: Strike, point: int = point) -> None:
                    try:
                        await Stepper(load(region), at=point, strike=strike)
                    finally:
                        assert (held(path), find_open(file)) == (before, []), f"at wait {point}"
                    await for_ever()

                await way(step)
            await load(region)  # and it is still good for another
            right = bytes(region.buffer[: len(DATA)]) == DATA
            assert right
        assert held(path) == NOTHING

    with caplog.at_level(logging.WARNING, "aioshm"):
        run(main())
    assert caplog.text == ""  # no view was left


@every_way
def test_cancelled_as_initialize_at_every_wait(run, name, path, file, way: Way):
    load = aioshm.load_from(file)
    waits = 0

    async def act(initialize: Callable[[aioshm.Region], Awaitable[None]]) -> None:
        async with aioshm.open_region(
            name, SIZE, local_rank=0, local_world_size=1, threads=1, initialize=initialize
        ) as region:
            assert region.buffer[0] == DATA[0]

    async def count(region: aioshm.Region) -> None:
        nonlocal waits
        waits = await count_suspensions(lambda: load(region))

    async def main():
        await act(count)
        for point in range(1, waits + 1):

            async def step(strike: Strike, point: int = point) -> None:
                async def initialize(region: aioshm.Region) -> None:
                    await Stepper(load(region), at=point, strike=strike)

                try:
                    await act(initialize)
                finally:
                    assert (held(path), find_open(file)) == (NOTHING, []), f"at wait {point}"
                await for_ever()

            await way(step)

    run(main())


@every_way
def test_cancelled_in_the_middle_of_a_read(run, name, path, file, reads, way: Way):
    """The read is waited for, since the memory may be unmapped right after; and it is the last one."""

    async def main():
        loop = asyncio.get_running_loop()
        reading, go_on = asyncio.Event(), threading.Event()

        def hold(number: int) -> None:
            if number == 2:
                loop.call_soon_threadsafe(reading.set)
                assert go_on.wait(30)

        async def let_go_when_cancelled(load: Stepper, strike: Strike) -> None:
            try:
                await reading.wait()
                strike()
                while not load.thrown:  # noqa: ASYNC110 - nobody tells when it is
                    await asyncio.sleep(0)
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not load.finished, "the load is over, and its thread is still reading"
            finally:
                go_on.set()

        async def step(strike: Strike) -> None:
            load = Stepper(aioshm.load_from(file)(region))
            helper = asyncio.create_task(let_go_when_cancelled(load, strike))
            try:
                await load
            finally:
                assert (held(path), find_open(file)) == (before, [])
                assert helper.exception() is None
                assert len(reads.sizes) == reads.begun == 2
            await for_ever()

        reads.before = hold
        async with aioshm.open_region(name, SIZE, threads=1) as region:
            before = held(path)
            await way(step)
            done = sum(reads.sizes)
            right = bytes(region.buffer) == DATA[:done] + bytes(SIZE - done)
            assert right
        assert held(path) == NOTHING

    run(main())


@pytest.mark.parametrize("gone", [False, True], ids=["loop runs", "loop gone"])
def test_a_load_that_is_closed_leaves_nothing(name, path, file, gone: bool):
    """Dropped by a loop that was stopped, or by whoever drives it: nothing can be awaited any more."""
    load = aioshm.load_from(file)

    async def load_until(region: aioshm.Region, point: int) -> Coroutine[Any, Any, None]:
        """Drive it by hand to its wait number `point`."""
        coroutine = load(region)
        for _ in range(point - 1):
            waited_for = coroutine.send(None)
            waited_for._asyncio_future_blocking = False  # what a task does
            await asyncio.wait([waited_for])
        coroutine.send(None)
        return coroutine

    async def close_at(region: aioshm.Region, point: int) -> None:
        (await load_until(region, point)).close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        opening = aioshm.open_region(name, SIZE, threads=1)
        region = runner.run(opening.__aenter__())
        before = held(path)
        points = runner.run(count_suspensions(lambda: load(region)))
        for point in range(1, points + 1):
            if gone:
                with asyncio.Runner(loop_factory=loop_factory()) as other:
                    coroutine = other.run(load_until(region, point))
                coroutine.close()
            else:
                runner.run(close_at(region, point))
            assert (held(path), find_open(file)) == (before, []), f"at wait {point}"
        runner.run(opening.__aexit__(None, None, None))
    assert held(path) == NOTHING


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_thread_that_cannot_be_started_leaves_nothing(run, name, path, file, monkeypatch, limit):
    """As under a pids limit: of the threads that open, read and close it, so many can be started."""
    start = threading.Thread.start
    started: list[str] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("aioshm-load"):
            started.append(thread.name)
            if len(started) > limit:
                raise RuntimeError("can't start new thread")
        start(thread)

    async def main():
        async with aioshm.open_region(name, SIZE, threads=1) as region:
            before = held(path)
            monkeypatch.setattr(threading.Thread, "start", limited)
            with pytest.raises(RuntimeError, match="can't start") if limit < 2 else contextlib.nullcontext():
                await aioshm.load_from(file)(region)
            assert (held(path), find_open(file)) == (before, [])
            assert len(started) > limit
            loaded = bytes(region.buffer[: len(DATA)]) == DATA
            assert loaded == (limit == 2)

    run(main())
    assert held(path) == NOTHING


def test_two_at_a_time_do_not_disturb_each_other(run, name, file, reads):
    """One is cancelled in the middle of a read, the other goes on."""

    async def main():
        loop = asyncio.get_running_loop()
        both, go_on = asyncio.Event(), threading.Event()
        crew = threading.Barrier(2, action=lambda: loop.call_soon_threadsafe(both.set))

        def hold(number: int) -> None:
            if number <= 2:
                crew.wait(30)
                assert go_on.wait(30)

        reads.before = hold
        half = SIZE // 2
        async with aioshm.open_region(name, SIZE, threads=1) as region:
            first = asyncio.create_task(aioshm.load_from(file, length=half)(region))
            second = asyncio.create_task(aioshm.load_from(file, length=half, offset=half)(region))
            await both.wait()
            first.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await first
            await second
            right = bytes(region.buffer[half:]) == DATA[:half]
            assert right

    run(main())
