"""The emulated machine has two memory nodes, and a page lands on the node of the processor that populated it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import aioshm

MIB = 1 << 20
SIZE = 8 * MIB

pytestmark = pytest.mark.vm


def test_there_are_two_nodes_with_a_processor_each():
    nodes = Path("/sys/devices/system/node")
    assert (nodes / "online").read_text().strip() == "0-1"
    assert [(nodes / f"node{node}/cpulist").read_text().strip() for node in (0, 1)] == ["0", "1"]


def bytes_by_node(region: aioshm.Region) -> dict[int, int]:
    """Ask /proc/self/numa_maps where the region's pages are; numa(7)."""
    (line,) = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if f"file={region.path}" in line]
    page = int(re.search(r"kernelpagesize_kB=(\d+)", line)[1]) * 1024
    return {int(node): int(count) * page for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}


@pytest.mark.parametrize("huge_pages", ["require", "off"])
@pytest.mark.parametrize("cpu", [0, 1])
def test_pages_are_on_the_node_of_the_processor_that_populates(run, name, cpu, huge_pages):
    async def main():
        async with aioshm.open_region(name, SIZE, huge_pages=huge_pages, threads=1) as region:
            assert bytes_by_node(region) == {cpu: SIZE}

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})  # threads inherit it
    try:
        run(main())
    finally:
        os.sched_setaffinity(0, before)
