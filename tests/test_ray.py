"""On a real Ray cluster of two nodes: one region per node, with async actors as its ranks."""

from __future__ import annotations

import importlib.util
import re

import pytest
from offspring import run_example

pytestmark = [
    pytest.mark.examples,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs ray (dependency group examples)"),
]

RANK = re.compile(
    r"^rank (\d): (\w+) of (kv\.ray-(\S+)\.n([0-9a-f]{56})\.r0), released: True, rows right: 8 of 8$", re.MULTILINE
)


def test_actors_of_a_node_share_its_region_and_nobody_else_does(name):
    status, said, running = run_example("ray_offload.py", "--size=8", f"--name={name}")
    assert status == 0, said
    assert running == []
    ranks = RANK.findall(said)
    by_node: dict[str, list[tuple[str, str]]] = {}
    for rank, role, _, job, node in ranks:
        assert job == name
        by_node.setdefault(node, []).append((rank, role))
    assert len(by_node) == 2, said
    for members in by_node.values():
        assert sorted(rank for rank, _ in members) == ["0", "1"]
        assert sorted(role for _, role in members) == ["creator", "joiner"]
    assert len({region for _, _, region, *_ in ranks}) == 2
    assert "2 nodes, 4 ranks\n" in said
    assert "everything right: True, left behind: nothing\n" in said


def test_error_of_an_actor_reaches_the_driver_with_its_facts_and_leaves_nothing(name):
    status, said, running = run_example("ray_offload.py", f"--size={1 << 30}", f"--name={name}")
    assert status == 1, said
    assert running == []
    assert "InsufficientSpaceError: Insufficient space in /dev/shm for KV cache: 1073741824.0 MiB required" in said
    assert "everything right" not in said
