"""Where a region shall lie: what the kernel is told, checks, refusals. On two real nodes in vm/test_numa.py."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tree import Tree
from memory_maps import bytes_by_node, collapse_works
from refusing import refuser

import aioshm
from aioshm import _libc, _numa, _request
from aioshm._host import (
    Node,
    read_allowed_nodes,
    read_node,
    read_node_numbers,
    read_node_pool,
    read_node_reserves,
)
from aioshm._libc import HUGE_PAGE, PAGE
from aioshm._mapping import Mapping, unmap
from aioshm._numa import Policy, choose_policies, needed, stripes
from aioshm._preflight import check_node_pools, check_nodes

MIB = 1 << 20
GIB = 1 << 30
SIZE = 8 * MIB
ABSENT = max(read_node_numbers(), default=0) + 1


@pytest.fixture(autouse=True)
def _warnings_anew():
    _numa._warn_of_refusal.cache_clear()


@pytest.fixture
def two_nodes(monkeypatch):
    """As if there were another node: the kernel is told where to, though it has but one to give."""
    if read_node_numbers() != (0,):
        pytest.skip("this host has no node, or several: see vm/test_numa.py")
    monkeypatch.setattr(_numa, "read_node_numbers", lambda: (0, 1))


def request_for(**options: Any) -> _request.Request:
    arguments = dict.fromkeys(("local_rank", "local_world_size", "hint", "timeout", "threads", "initialize", "numa"))
    arguments |= {"name": "kv", "size": SIZE, "directory": "/dev/shm", "allocation_name": "KV", "populate": True}
    arguments |= {"huge_pages": "try", "memory_policy": "guard", "on_progress": None}
    return _request.check_request(**(arguments | options))


@pytest.mark.parametrize(
    ("numa", "taken"),
    [
        (None, None),
        ("first-touch", "first-touch"),
        ("interleave", "interleave"),
        ([1], (1,)),
        ((3, 0), (3, 0)),
        (range(2), (0, 1)),
        ([1023], (1023,)),
    ],
)
def test_what_may_be_asked_for(numa, taken):
    assert _request.check_numa(numa) == taken


def test_numpy_integers_are_nodes():
    numpy = pytest.importorskip("numpy")
    nodes = _request.check_numa(numpy.arange(2))
    assert nodes == (0, 1)
    assert {type(node) for node in nodes} == {int}


# --- what the kernel is told


@given(
    pages=st.integers(1, 1 << 20),
    share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    nodes=st.permutations(range(4)).flatmap(lambda order: st.integers(1, 4).map(lambda count: order[:count])),
    rest=st.integers(0, HUGE_PAGE // PAGE - 1),
)
def test_stripes_cover_the_share_and_depend_on_the_region_alone(pages, share, nodes, rest):
    length = pages * HUGE_PAGE - rest * PAGE
    first, last = sorted(int(part * pages) for part in share)
    span = range(first * HUGE_PAGE, min(last * HUGE_PAGE, length))
    dealt = list(stripes(span, length, nodes))
    assert [byte for part, _ in dealt for byte in (part.start, part.stop)] == (
        sorted({span.start, span.stop} | {part.start for part, _ in dealt} | {part.stop for part, _ in dealt})
        if len(dealt) == 1
        else [edge for part, _ in dealt for edge in (part.start, part.stop)]
    )
