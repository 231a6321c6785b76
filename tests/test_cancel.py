"""An open or a close that is cancelled at any of its waits, in any way, leaves nothing, and is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cancelling import NOTHING, Stepper, Strike, Way, every_way, for_ever, held
from conftest import loop_factory

import aioshm
from aioshm import _libc

MIB = 1 << 20
SIZE = 4 * MIB


class Scene:
    """What is opened, and what stood there before. `act` is what will be cancelled; `around` is not."""

    refuses: tuple[type[BaseException], ...] = ()  # what `act` ends in if left alone

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def open(self, size: int = SIZE) -> AbstractAsyncContextManager[aioshm.Region]:
        return aioshm.open_region(self.name, size, threads=1)

    async def act(self) -> None:
        async with self.open():
            pass

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        yield


class Creates(Scene):
    pass


class Joins(Scene):
    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        async with self.open() as region:
            region.buffer[:5] = b"alive"
            yield
            assert bytes(region.buffer[:5]) == b"alive"
            assert os.stat(self.path).st_nlink == 1


class Recycles(Scene):
    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        self.path.write_bytes(b"left over" * 1000)
        self.path.chmod(0o700)
        yield


class DoesNotFit(Scene):
    refuses = (aioshm.InsufficientSpaceError, aioshm.InsufficientMemoryError)

    async def act(self) -> None:
        async with self.open(1 << 50):
            pytest.fail("a PiB was there")


class Mismatches(Joins):
    refuses = (aioshm.RegionMismatchError,)

    async def act(self) -> None:
        async with self.open(SIZE + 1):
            pytest.fail("joined with another size")


class BreaksInPopulate(Scene):
    refuses = (OSError,)

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_libc, "try_madvise", lambda *_: errno.EIO)
            yield


class PopulatesLater(Scene):
    def open(self, size: int = SIZE) -> AbstractAsyncContextManager[aioshm.Region]:
        return aioshm.open_region(self.name, size, threads=1, populate=False)

    async def act(self) -> None:
        async with self.open() as region:
            await region.populate()


class ClosesTwice(Scene):
    async def act(self) -> None:
        async with self.open() as region:
            await asyncio.gather(region.aclose(), region.aclose())


SCENES = [Creates, Joins, Recycles, DoesNotFit, Mismatches, BreaksInPopulate, PopulatesLater, ClosesTwice]
every_scene = pytest.mark.parametrize("scene", SCENES, ids=[scene.__name__ for scene in SCENES])


async def count_suspensions(scene: Scene) -> int:
    """Return at how many points `act` waits when nobody disturbs it."""
    async with scene.around():
        stepper = Stepper(scene.act())
        with pytest.raises(scene.refuses) if scene.refuses else contextlib.nullcontext():
            await stepper
    return stepper.suspensions


@every_way
@every_scene
def test_cancelled_at_every_wait(run, name, path, scene: Callable[..., Scene], way: Way):
    async def main():
        setting = scene(name, path)
        points = await count_suspensions(setting)
        assert points > 0 or setting.refuses
        for point in range(1, points + 1):
            async with setting.around():
                before = held(path)

                async def step(strike: Strike, point: int = point, before: dict[str, int] = before) -> None:
                    try:
                        await Stepper(setting.act(), at=point, strike=strike)
                    except setting.refuses:
                        pass  # the error came before a cancellation that was on its way
                    finally:
                        left = held(path)
                        assert left == before if scene is not Recycles else left == NOTHING, f"at wait {point}"
                    await for_ever()

                await way(step)
            assert held(path) == NOTHING

    run(main())


@pytest.mark.parametrize("times", [1, 2])
@every_scene
def test_interrupted_at_every_wait(name, path, scene: Callable[..., Scene], times: int):
    """Ctrl-C: the loop's runner cancels the task at the first, and raises on the spot at the second."""
    setting = scene(name, path)

    def interrupt() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    async def interrupted(point: int) -> None:
        async with setting.around():
            with contextlib.suppress(*setting.refuses):
                await Stepper(setting.act(), at=point, strike=interrupt)
            await for_ever()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        points = runner.run(count_suspensions(setting))
    for point in range(1, points + 1):
        with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(interrupted(point))
        assert held(path) == NOTHING, f"at wait {point}"


def test_exit_is_completed_before_the_cancellation_goes_on(run, name, path):
    async def main():
        entered = asyncio.Event()
        seen = []

        async def work():
            try:
                async with aioshm.open_region(name, SIZE) as region:
                    entered.set()
                    await for_ever()
            finally:
                seen.append((region.closed, held(path)))

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == [(True, NOTHING)]

    run(main())


@pytest.mark.parametrize("failing", ["preflight", "populate", "release", "close"])
def test_a_thread_that_cannot_be_started_leaves_nothing(run, name, path, monkeypatch, failing):
    """As under a pids limit. What has to be given back is given back on the loop then."""
    start = threading.Thread.start

    def limited(thread):
        if failing in thread.name:
            limit.append(thread.name)
        if limit:
            raise RuntimeError("can't start new thread")
        start(thread)

    limit: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", limited)

    async def main():
        if failing == "close":  # of a leftover
            path.write_bytes(b"left over" * 1000)
            path.chmod(0o700)
        scene = Creates(name, path)
        # Nothing is lost where only giving back has no thread; an open needs them.
        with pytest.raises(RuntimeError, match="can't start") if failing != "release" else contextlib.nullcontext():
            await scene.act()
        assert limit
        assert held(path) == NOTHING

    run(main())


@pytest.mark.parametrize("gone", [False, True], ids=["loop runs", "loop gone"])
@every_scene
def test_a_coroutine_that_is_closed_leaves_nothing(name, path, scene: Callable[..., Scene], gone: bool):
    """Dropped by a loop that was stopped, or by whoever drives it: nothing can be awaited any more."""
    setting = scene(name, path)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        points = runner.run(count_suspensions(setting))

    async def act_until(point: int) -> Coroutine[Any, Any, None]:
        """Drive it by hand to its wait number `point`."""
        coroutine = setting.act()
        for _ in range(point - 1):
            waited_for = coroutine.send(None)
            waited_for._asyncio_future_blocking = False  # what a task does
            await asyncio.wait([waited_for])
        coroutine.send(None)
        return coroutine

    async def close_at(point: int) -> None:
        async with setting.around():
            before = NOTHING if scene is Recycles else held(path)
            (await act_until(point)).close()
            assert held(path) == before, f"at wait {point}"

    for point in range(1, points + 1):
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            if not gone:
                runner.run(close_at(point))
                continue
            around = setting.around()
            runner.run(around.__aenter__())
            before = NOTHING if scene is Recycles else held(path)
            with asyncio.Runner(loop_factory=loop_factory()) as other:
                coroutine = other.run(act_until(point))
            coroutine.close()
            assert held(path) == before, f"at wait {point}"
            runner.run(around.__aexit__(None, None, None))
