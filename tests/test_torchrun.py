"""Under a real torchrun, two agents as two nodes: one region per node, shared by its ranks and nobody else."""

from __future__ import annotations

import asyncio
import importlib.util
import re

import pytest
from offspring import run_example

import aioshm

pytestmark = [
    pytest.mark.examples,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch"),
]

RANK = re.compile(
    r"^node (\d), local rank (\d), rank (\d) of 4: (\w+) of (\S+), released: (\w+), peers intact: (\w+), "
    r"checksum right: (\w+)$",
    re.MULTILINE,
)


def test_two_nodes_have_a_region_each_and_add_up_across_them(name):
    status, said, running = run_example("torchrun_offload.py", "--size=8", f"--name={name}")
    assert status == 0, said
    assert running == []
    ranks = sorted(RANK.findall(said))
    places = [(node, local_rank, rank) for node, local_rank, rank, *_ in ranks]
    assert places == [("0", "0", "0"), ("0", "1", "1"), ("1", "0", "2"), ("1", "1", "3")], said
    assert [region for *_, region, _, _, _ in ranks] == [f"kv.torchrun-{name}.n{node}.r0" for node in "0011"]
    assert [sorted(role for node, _, _, role, *_ in ranks if node == which) for which in "01"] == [
        ["creator", "joiner"]
    ] * 2
    assert {verdicts for *_, released, intact, checksum in ranks for verdicts in (released, intact, checksum)} == {
        "True"
    }
    assert "2 of 2 nodes right, left behind: nothing\n" in said


def test_node_that_cannot_open_its_region_fails_the_job_and_leaves_nothing(name, run):
    async def main() -> tuple[int, str, list[str]]:
        async with aioshm.open_region(f"kv.torchrun-{name}.n1.r0", 1 << 20):  # no rank of it, and of another size
            return await asyncio.to_thread(run_example, "torchrun_offload.py", "--size=8", f"--name={name}")

    status, said, running = run(main())
    assert status == 1, said
    assert running == []
    assert f"RegionMismatchError: Region 'kv.torchrun-{name}.n1.r0' exists with" in said
    assert "0 of 2 nodes right, left behind: [" in said  # the one that this process has
    assert "checksum right" not in said
