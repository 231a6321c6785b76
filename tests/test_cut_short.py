"""A collapse of many huge pages that the kernel is in ends after the huge page in work, and all is as before then."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from collections.abc import Callable

import pytest
from cancelling import until
from memory_maps import collapse_works, flags, mapped

import aioshm
from aioshm import _libc, _pace
from aioshm._threads import StopFlag, run_all_through

MIB = 1 << 20
SIZE = 512 * MIB
CHUNK = 256 * MIB

pytestmark = pytest.mark.skipif(not collapse_works(), reason="this kernel makes no huge pages by MADV_COLLAPSE")


class Collapses:
    """The collapses of more than one huge page: how they ended, and what is called when one begins."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.codes: list[int] = []
        self.begun = threading.Event()
        self.meanwhile: Callable[[], object] = lambda: None
        self._madvise = _libc.try_madvise
        patch.setattr(_libc, "try_madvise", self._watched)
        patch.setattr(_pace, "FIRST_CHUNK", CHUNK)
        patch.setattr(_pace, "LARGEST_CHUNK", CHUNK)

    def _watched(self, address: int, length: int, advice: int) -> int:
        if advice != _libc.MADV_COLLAPSE:
            return self._madvise(address, length, advice)
        self.begun.set()
        self.meanwhile()
        code = self._madvise(address, length, advice)
        self.codes.append(code)
        return code


@pytest.fixture
def collapses(monkeypatch) -> Collapses:
    return Collapses(monkeypatch)


async def cancel_in_a_collapse(opening: asyncio.Task[object], collapses: Collapses) -> None:
    await until(lambda: collapses.begun.is_set() or opening.done())
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


def test_a_collapse_in_work_is_cut_short_by_a_cancellation(run, name, collapses: Collapses):
    """Cancelled the moment it begins: it is a race, which a collapse of 128 huge pages can win on a busy machine."""

    async def main():
        for _ in range(20):
            collapses.codes.clear()
            collapses.begun.clear()
            await cancel_in_a_collapse(asyncio.create_task(opened(name)), collapses)
            if collapses.codes == [errno.EINVAL]:
                return
        pytest.fail("no collapse was cut short in 20 opens")

    async def opened(name: str) -> None:
        async with aioshm.open_region(name, SIZE, threads=1):
            pytest.fail("was opened")

    run(main())


def test_what_was_cut_short_is_no_reason_for_small_pages(run, name, collapses: Collapses):
    """Nor a touch of small pages, nor a question at the guard; and the mapping wants huge pages again."""

    async def main():
        async with aioshm.open_region(name, SIZE, populate=False) as region:
            populating = asyncio.create_task(region.populate())
            advised = threading.Event()
            real = _libc.try_madvise

            def try_madvise(address: int, length: int, advice: int) -> int:
                code = real(address, length, advice)
                if advice == _libc.MADV_NOHUGEPAGE:
                    advised.set()
                return code

            _libc.try_madvise = try_madvise  # the fixture puts the kernel's own back
            collapses.meanwhile = lambda: advised.wait(30)
            await cancel_in_a_collapse(populating, collapses)
            assert collapses.codes
            assert set(collapses.codes) == {errno.EINVAL}
            assert mapped(region, "Rss") < SIZE // 16, "small pages were made of what was cut short"
            assert flags(region)
            assert not [line for line in flags(region) if " nh" in line]
            collapses.meanwhile = lambda: None
            await region.populate()
            assert mapped(region, "ShmemPmdMapped") == SIZE

    run(main())


@pytest.mark.parametrize("span", [(0, SIZE), (CHUNK // 2 + 1, CHUNK), (0, CHUNK + 1)])
def test_another_populate_of_the_region_is_not_cut_short(run, name, collapses: Collapses, span):
    """The advice is the mapping's, and the parts that two populates make may overlap."""

    async def main():
        async with aioshm.open_region(name, SIZE, populate=False, huge_pages="require", threads=1) as region:
            gates = [threading.Event(), threading.Event()]
            order = itertools.count()
            collapses.meanwhile = lambda: gates[min(next(order), 1)].wait(30)
            cancelled = asyncio.create_task(region.populate(*span))
            await until(collapses.begun.is_set)
            collapses.begun.clear()
            other = asyncio.create_task(region.populate(CHUNK, SIZE - CHUNK))
            await until(collapses.begun.is_set)
            cancelled.cancel()
            await asyncio.sleep(0)
            await until(lambda: "aioshm-stop" not in [thread.name for thread in threading.enumerate()])
            gates[1].set()
            await other
            gates[0].set()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert set(collapses.codes) == {0}

    run(main())


def test_closed_while_populating_with_a_view_alive_the_mapping_wants_huge_pages_again(run, name, collapses: Collapses):
    async def main():
        async with aioshm.open_region(name, SIZE, populate=False) as region:
            view = region.buffer[:1]
            populating = asyncio.create_task(region.populate())
            await until(collapses.begun.is_set)
            await region.aclose()
            with pytest.raises(aioshm.RegionClosedError):
                await populating
            assert flags(region)
            assert not [line for line in flags(region) if " nh" in line]
            view.release()

    run(main())


def test_a_thread_that_fails_cuts_the_others_short(run):
    async def main():
        registered, shortened = threading.Event(), threading.Event()

        def waits(stop: StopFlag) -> None:
            stop.on_set(shortened.set)
            registered.set()
            assert shortened.wait(30)

        def fails(_: StopFlag) -> None:
            assert registered.wait(30)
            raise LookupError

        with pytest.raises(LookupError):
            await run_all_through([waits, fails], name="test")
        assert shortened.is_set()  # what the waiting thread says is lost: the first error is the one that comes out

    run(main())


def test_the_loop_is_not_the_one_that_cuts_short(run):
    """It might have to wait for the process's mmap lock."""

    async def main():
        registered, threads = threading.Event(), []

        def waits(stop: StopFlag) -> None:
            stop.on_set(lambda: threads.append(threading.current_thread()))
            registered.set()
            while not stop:
                stop.wait(30)

        task = asyncio.create_task(run_all_through([waits], name="test"))
        await until(registered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [thread.name for thread in threads] == ["aioshm-stop"]
        assert not threads[0].is_alive()

    run(main())
