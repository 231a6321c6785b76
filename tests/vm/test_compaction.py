"""Memory that is fragmented for real: a huge page takes a compaction, and is given up where that takes too long."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from memory_maps import mapped

import aioshm
from aioshm import _worth
from aioshm._host import read_stalls

MIB = 1 << 20
SIZE = 192 * MIB
NODE = 1
FRAGMENTS = Path(__file__).with_name("fragments.py")

pytestmark = pytest.mark.vm


@pytest.fixture
def settled() -> Iterator[None]:
    """Stay on the node's own processor, so that memory comes from there; threads inherit it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {NODE})
    yield
    os.sched_setaffinity(0, before)


@contextlib.contextmanager
def fragmented() -> Iterator[None]:
    """Fragment the node's memory for as long as the block takes."""
    command = [sys.executable, str(FRAGMENTS), str(NODE), str(640 * MIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.communicate()
    assert process.returncode == 0


def open_once(run: Callable[..., object], name: str) -> tuple[aioshm.OpenReport, int]:
    """Return the report, and how often the kernel had to make room."""

    async def main():
        before = read_stalls()
        async with aioshm.open_region(name, SIZE, threads=1) as region:
            # More, where the last huge page of a chunk was refused: the others of it are there, and not known to be.
            assert mapped(region, "ShmemPmdMapped") >= region.report.huge
            assert mapped(region, "Rss") == region.report.populated == SIZE
            return region.report, read_stalls() - before

    return run(main())


def test_memory_that_is_not_fragmented_is_huge_without_a_stall(run, name, settled):
    report, stalls = open_once(run, name)
    assert (report.huge, report.small_page_reason, stalls) == (SIZE, None, 0)


def test_huge_pages_are_given_up_where_each_takes_a_compaction(run, name, settled):
    """Where the kernel's daemon is ahead of us, or compacts in vain, they are made or refused; seldom thrice."""
    for _ in range(3):
        with fragmented():
            report, stalls = open_once(run, name)
        told = str(report.small_page_reason)
        verdict = re.match(r"huge pages took ([\d.]+) times as long as small ones: memory is fragmented", told)
        if verdict:
            break
    else:
        pytest.fail(f"not given up: {report}")
    assert float(verdict[1]) > _worth._TOO_SLOW
    assert 0 < report.huge < SIZE
    assert stalls > _worth._SAMPLES // 2
