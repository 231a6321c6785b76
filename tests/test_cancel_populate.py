"""Cancelled in the middle of a populate, or while another process populates: at most the chunk at hand is finished."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cancelling import NOTHING, Stepper, Strike, Way, every_way, for_ever, held, until

import aioshm
from aioshm import _libc
from aioshm._populate import Populate

MIB = 1 << 20
SIZE = 256 * MIB  # enough for two threads, and never populated to the end
THREADS = 2


class HeldUp:
    """Makes the kernel's answers wait from the third on: the middle of a populate, for as long as a test needs.

    Attributes:
        begun: Chunks begun.
        reached: Set when all threads are held up.
        go: Set it to let the kernel answer.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.reached = threading.Event()
        self.go = threading.Event()
        self._calls = 0
        self._waiting = 0
        self._lock = threading.Lock()
        self._madvise = _libc.try_madvise
        self._populate = Populate._populate
        patch.setattr(_libc, "try_madvise", self._slow_madvise)
        patch.setattr(Populate, "_populate", lambda work, chunk: self._count(work, chunk))  # noqa: PLW0108 - a method

    def _slow_madvise(self, address: int, length: int, advice: int) -> int:
        if advice == _libc.MADV_POPULATE_WRITE:
            with self._lock:
                self._calls += 1
                late = self._calls > 2
                self._waiting += late
                if self._waiting == THREADS:
                    self.reached.set()
            if late:
                assert self.go.wait(30)
        return self._madvise(address, length, advice)

    def _count(self, work: Populate, chunk: range) -> int:
        with self._lock:
            self.begun += 1
        return self._populate(work, chunk)

    async def wait_reached(self, stepper: Stepper) -> bool:
        """False where a deadline of the way's own was first: on a machine that is slow just then."""
        await until(lambda: self.reached.is_set() or stepper.thrown)
        return self.reached.is_set()


@pytest.fixture
def held_up(monkeypatch) -> Iterator[HeldUp]:
    held_up = HeldUp(monkeypatch)
    yield held_up
    held_up.go.set()


@every_way
def test_in_the_middle_of_a_populate_at_most_a_chunk_is_finished(run, name, path, held_up: HeldUp, way: Way):
    async def main():
        at_strike = []

        async def step(strike: Strike) -> None:
            async def watch() -> None:
                reached = await held_up.wait_reached(stepper)
                strike()
                await until(lambda: stepper.thrown)
                for _ in range(20):  # for what is repeated
                    await asyncio.sleep(0)
                if reached:
                    assert not stepper.finished, "returned while threads populate"
                    assert held(path)["mappings"] == 1, "unmapped under the threads"
                at_strike.append(held_up.begun)
                held_up.go.set()

            async def opening() -> None:
                async with aioshm.open_region(name, SIZE, threads=THREADS):
                    pytest.fail("was opened")

            stepper = Stepper(opening())
            watcher = asyncio.create_task(watch())
            try:
                await stepper
            finally:
                await watcher
                assert held(path) == NOTHING

        await way(step)
        assert at_strike == [held_up.begun], "a chunk was begun after the cancellation"

    run(main())


@every_way
def test_cancelled_region_populate_leaves_the_region_as_it_is(run, name, path, held_up: HeldUp, way: Way):
    async def main():
        at_strike = []
        async with aioshm.open_region(name, SIZE, threads=THREADS, populate=False) as region:

            async def step(strike: Strike) -> None:
                async def watch() -> None:
                    await held_up.wait_reached(stepper)
                    strike()
                    await until(lambda: stepper.thrown)
                    at_strike.append(held_up.begun)
                    held_up.go.set()

                stepper = Stepper(region.populate())
                watcher = asyncio.create_task(watch())
                try:
                    await stepper
                finally:
                    await watcher
                    assert held(path)["threads"] == 0
                await for_ever()

            await way(step)
            assert at_strike == [held_up.begun]
            region.buffer[0] = 1
            await region.populate(0, 2 * MIB)  # usable as before
        assert held(path) == NOTHING

    run(main())


# A creator in the middle of its populate, in a process of its own. It goes on when it is told to.
_CREATOR = """
import asyncio, sys, threading
import aioshm
from aioshm import _libc

name, size = sys.argv[1], int(sys.argv[2])
go = threading.Event()
calls = 0
madvise = _libc.try_madvise

def slow(address, length, advice):
    global calls
    calls += 1
    if calls == 3:
        print("populating", flush=True)
    if calls >= 3:
        go.wait()
    return madvise(address, length, advice)

_libc.try_madvise = slow

def listen():
    sys.stdin.readline()
    go.set()

def watch(task):
    if task.cancelling():
        print("cancelled", flush=True)
    else:
        asyncio.get_running_loop().call_later(0.001, watch, task)

async def main():
    threading.Thread(target=listen, daemon=True).start()
    watch(asyncio.current_task())
    async with aioshm.open_region(name, size, threads=2) as region:
        region.buffer[0] = 7
        print("open", flush=True)
        await asyncio.get_running_loop().create_future()

if "uvloop" in sys.argv:
    import uvloop
    factory = uvloop.new_event_loop
else:
    factory = None
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


class Creator:
    def __init__(self, name: str, loop: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CREATOR, name, str(SIZE), loop],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Wait for its end and return what it wrote to stderr."""
        return self.process.communicate(timeout=30)[1]


@pytest.fixture
def creator(name, request) -> Iterator[Creator]:
    creator = Creator(name, request.config.getoption("--loop"))
    creator.expect("populating")
    yield creator
    creator.process.kill()
    creator.process.communicate()


def test_ctrl_c_in_the_middle_of_a_populate(creator: Creator, path: Path):
    creator.interrupt()
    creator.expect("cancelled")
    assert creator.process.poll() is None, "ended while its threads populate"
    creator.go_on()
    assert creator.end().rstrip().endswith("KeyboardInterrupt")
    assert creator.process.returncode == -signal.SIGINT
    assert not path.exists()


def test_ctrl_c_twice_in_the_middle_of_a_populate(creator: Creator, path: Path):
    """The second is raised on the spot, wherever the loop is."""
    creator.interrupt()
    creator.expect("cancelled")
    creator.interrupt()
    creator.go_on()
    assert creator.end().rstrip().endswith("KeyboardInterrupt")
    assert creator.process.returncode == -signal.SIGINT
    assert not path.exists()


@every_way
def test_cancelled_while_another_process_creates(run, name, path, creator: Creator, way: Way):
    async def main():
        for point in range(1, 4):

            async def step(strike: Strike, point: int = point) -> None:
                async def joining() -> None:
                    async with aioshm.open_region(name, SIZE):
                        pytest.fail("joined what is not finished")

                try:
                    await Stepper(joining(), at=point, strike=strike)
                finally:
                    assert held(path) == {**NOTHING, "names": True}

            await way(step)

    run(main())
    creator.go_on()  # and was not disturbed by any of it
    creator.expect("open")

    async def join():
        async with aioshm.open_region(name, SIZE) as region:
            assert not region.created
            assert region.buffer[0] == 7
            creator.interrupt()
            creator.end()
            assert path.exists()
        assert held(path) == NOTHING

    run(join())
