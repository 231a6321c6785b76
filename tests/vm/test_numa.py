"""Two real memory nodes: a region lies where it was asked to, small pages and huge ones, and its report says so."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

import aioshm
from aioshm import _libc, _numa

MIB = 1 << 20
SIZE = 8 * MIB

pytestmark = pytest.mark.vm


@pytest.fixture
def on_cpu():
    """Stay on one processor: each node has one."""
    before = os.sched_getaffinity(0)
    yield lambda cpu: os.sched_setaffinity(0, {cpu})  # threads inherit it
    os.sched_setaffinity(0, before)


def bytes_by_node(region: aioshm.Region) -> dict[int, int]:
    """Ask /proc/self/numa_maps where the region's pages are; numa(7). The mapping must be in one piece."""
    (line,) = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if f"file={region.path}" in line]
    page = int(re.search(r"kernelpagesize_kB=(\d+)", line)[1]) * 1024
    return {int(node): int(count) * page for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}


def test_there_are_two_nodes_with_a_processor_each():
    nodes = Path("/sys/devices/system/node")
    assert (nodes / "online").read_text().strip() == "0-1"
    assert [(nodes / f"node{node}/cpulist").read_text().strip() for node in (0, 1)] == ["0", "1"]


HALVES = {0: SIZE // 2, 1: SIZE // 2}


@pytest.mark.parametrize("huge_pages", ["require", "off"])
@pytest.mark.parametrize("cpu", [0, 1])
@pytest.mark.parametrize(
    ("numa", "expected"),
    [(None, None), ("first-touch", None), ([0], {0: SIZE}), ([1], {1: SIZE}), ("interleave", HALVES), ([1, 0], HALVES)],
)
def test_the_region_lies_where_it_was_asked_to(run, name, on_cpu, cpu, huge_pages, numa, expected):
    async def main():
        async with aioshm.open_region(name, SIZE, huge_pages=huge_pages, threads=1, numa=numa) as region:
            assert bytes_by_node(region) == region.report.nodes == (expected or {cpu: SIZE})
            assert region.report.huge in (None, SIZE)

    on_cpu(cpu)
    run(main())
