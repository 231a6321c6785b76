"""What the host says of its memory nodes: which there are, how full they are, and what a request gets told for it."""

from __future__ import annotations

from typing import Any

import pytest
from made_tree import Tree

import aioshm
from aioshm import _preflight, _request
from aioshm._host import (
    Node,
    read_allowed_nodes,
    read_node,
    read_node_numbers,
    read_node_pool,
    read_node_reserves,
)
from aioshm._libc import PAGE
from aioshm._preflight import check_node_pools, check_nodes

MIB = 1 << 20


def request_for(**options: Any) -> _request.Request:
    absent = ("local_rank", "local_world_size", "hint", "timeout", "numa", "threads", "initialize", "on_progress")
    arguments = {"name": "kv", "size": MIB, "directory": "/dev/shm", "allocation_name": "KV", "populate": True}
    arguments |= {"huge_pages": "try", "memory_policy": "guard"}
    return _request.check_request(**(dict.fromkeys(absent) | arguments | options))


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("memory", "allowed", "found"),
    [
        ("0-1\n", "0-1", (0, 1)),
        ("0,2-4\n", "0-1023", (0, 2, 3, 4)),
        ("0-1\n", "1", (1,)),
        ("0-1\n", None, (0, 1)),
        ("garbled", "0", ()),
        ("\n", "0", ()),
        (None, "0", ()),
    ],
)
def test_nodes_that_this_process_may_take_from(tree, memory, allowed, found):
    if memory is not None:
        tree.write("/sys/devices/system/node/has_memory", memory)
    if allowed is not None:
        tree.write("/proc/self/status", f"Name:\tx\nMems_allowed:\t00,ff\nMems_allowed_list:\t{allowed}\nCpus: 1\n")
    assert read_allowed_nodes(str(tree.root)) == found


def test_what_the_kernel_would_give_up_of_a_node(tree):
    text = "MemTotal: 100 kB|MemFree: 20 kB|Active: 7 kB|Active(file): 3 kB|Inactive(file): 2 kB|SReclaimable: 1 kB"
    tree.write("/sys/devices/system/node/node3/meminfo", "".join(f"Node 3 {line}\n" for line in text.split("|")))
    assert read_node(3, str(tree.root)) == Node(3, 100 << 10, 20 << 10, 6 << 10)
    assert read_node(4, str(tree.root)) is None


def test_what_the_kernel_keeps_of_each_node(tree):
    zone = "  pages free 9\n        min 1\n        high {high}\n        managed {managed}\n        protection: {kept}\n"
    text = "Node 0, zone DMA\n  per-node stats\n      nr_active 7\n" + zone.format(high=3, managed=5, kept="(0, 90, 7)")
    text += "Node 0, zone Normal\n" + zone.format(high=40, managed=999, kept="(0, 0, 2)")
    text += "Node 2, zone Normal\n" + zone.format(high=50, managed=999, kept="(0, 0)")
    tree.write("/proc/zoneinfo", text)
    assert read_node_reserves(str(tree.root)) == {0: 47 * PAGE, 2: 50 * PAGE}
    tree.write("/proc/zoneinfo", "Node x")
    assert read_node_reserves(str(tree.root)) == {}


def test_the_pool_of_a_node(tree):
    pool = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB"
    tree.write(f"{pool}/nr_hugepages", "9\n")
    tree.write(f"{pool}/free_hugepages", "4\n")
    assert read_node_pool(1, 2 * MIB, str(tree.root)) == (9, 4)
    assert read_node_pool(0, 2 * MIB, str(tree.root)) is None


def test_a_node_that_is_too_small_for_its_part():
    if not read_node_numbers():
        pytest.skip("this kernel has no nodes")
    node = read_node_numbers()[0]
    total = read_node(node).total
    check_nodes(request_for(), {node: MIB})
    with pytest.raises(aioshm.InsufficientMemoryError, match=f"on NUMA node {node} for KV") as caught:
        check_nodes(request_for(hint="Hm."), {node: total})
    assert (caught.value.level, caught.value.limit) == (f"node {node}", total)
    assert caught.value.required > total
    assert "numa=" in str(caught.value)
    assert str(caught.value).endswith("Hm.")


@pytest.mark.parametrize(("policy", "warned"), [("warn", ["WARNING"]), ("ignore", [])])
def test_who_wants_no_guard_is_warned_or_left_alone(caplog, policy, warned):
    if not read_node_numbers():
        pytest.skip("this kernel has no nodes")
    node = read_node_numbers()[0]
    caplog.set_level("INFO", "aioshm")
    check_nodes(request_for(memory_policy=policy), {node: read_node(node).total})
    assert [record.levelname for record in caplog.records] == warned
    assert all(f"does NOT fit in memory level node {node}" in record.getMessage() for record in caplog.records)


def test_cache_counts_as_room_and_what_the_kernel_keeps_does_not(monkeypatch):
    monkeypatch.setattr(_preflight._host, "read_node", lambda number: Node(number, 100 * MIB, 20 * MIB, 30 * MIB))
    monkeypatch.setattr(_preflight, "_node_reserves", lambda: {1: 7 * MIB, 2: 60 * MIB})
    assert [figures.available for figures in _preflight.node_figures([0, 1, 2])] == [50 * MIB, 43 * MIB, 0]


def test_a_pool_that_cannot_be_read_says_no_to_nobody():
    check_node_pools(request_for(), {1023: MIB}, 2 * MIB)
