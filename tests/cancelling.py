"""Ten ways of cancelling a coroutine, at a suspension that the test chooses; and what one process holds of a region.

A way is given a `step`: an async function that does the work and calls `strike` where the work is to be cancelled. It
runs it, and asserts that the cancellation came out as the way's own users expect it.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import anyio
import pytest

Strike = Callable[[], object]
Step = Callable[[Strike], Coroutine[Any, Any, None]]
Way = Callable[[Step], Awaitable[None]]


class Stepper:
    """Awaits a coroutine for its task, counting its suspensions and what is thrown into it.

    At suspension number `at` (from 1) it calls `strike`, before the task learns what is waited for: a
    `task.cancel()` from there hits exactly this wait.

    Attributes:
        suspensions: How often the coroutine has waited so far.
        thrown: How often an exception was thrown into it.
        finished: Whether it is over.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, at: int = 0, strike: Strike | None = None) -> None:
        self.suspensions = 0
        self.thrown = 0
        self.finished = False
        self._coroutine = coroutine
        self._at = at
        self._strike = strike

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        value: Any = None
        try:
            while True:
                try:
                    waited_for = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
                except StopIteration as stop:
                    return stop.value
                self.suspensions += 1
                try:
                    if self.suspensions == self._at and self._strike is not None:
                        self._strike()
                    value, error = (yield waited_for), None
                except BaseException as thrown:  # noqa: BLE001 - handed on to the coroutine
                    self.thrown += 1
                    value, error = None, thrown
        finally:
            self.finished = True


async def for_ever() -> None:
    """Wait: a cancellation that comes a moment late is felt here."""
    await asyncio.get_running_loop().create_future()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something is so that no event of the loop tells of, such as what a thread does."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


class SiblingError(Exception):
    """What the failing sibling raises."""


async def by_cancel(step: Step) -> None:
    task = asyncio.create_task(step(lambda: task.cancel()))  # noqa: PLW0108 - there is no task yet
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def by_cancel_again_and_again(step: Step) -> None:
    """Cancel in every turn of the loop until the task is over."""
    loop = asyncio.get_running_loop()

    def again() -> None:
        if not task.done():
            task.cancel()
            loop.call_soon(again)

    task = asyncio.create_task(step(again))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def by_timeout(step: Step) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as scope:
            await step(lambda: scope.reschedule(0))
    assert scope.expired()
    _assert_fit_for_use()


async def by_wait_for(step: Step) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 0.1

    def strike() -> None:  # its deadline cannot be moved, so the loop is held until it is past
        time.sleep(max(0.0, deadline - loop.time()) + 0.002)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(step(strike), 0.1)


async def by_sibling(step: Step) -> None:
    failing = asyncio.Event()
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            group.create_task(_fail(failing))
            task = group.create_task(step(failing.set))
    assert task.cancelled()
    assert [type(error) for error in caught.value.exceptions] == [SiblingError]


async def by_anyio_cancel(step: Step) -> None:
    with anyio.CancelScope() as scope:
        await step(scope.cancel)
    assert scope.cancelled_caught
    _assert_fit_for_use()


async def by_anyio_move_on(step: Step) -> None:
    with anyio.move_on_after(math.inf) as scope:
        await step(lambda: setattr(scope, "deadline", -math.inf))
    assert scope.cancelled_caught


async def by_anyio_fail_after(step: Step) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(None) as scope:
        await step(lambda: setattr(scope, "deadline", -math.inf))


async def by_anyio_sibling(step: Step) -> None:
    failing = anyio.Event()
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with anyio.create_task_group() as group:
            group.start_soon(_fail, failing)
            group.start_soon(step, failing.set)
    assert [type(error) for error in caught.value.exceptions] == [SiblingError]


async def by_both(step: Step) -> None:
    """An anyio scope, and then the task itself: the scope must not swallow what is not its own."""
    loop = asyncio.get_running_loop()

    async def scoped() -> None:
        with anyio.CancelScope() as scope:

            def strike() -> None:
                scope.cancel()
                loop.call_soon(loop.call_soon, again)

            await step(strike)
        await for_ever()

    def again() -> None:
        # More than once: of two that come in one turn of the loop asyncio makes one, and anyio before 4.16 swallows it.
        if not task.done():
            task.cancel()
            loop.call_soon(again)

    task = asyncio.create_task(scoped())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


def _assert_fit_for_use() -> None:
    """The task goes on after these: no cancellation may be left on its account."""
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def _fail(when: asyncio.Event | anyio.Event) -> None:
    await when.wait()
    raise SiblingError


WAYS: list[Way] = [
    by_cancel,
    by_cancel_again_and_again,
    by_timeout,
    by_wait_for,
    by_sibling,
    by_anyio_cancel,
    by_anyio_move_on,
    by_anyio_fail_after,
    by_anyio_sibling,
    by_both,
]

every_way = pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])


def held(path: Path | None = None) -> dict[str, int]:
    """Return what there is right now of the region at `path` (of any, if None): its name, and what this process has."""
    needle = "/aioshm-" if path is None else str(path)
    descriptors = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors += needle in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that lists
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "names": path is not None and path.exists(),
        "descriptors": descriptors,
        "mappings": sum(needle in line for line in maps),
        "threads": sum(thread.name.startswith("aioshm-") for thread in threading.enumerate()),
    }


NOTHING = {"names": False, "descriptors": 0, "mappings": 0, "threads": 0}
