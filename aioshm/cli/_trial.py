"""Trials on a small file without a name: does the kernel give huge pages, and how fast is memory populated here."""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from aioshm import _libc
from aioshm._guard import guard_for
from aioshm._mapping import Mapping, round_up, unmap
from aioshm._open import open_region
from aioshm._populate import Populate, run_populate
from aioshm._request import Request, check_request
from aioshm._threads import run_regardless

# Enough for each thread to have what one is worth starting for (see `_pace.thread_count`), and soon done.
_PER_THREAD = 64 << 20
_LARGEST = 1 << 30


@dataclass(frozen=True)
class HugePageTrial:
    """What came of asking for huge pages.

    Attributes:
        way: How they were obtained: `"hugetlbfs"`, `"mount"` (at first touch), `"collapse"` (MADV_COLLAPSE); None
            where they were not.
        reason: Why not, as far as the kernel says; else None.
        code: The errno of MADV_COLLAPSE, or 0.
    """

    way: Literal["hugetlbfs", "mount", "collapse"] | None
    reason: str | None
    code: int


@dataclass(frozen=True)
class Sample:
    """How fast memory was populated. Bytes and seconds.

    Attributes:
        size: How much was populated.
        seconds: How long that took.
        threads: In how many threads.
        huge: How much of it got huge pages.
    """

    size: int
    seconds: float
    threads: int
    huge: int

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds


def make_request(size: int, directory: str) -> Request:
    """Return what an `open_region` with nothing but defaults asks for."""
    parameters = inspect.signature(open_region).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return check_request(**{**defaults, "name": "doctor", "size": size, "directory": directory})


def trial_size(page: int) -> int:
    """Return the bytes that `try_huge_pages` takes: one page of a pool, or two, for there are two ways to get one."""
    return page if page > _libc.PAGE else 2 * _libc.HUGE_PAGE


def choose_sample_size(threads: int, page: int, room: int | None) -> int:
    """Return the bytes to populate for `threads` threads: at most a quarter of `room`, in whole huge pages, or 0."""
    wanted = min(threads * _PER_THREAD, _LARGEST)
    whole = max(page, _libc.HUGE_PAGE)
    return min(round_up(wanted, whole), wanted if room is None else room // 4) // whole * whole


async def try_huge_pages(directory: str, page: int) -> HugePageTrial:
    """Ask for huge pages in the ways in which `open_region` gets them.

    Raises:
        AioshmError: There is no room for them.
        OSError: As the kernel says. Nothing is left either way.
    """
    size = trial_size(page)
    async with _scratch(size, directory, page) as (fd, mapping):
        if page > _libc.PAGE:
            await _populate(fd, mapping, directory)
            return HugePageTrial("hugetlbfs", None, 0)
        at_touch = _becomes_huge(fd, mapping.address)
        _libc.try_madvise(mapping.address, size, _libc.MADV_HUGEPAGE)  # as Populate does
        at_touch |= _becomes_huge(fd, mapping.address + _libc.HUGE_PAGE)
        work, _ = await _populate(fd, mapping, directory)
        if work.huge == size:
            return HugePageTrial("mount" if at_touch else "collapse", None, 0)
        code = _libc.try_madvise(mapping.address, size, _libc.MADV_COLLAPSE)
        return HugePageTrial("mount" if at_touch else None, work.small_page_reason, code)


async def measure(directory: str, page: int, size: int) -> Sample:
    """Populate `size` bytes twice, and tell the second time.

    A virtual machine's memory that the host took back is slow at first touch; a region that was made room for is not.

    Raises:
        AioshmError: There is no room for them.
        OSError: As the kernel says. Nothing is left either way.
    """
    samples = []
    for _ in range(2):
        async with _scratch(size, directory, page) as (fd, mapping):
            started = time.perf_counter()
            work, threads = await _populate(fd, mapping, directory)
            samples.append(Sample(size, time.perf_counter() - started, threads, work.huge))
    return samples[-1]


@asynccontextmanager
async def _scratch(size: int, directory: str, page: int) -> AsyncIterator[tuple[int, Mapping]]:
    """Give a file without a name, and where it is mapped; gone afterwards, and after SIGKILL as well."""
    file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - closing it frees memory: in a thread
    try:
        os.ftruncate(file.fileno(), size)
        mapping = Mapping(file.fileno(), size=size, page=page)
        try:
            yield file.fileno(), mapping
        finally:
            await run_regardless(lambda: unmap(mapping.release(), page), name="unmap")
    finally:
        await run_regardless(file.close, name="close")


async def _populate(fd: int, mapping: Mapping, directory: str) -> tuple[Populate, int]:
    """Populate all of it as a creator does, and return what came of it, and in how many threads."""
    request = make_request(mapping.length, directory)
    guard = guard_for(request, fd, mapping.page)
    work = Populate(request, mapping, fd, span=range(mapping.length), collapse=True, guard=guard)
    return work, await run_populate(work, request)


def _becomes_huge(fd: int, address: int) -> bool:
    """Touch a page that is not there yet, and see whether the kernel made a huge one of it."""
    before = os.fstat(fd).st_blocks
    _libc.try_madvise(address, _libc.PAGE, _libc.MADV_POPULATE_WRITE)
    return (os.fstat(fd).st_blocks - before) * 512 > _libc.PAGE
