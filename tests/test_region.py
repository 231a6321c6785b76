"""The handle: used after it was closed, entered twice, closed twice, populated later, or never closed."""

from __future__ import annotations

import asyncio
import errno
import gc
import subprocess
import sys
import threading
import warnings

import pytest
from cancelling import NOTHING, held, until

import aioshm
from aioshm import _libc, _locks, _tenancy
from aioshm._report import OpenReport

MIB = 1 << 20
SIZE = 4 * MIB


def test_a_closed_region_says_so_everywhere(run, name, path):
    async def main():
        async with aioshm.open_region(name, SIZE) as region:
            assert "created" in repr(region)
        uses = {
            "buffer": lambda: region.buffer,
            "array": region.array,
            "tensor": region.tensor,
        }
        for use in uses.values():
            with pytest.raises(aioshm.RegionClosedError, match=name) as caught:
                use()
            assert caught.value.name == name
        with pytest.raises(aioshm.RegionClosedError):
            await region.populate()
        # What it was is still to be had, and closing it again is fine.
        assert region.closed
        assert (region.name, region.path, region.size, region.created) == (name, str(path), SIZE, True)
        assert region.local_rank is region.local_world_size is None
        assert isinstance(region.report, OpenReport)
        assert "closed" in repr(region)
        await region.aclose()
        public = {attribute for attribute in dir(region) if not attribute.startswith("_")}
        checked = {"aclose", "closed", "created", "local_rank", "local_world_size", "name", "path", "populate"}
        checked |= {"report", "size"}
        assert public == checked | set(uses), "a public name that this test does not know"

    run(main())


def test_a_context_manager_is_for_one_use(run, name, path):
    async def main():
        context = aioshm.open_region(name, SIZE)
        async with context:
            with pytest.raises(RuntimeError, match="entered before"):
                await context.__aenter__()
        with pytest.raises(RuntimeError, match="entered before"):
            async with context:
                pytest.fail("entered again")
        assert held(path) == NOTHING

        both = aioshm.open_region(name, SIZE)
        first, second = await asyncio.gather(both.__aenter__(), both.__aenter__(), return_exceptions=True)
        assert isinstance(first, aioshm.Region)
        assert isinstance(second, RuntimeError)
        await both.__aexit__(None, None, None)

        failed = aioshm.open_region(name, 1 << 50)
        with pytest.raises(aioshm.AioshmError):
            await failed.__aenter__()
        with pytest.raises(RuntimeError, match="entered before"):
            await failed.__aenter__()

    run(main())


def test_closing_twice_and_at_once(run, name, path, monkeypatch):
    go = threading.Event()
    unmap = _tenancy.unmap
    monkeypatch.setattr(_tenancy, "unmap", lambda *arguments: go.wait(30) and unmap(*arguments))

    async def main():
        async with aioshm.open_region(name, SIZE) as region:
            closers = [asyncio.create_task(region.aclose()) for _ in range(3)]
            for _ in range(10):
                await asyncio.sleep(0)
            assert region.closed
            assert not any(closer.done() for closer in closers), "said that it was closed while it was being closed"
            go.set()
            for done in asyncio.as_completed(closers):
                await done
                assert held(path)["mappings"] == held(path)["descriptors"] == 0
            await region.aclose()
        assert held(path) == NOTHING

    run(main())


def test_closed_while_it_is_joined_by_another(run, name, path):
    async def main():
        async with aioshm.open_region(name, SIZE) as first, aioshm.open_region(name, SIZE) as second:
            await first.aclose()
            with pytest.raises(aioshm.RegionClosedError):
                _ = first.buffer
            second.buffer[0] = 1
            assert path.exists()
        assert held(path) == NOTHING

    run(main())


@pytest.mark.parametrize("legacy", [False, True], ids=["", "old kernel"])
def test_a_view_keeps_memory_but_no_lock(run, name, monkeypatch, legacy):
    """A mapping keeps the open file description it was made from, and that its locks: it must not be the region's."""
    if legacy:
        monkeypatch.setattr(_libc, "try_madvise", lambda *_: errno.EINVAL)

    async def main():
        async with aioshm.open_region(name, SIZE) as staying:
            async with aioshm.open_region(name, SIZE) as leaving:
                view = leaving.buffer
            description = staying._tenancy.seat.description
            assert description.find_held(_locks.GATE) is None
            assert description.find_held(_locks.WORLD) is None
            view[0] = 1
            assert staying.buffer[0] == 1

    run(main())


@pytest.mark.parametrize(
    ("offset", "length", "pages"),
    [
        (0, None, 16),
        (0, 1, 1),
        (4095, 2, 2),
        (4096, 4096, 1),
        (15 * 4096, None, 1),
        (16 * 4096, 0, 0),
        (5, 0, 0),
    ],
)
def test_populate_makes_whole_pages_of_a_part_resident(run, name, path, offset, length, pages):
    async def main():
        async with aioshm.open_region(name, 16 * 4096, populate=False, huge_pages="off") as region:
            assert region.report.populated == 0
            assert path.stat().st_blocks == 0
            await region.populate(offset, length)
            assert path.stat().st_blocks * 512 == pages * 4096

    run(main())


def test_populate_leaves_the_content_as_it_is(run, name):
    async def main():
        async with aioshm.open_region(name, SIZE, populate=False) as region:
            region.buffer[MIB : MIB + 5] = b"there"
            await region.populate(0, MIB)
            await asyncio.gather(region.populate(), region.populate())
            assert bytes(region.buffer[MIB : MIB + 5]) == b"there"
            assert bytes(region.buffer[:MIB]) == bytes(MIB)

    run(main())


@pytest.mark.parametrize(
    ("offset", "length", "error"),
    [
        (-1, None, ValueError),
        (SIZE + 1, None, ValueError),
        (0, SIZE + 1, ValueError),
        (SIZE, 1, ValueError),
        (0, -1, ValueError),
        (0.0, None, TypeError),
        (0, "1", TypeError),
    ],
)
def test_populate_checks_its_part(run, name, path, offset, length, error):
    async def main():
        async with aioshm.open_region(name, SIZE, populate=False) as region:
            with pytest.raises(error):
                await region.populate(offset, length)
            assert path.stat().st_blocks == 0

    run(main())


def test_closing_ends_a_populate_before_anything_is_unmapped(run, name, path, monkeypatch):
    in_kernel, go = threading.Event(), threading.Event()
    mapped = []
    madvise = _libc.try_madvise

    def slow(address, length, advice):
        if advice == _libc.MADV_POPULATE_WRITE and not go.is_set():
            in_kernel.set()
            assert go.wait(30)
            mapped.append(held(path)["mappings"])
        return madvise(address, length, advice)

    async def main():
        async with aioshm.open_region(name, 64 * MIB, populate=False, threads=1) as region:
            monkeypatch.setattr(_libc, "try_madvise", slow)
            populating = asyncio.create_task(region.populate())
            await until(in_kernel.is_set)
            closing = asyncio.create_task(region.aclose())
            # The name goes at once, the memory only when the kernel is done with it.
            await until(lambda: not path.exists())
            await until(lambda: any("release" in thread.name for thread in threading.enumerate()))
            assert not closing.done()
            go.set()
            with pytest.raises(aioshm.RegionClosedError):
                await populating
            await closing
            assert mapped == [1], "unmapped under the thread"
            assert held(path) == NOTHING

    run(main())


def test_an_unclosed_region_warns_and_is_clean(run, name, path):
    async def main():
        region = await aioshm.open_region(name, SIZE).__aenter__()
        assert held(path)["mappings"] == 1
        with pytest.warns(ResourceWarning, match="unclosed region") as caught:  # noqa: PT031
            del region
            gc.collect()
        assert len(caught) == 1
        assert str(path) in str(caught[0].message)
        assert held(path) == NOTHING

    run(main())


def test_a_closed_region_does_not_warn(run, name):
    async def main():
        async with aioshm.open_region(name, SIZE):
            pass
        failed = aioshm.open_region(name, 1 << 50)
        with pytest.raises(aioshm.AioshmError):
            await failed.__aenter__()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(main())
        gc.collect()
    assert not caught


_UNCLOSED = """
import asyncio, sys
import aioshm

kept = []

async def main():
    kept.append(await aioshm.open_region(sys.argv[1], 4096).__aenter__())
    print(kept[0].path)

asyncio.run(main())
"""


def test_a_region_that_is_unclosed_at_exit_leaves_no_name(name, path):
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", _UNCLOSED, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(path)), done.stderr
    assert "unclosed region" in done.stderr
    assert not path.exists()


@pytest.mark.parametrize("outcome", [ValueError("mine"), asyncio.CancelledError("mine"), KeyboardInterrupt("mine")])
def test_what_the_block_raises_goes_on_unchanged(run, name, path, outcome):
    async def main():
        try:
            async with aioshm.open_region(name, SIZE):
                raise outcome
        except BaseException as error:  # noqa: BLE001
            return error

    assert run(main()) is outcome
    assert outcome.__context__ is None
    assert held(path) == NOTHING
