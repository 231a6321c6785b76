"""Blocking work runs in threads of its own and always to its end, however its caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import anyio
import pytest
from cancelling import Stepper, Strike, Way, every_way, for_ever, until
from conftest import loop_factory

from aioshm._threads import StopFlag, run_all_through, run_through


class Worker:
    """Work that says when it has begun, and ends when it is stopped and let go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.stopped = threading.Event()
        self.let_go = threading.Event()
        self.over = False

    def __call__(self, stop: StopFlag) -> str:
        self.loop.call_soon_threadsafe(self.begun.set)
        while not stop:
            threading.Event().wait(0.001)
        self.stopped.set()
        assert self.let_go.wait(30)
        self.over = True
        return "too late"


def test_results_come_back_in_order_from_named_threads(run):
    async def main():
        here = threading.current_thread()

        def work(number):
            thread = threading.current_thread()
            assert thread is not here
            assert thread.daemon, "no thread may keep the interpreter from exiting"
            return number, thread.name

        works = [lambda _, number=number: work(number) for number in range(3)]
        assert await run_all_through(works, name="test") == [(number, f"aioshm-test-{number}") for number in range(3)]
        assert await run_through(bool, name="one") is False

    run(main())


def test_the_first_error_wins_and_the_others_are_stopped(run):
    async def main():
        seen = threading.Event()

        def fails(stop):
            raise LookupError("first")

        def fails_when_stopped(stop):
            while not stop:
                threading.Event().wait(0.001)
            seen.set()
            raise ValueError("second")

        with pytest.raises(LookupError, match="first"):
            await run_all_through([fails_when_stopped, fails], name="test")
        assert seen.is_set()

    run(main())


def test_what_is_no_exception_comes_out_too(run):
    class Odd(BaseException):
        pass

    def work(_):
        raise Odd

    async def main():
        with pytest.raises(Odd):
            await run_through(work, name="test")

    run(main())


@pytest.mark.parametrize("outcome", ["error", "cancellation"])
def test_what_comes_out_keeps_nothing_of_the_call_alive(run, outcome):
    """Its traceback is all that refers to it: what the error path gives back must not hang in a cycle."""

    class MineError(Exception):
        pass

    class Held:
        pass

    async def fail(held):
        def work(_):
            raise MineError

        with contextlib.suppress(MineError):
            await run_through(work, name="test")

    async def cancel(held):
        worker = Worker()
        worker.let_go.set()
        task = asyncio.create_task(run_through(worker, name="test"))
        worker.held = held
        await worker.begun.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def main():
        held = Held()
        watch = weakref.ref(held)
        await (fail if outcome == "error" else cancel)(held)
        del held
        await asyncio.sleep(0)
        assert not [thing for thing in gc.get_objects() if type(thing) is MineError]
        assert watch() is None

    gc.collect()
    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()


@every_way
def test_cancellation_waits_for_the_work_and_goes_on(run, way: Way):
    async def main():
        worker = Worker()

        async def step(strike: Strike) -> None:
            async def watch() -> None:
                await worker.begun.wait()
                strike()
                await until(worker.stopped.is_set)
                for _ in range(20):  # for what is repeated
                    await asyncio.sleep(0)
                assert not stepper.finished, "returned while the thread runs"
                worker.let_go.set()

            stepper = Stepper(run_through(worker, name="test"))
            watcher = asyncio.create_task(watch())
            try:
                await stepper
            finally:
                assert worker.over
                watcher.cancel()

        await way(step)
        assert worker.over

    run(main())


@every_way
def test_work_that_heeds_no_flag_is_completed_first(run, way: Way):
    async def main():
        done = []

        async def step(strike: Strike) -> None:
            strike_at_first_wait = Stepper(run_through(lambda _: done.append("all"), name="test"), at=1, strike=strike)
            try:
                await strike_at_first_wait
            finally:
                assert done == ["all"]
            await for_ever()

        await way(step)

    run(main())


def test_a_cancellation_that_comes_with_the_result_is_not_lost(run):
    async def main():
        async def work():
            await run_through(lambda _: "result", name="test")

        waiting = asyncio.get_running_loop().create_task(work())
        await asyncio.sleep(0)
        # The threads are done and have said so before the loop can hear of either.
        while [thread for thread in threading.enumerate() if thread.name == "aioshm-test-0"]:
            threading.Event().wait(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())


@pytest.mark.parametrize("first", ["task", "scope"])
@pytest.mark.parametrize("giving_back", [False, True])
def test_of_two_cancellations_the_task_s_own_goes_on(run, first, giving_back):
    """The second comes while the thread is waited for, or while what was taken is being given back."""

    async def main():
        workers = [Worker(), Worker()] if giving_back else [Worker()]
        scope = anyio.CancelScope()

        async def work():
            with scope:
                try:
                    await run_through(workers[0], name="test")
                finally:
                    if giving_back:
                        await run_through(workers[1], name="test")
            pytest.fail("the task's own cancellation was swallowed")

        async def until_stopped(worker):
            await until(worker.stopped.is_set)
            for _ in range(5):
                await asyncio.sleep(0)

        task = asyncio.create_task(work())
        await workers[0].begun.wait()
        (task if first == "task" else scope).cancel()
        await until_stopped(workers[0])
        if giving_back:
            workers[0].let_go.set()
            await workers[1].begun.wait()
            if first == "scope":  # it says so again here, and then is shielded from
                await until_stopped(workers[1])
        (scope if first == "task" else task).cancel()
        await until_stopped(workers[-1])
        for worker in workers:
            worker.let_go.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert task.cancelled()
        del caught

    run(main())


@pytest.mark.parametrize("cancels", [1, 3])
def test_the_count_of_cancellations_stays_right(run, cancels):
    async def main():
        worker = Worker()
        counted = []

        async def work():
            try:
                await run_through(worker, name="test")
            except asyncio.CancelledError:
                counted.append(asyncio.current_task().cancelling())
                raise

        task = asyncio.create_task(work())
        await worker.begun.wait()
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        worker.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counted == [cancels]

    run(main())


def test_waiting_shielded_does_not_spin(run):
    """Under a cancelled anyio scope an unshielded wait would be woken in every turn of the loop."""

    async def main():
        worker = Worker()
        turns = 0
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            stepper = Stepper(run_through(worker, name="test"))

            async def watch():
                nonlocal turns
                await worker.begun.wait()
                scope.cancel()
                await until(worker.stopped.is_set)
                before = stepper.suspensions
                for _ in range(1000):
                    await asyncio.sleep(0)
                turns = stepper.suspensions - before
                worker.let_go.set()

            watcher = loop.create_task(watch())
            await stepper
        assert scope.cancelled_caught
        await watcher
        assert turns <= 1, f"woken {turns} times in 1000 turns of the loop"

    run(main())


def test_the_loop_sleeps_while_the_work_is_waited_for():
    """No call-back of anybody goes round while nothing happens: the turns of the loop are counted by their calls."""
    base = loop_factory() or asyncio.new_event_loop
    calls = 0
    with asyncio.Runner(loop_factory=base) as probe:
        kind = type(probe.get_loop())

    class Counting(kind):
        def call_soon(self, *args, **kwargs):
            nonlocal calls
            calls += 1
            return super().call_soon(*args, **kwargs)

    async def main():
        worker = Worker()
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:

            def strike() -> None:
                scope.cancel()
                loop.call_later(0.05, start_counting)

            def start_counting() -> None:
                nonlocal calls
                calls = 0
                loop.call_later(0.1, stop_counting)

            def stop_counting() -> None:
                counted.append(calls)
                worker.let_go.set()

            counted: list[int] = []
            await Stepper(run_through(worker, name="test"), at=1, strike=strike)
        assert scope.cancelled_caught
        assert counted[0] < 20, f"{counted[0]} call-backs in 0.1 s of waiting"

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(main())


@pytest.mark.parametrize("startable", [0, 1, 2])
def test_threads_that_cannot_be_started_leave_nothing(run, monkeypatch, startable):
    """As under a pids limit: what did start is stopped, and done, before the error comes."""

    async def main():
        ended = []

        def work(stop):
            while not stop:
                threading.Event().wait(0.001)
            ended.append(threading.current_thread())

        start = threading.Thread.start
        started = []

        def limited(thread):
            if len(started) == startable:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start"):
            await run_all_through([work] * 3, name="test")
        assert set(ended) == set(started)
        assert not [thread for thread in started if thread.is_alive()]

    run(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_coroutine_that_is_closed_waits_for_its_threads(cancelled):
    """The loop is gone, and with it whoever could be told: the threads are waited for on the spot."""
    loop = (loop_factory() or asyncio.new_event_loop)()
    let_go = threading.Event()
    over = []

    def work(stop):
        while not (stop and let_go.is_set()):
            threading.Event().wait(0.001)
        over.append("stopped")

    async def wait_until_waiting():
        for _ in range(5):
            await asyncio.sleep(0)
        if cancelled:  # and so in the shielded wait
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)

    task = loop.create_task(run_through(work, name="test"))
    loop.run_until_complete(wait_until_waiting())
    loop.set_exception_handler(lambda *_: None)  # that the task is destroyed while pending is what this is about
    loop.close()
    let_go.set()
    with contextlib.suppress(RuntimeError):  # anyio's shield misses its task
        task.get_coro().close()
    assert over == ["stopped"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aioshm-test")]


def test_a_loop_that_was_closed_is_no_error_of_the_thread():
    """pytest makes a failure of what a thread does not catch."""
    loop = (loop_factory() or asyncio.new_event_loop)()
    let_go = threading.Event()

    async def main():
        coroutine = run_through(lambda _: let_go.wait(30), name="test")
        coroutine.send(None)
        return coroutine

    coroutine = loop.run_until_complete(main())
    loop.close()
    let_go.set()
    coroutine.close()
