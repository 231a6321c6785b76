"""Populate makes all of it resident, huge where it can be had, with the threads there are, and changes no byte."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from memory_maps import collapse_works, mapped, whole_pages

import aioshm
from aioshm import _libc
from aioshm._libc import HUGE_PAGE, PAGE

MIB = 1 << 20
MANY = 130 * MIB  # enough work for three threads


@pytest.fixture
def collapsing():
    if not collapse_works():
        pytest.skip("this kernel makes no huge pages by MADV_COLLAPSE")


@pytest.mark.parametrize("huge_pages", ["try", "off"])
@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE + 1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5 * MIB + 3])
def test_any_size_is_resident_mapped_and_exact(run, name, path, size, huge_pages):
    async def main():
        async with aioshm.open_region(name, size, huge_pages=huge_pages) as region:
            assert path.stat().st_size == size == region.size == len(region.buffer)
            assert path.stat().st_blocks * 512 == whole_pages(size)
            assert mapped(region, "Rss") == whole_pages(size)
            assert region.report.populated == region.report.allocated == whole_pages(size)
            async with aioshm.open_region(name, size, huge_pages=huge_pages) as joiner:
                assert mapped(joiner, "Rss") == 2 * whole_pages(size)  # both are in this process
                assert path.stat().st_blocks * 512 == whole_pages(size)

    run(main())


@pytest.mark.usefixtures("collapsing")
@pytest.mark.parametrize("huge_pages", ["try", "require"])
@pytest.mark.parametrize("size", [HUGE_PAGE - 1, HUGE_PAGE, 5 * MIB + 3, 64 * MIB])
def test_huge_pages_are_what_the_report_says(run, name, size, huge_pages):
    """vllm's option that silently had no effect: here the kernel's own figure is compared."""

    async def main():
        async with aioshm.open_region(name, size, huge_pages=huge_pages) as region:
            assert region.report.huge == mapped(region, "ShmemPmdMapped") == whole_pages(size) // HUGE_PAGE * HUGE_PAGE
            is_all_huge = region.report.huge == region.report.populated
            assert region.report.small_page_reason == (None if is_all_huge else "its end is less than a huge page")
            assert mapped(region, "Rss") == whole_pages(size)

    run(main())


@pytest.mark.usefixtures("collapsing")
def test_off_makes_none(run, name):
    async def main():
        async with aioshm.open_region(name, 4 * MIB, huge_pages="off") as region:
            assert mapped(region, "ShmemPmdMapped") == 0
            assert region.report.huge is None
            assert region.report.huge_share is None

    run(main())


def test_part_by_part(run, name, path):
    async def main():
        async with aioshm.open_region(name, 8 * MIB + 5, populate=False) as region:
            assert path.stat().st_blocks == 0
            await region.populate(8 * MIB + 1, 3)
            assert path.stat().st_blocks * 512 == PAGE
            await region.populate(HUGE_PAGE, 1)
            assert path.stat().st_blocks * 512 in (HUGE_PAGE + PAGE, 2 * PAGE)
            await region.populate(0, 0)
            await region.populate()
            assert path.stat().st_blocks * 512 == whole_pages(region.size)
            assert path.stat().st_size == region.size

    run(main())


@pytest.mark.parametrize("huge_pages", ["try", "off"])
def test_bytes_that_peers_write_meanwhile_survive(run, name, huge_pages):
    """TensorRT-LLM's HostMem populated by writing zeros: a peer's data was gone."""
    size = 48 * MIB + 7

    async def main():
        options = {"populate": False, "huge_pages": huge_pages}
        async with aioshm.open_region(name, size, **options) as one, aioshm.open_region(name, size, **options) as two:
            places = range(PAGE - 1, size, PAGE)
            wanted = bytes(number % 251 + 1 for number in range(len(places)))

            def write(buffer: memoryview) -> None:
                for place, value in zip(places, wanted, strict=True):
                    buffer[place] = value

            with two.buffer as buffer:
                writer = threading.Thread(target=write, args=(buffer,))
                writer.start()
                await one.populate()
                await two.populate(3 * MIB, 9 * MIB)
                writer.join()
            found = bytes(one.buffer)
            assert found[PAGE - 1 :: PAGE] == wanted
            assert found.count(0) == size - len(places)

    run(main())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_threads_do_all_of_it_at_the_same_time(run, name, path, monkeypatch, threads):
    real, together, here = _libc.try_madvise, threading.Barrier(threads), threading.local()

    def try_madvise(address: int, length: int, advice: int) -> int:
        if advice == _libc.MADV_POPULATE_WRITE and not hasattr(here, "met"):
            here.met = together.wait(30)
        return real(address, length, advice)

    monkeypatch.setattr(_libc, "try_madvise", try_madvise)

    async def main():
        async with aioshm.open_region(name, MANY + 5, threads=threads) as region:
            assert region.report.threads == threads
            assert path.stat().st_blocks * 512 == mapped(region, "Rss") == whole_pages(MANY + 5)

    run(main())
    assert not together.broken


def test_no_more_threads_than_processors_or_work(ranks):
    one_cpu = {min(os.sched_getaffinity(0))}
    bound = ranks.start(preexec=lambda: os.sched_setaffinity(0, one_cpu))
    assert bound.open(MANY)["report"]["threads"] == 1
    bound.ask("close")
    free = ranks.start()
    assert free.open(MANY)["report"]["threads"] == min(3, len(os.sched_getaffinity(0)))
    free.ask("close")
    assert free.open(MIB)["report"]["threads"] == 1
    free.ask("close")


@pytest.mark.root
@pytest.mark.parametrize("mount", ["huge=always", "huge=within_size", "huge=advise", "huge=never"])
@pytest.mark.parametrize("size", [5 * MIB + 3, 64 * MIB])
def test_every_kind_of_tmpfs_mount(run, name, small_tmpfs, mount, size):
    directory = small_tmpfs(mib=64, options=mount)

    async def main():
        async with aioshm.open_region(name, size, directory=directory) as region:
            assert mapped(region, "Rss") == whole_pages(size)
            assert os.stat(region.path).st_size == size
            if collapse_works():
                assert mapped(region, "ShmemPmdMapped") >= region.report.huge == size // HUGE_PAGE * HUGE_PAGE
            region.buffer[-3:] = b"end"
            async with aioshm.open_region(name, size, directory=directory) as joiner:
                assert bytes(joiner.buffer[-3:]) == b"end"

    run(main())
    assert os.statvfs(directory).f_bavail * PAGE == 64 * MIB


def test_two_populate_the_same_part_at_once(run, name, path):
    async def main():
        async with aioshm.open_region(name, 32 * MIB, populate=False) as region:
            await asyncio.gather(*(region.populate() for _ in range(3)), region.populate(MIB, 5 * MIB))
            assert path.stat().st_blocks * 512 == 32 * MIB

    run(main())
