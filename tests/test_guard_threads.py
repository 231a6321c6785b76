"""The guard among threads: who has nothing left to populate is never told that there is no memory for it."""

from __future__ import annotations

import os
import threading

import aioshm
from aioshm._cgroup import MemoryFigures
from aioshm._files import resident
from aioshm._guard import Guard
from aioshm._populate import Populate
from aioshm._preflight import Finding

MIB = 1 << 20
SIZE = 128 * MIB


def test_memory_that_is_short_when_all_is_populated_is_nobodys_matter(run, name, monkeypatch):
    """One thread gets to the guard, and stands there until the other has done what is left; then memory is short."""
    first = threading.Lock()
    admitted = Populate._admitted

    def wait_for_the_other(work, length):
        if first.acquire(blocking=False):
            with work._lock:
                assert work._lock.wait_for(lambda: work._next == work.total and work._inside == 1, 30)
        return admitted(work, length)

    def short_at_the_end(guard, length):
        if not length or resident(os.fstat(guard._fd)) < SIZE:
            return None
        return Finding("short", length, MemoryFigures("host", SIZE, SIZE, 0))

    monkeypatch.setattr(Populate, "_admitted", wait_for_the_other)
    monkeypatch.setattr(Guard, "_find_short", short_at_the_end)

    async def main():
        async with aioshm.open_region(name, SIZE, threads=2) as region:
            assert region.report.threads == 2
            assert region.report.populated == SIZE

    run(main())
