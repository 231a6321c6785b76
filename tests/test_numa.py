"""Where a region shall lie: what the kernel is told, checks, refusals. On two real nodes in vm/test_numa.py."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_maps import bytes_by_node
from refusing import refuser

import aioshm
from aioshm import _host, _libc, _numa, _request
from aioshm._host import Node, read_node_numbers
from aioshm._libc import HUGE_PAGE, PAGE
from aioshm._mapping import Mapping, unmap
from aioshm._numa import Policy, choose_policies, needed, stripes

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


LENGTHS = st.tuples(st.integers(1, 1 << 14), st.integers(0, HUGE_PAGE // PAGE - 1)).map(
    lambda drawn: drawn[0] * HUGE_PAGE - drawn[1] * PAGE  # to 32 GiB
)
NODES = st.permutations(range(4)).flatmap(lambda order: st.integers(1, 4).map(lambda count: tuple(order[:count])))


def owner(dealt: list[tuple[range, int]], byte: int) -> int:
    return next(node for part, node in dealt if byte in part)


@given(LENGTHS, NODES, st.data())
def test_stripes_cover_a_share_and_go_by_the_region_alone(length, nodes, data):
    borders = st.integers(0, length // HUGE_PAGE).map(lambda page: page * HUGE_PAGE)
    start, stop = sorted((data.draw(borders), data.draw(st.one_of(borders, st.just(length)))))
    whole, dealt = list(stripes(range(length), length, nodes)), list(stripes(range(start, stop), length, nodes))
    edges = [start, *(part.stop for part, _ in dealt)]
    assert [(part.start, part.stop) for part, _ in dealt] == list(itertools.pairwise(edges))
    assert edges[-1] == stop
    assert all(part.start % HUGE_PAGE == 0 and part for part, _ in dealt)
    assert [node for _, node in whole] == [nodes[number % len(nodes)] for number in range(len(whole))]
    if dealt:
        byte = data.draw(st.integers(start, stop - 1))
        assert owner(dealt, byte) == owner(whole, byte)


@pytest.mark.parametrize(
    ("length", "stripe"),
    [
        (PAGE, 2 * MIB),
        (GIB, 2 * MIB),
        (GIB + PAGE, 2 * MIB),
        (2 * GIB, 4 * MIB),
        (8 * GIB, 16 * MIB),
        (512 * GIB, 16 * MIB),
    ],
)
def test_stripes_are_fine_where_that_costs_nothing_and_not_too_many(length, stripe):
    first, _ = next(stripes(range(length), length, (0, 1)))
    assert len(first) == min(stripe, length)
    (only,) = stripes(range(length), length, (1,))
    assert only == (range(length), 1)


def told(numa: Any, *, page: int = PAGE, nodes: tuple[int, ...] = (0, 1)) -> list[Policy]:
    asked = request_for(numa=numa)
    chosen = asked.numa if isinstance(asked.numa, tuple) else nodes
    return list(choose_policies(asked, chosen, range(2 * MIB, 6 * MIB), length=SIZE, page=page))


def test_what_the_kernel_is_told():
    first, second = range(2 * MIB, 4 * MIB), range(4 * MIB, 6 * MIB)
    assert told("first-touch") == [Policy(range(2 * MIB, 6 * MIB), _libc.MPOL_PREFERRED, ())]
    assert told([1]) == [Policy(range(2 * MIB, 6 * MIB), _libc.MPOL_BIND, (1,))]
    assert told([3, 1]) == [Policy(first, _libc.MPOL_BIND, (1,)), Policy(second, _libc.MPOL_BIND, (3,))]
    soft = _libc.MPOL_PREFERRED  # nobody is killed for a node that is full
    assert told("interleave") == [Policy(first, soft, (1,)), Policy(second, soft, (0,))]


def test_what_the_kernel_is_told_about_a_pool():
    """The policy is the mapping's there, and not the file's: all of it, for this process may touch any of it."""
    page = 2 * MIB
    assert told("first-touch", page=page) == [Policy(range(SIZE), _libc.MPOL_PREFERRED, ())]
    assert told([1], page=page) == [Policy(range(SIZE), _libc.MPOL_BIND, (1,))]
    assert told([3, 1], page=page) == [Policy(range(SIZE), _libc.MPOL_INTERLEAVE, (3, 1))]
    assert told("interleave", page=page) == [Policy(range(SIZE), _libc.MPOL_INTERLEAVE, (0, 1))]


def test_what_each_node_has_to_hold():
    assert needed(told([3, 1]), 4 * MIB) == {1: 2 * MIB, 3: 2 * MIB}
    assert needed(told([1]), 4 * MIB) == {1: 4 * MIB}
    assert needed(told([3, 1], page=2 * MIB), 4 * MIB) == {1: 2 * MIB, 3: 2 * MIB}
    assert needed(told("first-touch"), 4 * MIB) == {}


# The kernel itself


@pytest.fixture
def mapping(tmp_path):
    with open(f"/dev/shm/unnamed-{os.getpid()}", "xb+") as file:
        os.unlink(file.name)
        file.truncate(SIZE)
        made = Mapping(file.fileno(), size=SIZE, page=PAGE)
        made.fd = file.fileno()
        yield made
        unmap(made.release())


def test_the_node_of_each_page_and_none_where_there_is_no_page(mapping):
    if not read_node_numbers():
        pytest.skip("this kernel has no nodes")
    _libc.try_madvise(mapping.address + PAGE, PAGE, _libc.MADV_POPULATE_WRITE)
    before, here, after = _libc.page_nodes([mapping.address + place for place in (0, PAGE, 2 * PAGE)])
    assert here in read_node_numbers()
    assert (before, after) == (-errno.ENOENT, -errno.ENOENT)


def test_a_node_that_is_not_there_is_the_kernels_einval(mapping):
    if not read_node_numbers():
        pytest.skip("this kernel has no nodes")
    assert _libc.try_mbind(mapping.address, SIZE, _libc.MPOL_BIND, (ABSENT,)) == errno.EINVAL
    assert _libc.try_mbind(mapping.address, SIZE, _libc.MPOL_BIND, (1023,)) == errno.EINVAL
    for mode, nodes in ((_libc.MPOL_BIND, (0,)), (_libc.MPOL_INTERLEAVE, (0,)), (_libc.MPOL_PREFERRED, ())):
        assert _libc.try_mbind(mapping.address, SIZE, mode, nodes) == 0


def test_a_processor_whose_numbers_are_not_known_refuses(mapping, monkeypatch):
    monkeypatch.setattr(_libc, "_MBIND", None)
    assert _libc.try_mbind(mapping.address, SIZE, _libc.MPOL_BIND, (0,)) == errno.ENOSYS


# Opening


@pytest.mark.parametrize("numa", [[ABSENT], [0, ABSENT], [1023]])
def test_a_node_that_is_not_there_is_refused_before_anything_is_touched(run, name, path, numa):
    if not read_node_numbers():
        pytest.skip("this kernel has no nodes")

    async def main():
        async with aioshm.open_region(name, SIZE, numa=numa):
            pass

    with pytest.raises(ValueError, match=f"numa names node {numa[-1]}, and the memory .* is on node") as caught:
        run(main())
    assert not isinstance(caught.value, aioshm.AioshmError)
    assert not path.exists()


@pytest.mark.parametrize("numa", [None, "first-touch", "interleave", [0]])
@pytest.mark.parametrize("populate", [True, False])
def test_on_one_node_all_of_it_is_there_and_nobody_is_asked(run, name, monkeypatch, numa, populate):
    if read_node_numbers() != (0,):
        pytest.skip("this host has no node, or several")
    calls = []
    monkeypatch.setattr(_libc, "try_mbind", lambda *call: calls.append(call))
    monkeypatch.setattr(_libc, "page_nodes", lambda *call: calls.append(call))

    async def main():
        async with aioshm.open_region(name, SIZE, numa=numa, populate=populate) as region:
            assert region.report.nodes == ({0: SIZE} if populate else {})
            hash(region.report)

    run(main())
    assert calls == []


def test_a_kernel_without_nodes_tells_nothing(run, name, monkeypatch):
    monkeypatch.setattr(_numa, "read_node_numbers", lambda: ())
    monkeypatch.setattr(_numa, "read_allowed_nodes", lambda: ())

    async def main():
        async with aioshm.open_region(name, SIZE, numa=[7]) as region:
            assert region.report.nodes is None

    run(main())


@pytest.mark.parametrize("numa", ["first-touch", "interleave", [0]])
@pytest.mark.parametrize("huge_pages", ["try", "off"])
def test_the_kernel_is_told_and_asked(run, name, two_nodes, numa, huge_pages, caplog):
    async def main():
        async with aioshm.open_region(name, SIZE + 1, numa=numa, huge_pages=huge_pages) as region:
            assert region.report.nodes == bytes_by_node(region) == {0: SIZE + PAGE}
            async with aioshm.open_region(name, SIZE + 1, numa=numa) as joined:
                assert joined.report.nodes == {0: SIZE + PAGE}

    caplog.set_level("INFO", "aioshm")
    run(main())
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert any(record.getMessage().endswith(", on node 0") for record in caplog.records)


@pytest.mark.parametrize("looks", [0, 1], ids=["before", "meanwhile"])
def test_a_full_node_is_an_error_though_the_host_has_room(run, name, path, two_nodes, monkeypatch, looks):
    """It is looked at before the first page, and by the guard. The real thing is in vm/test_numa.py."""
    read, progress = iter([Node(0, GIB, GIB)] * looks), []
    monkeypatch.setattr(_host, "read_node", lambda number: next(read, Node(0, GIB, 0)))

    async def main():
        async with aioshm.open_region(name, SIZE, numa=[0], on_progress=progress.append):
            pass

    with pytest.raises(aioshm.InsufficientMemoryError) as caught:
        run(main())
    assert (caught.value.level, caught.value.available) == ("node 0", 0)
    assert bool(progress) is bool(looks)
    assert not path.exists()


def test_more_ranks_than_huge_pages(run, name, two_nodes):
    """Some have no share: there is nothing to be told for them."""

    async def rank(index: int) -> dict[int, int]:
        options = {"local_rank": index, "local_world_size": 3, "numa": "first-touch"}
        async with aioshm.open_region(name, PAGE, **options) as region:
            return region.report.nodes

    async def main():
        found = await asyncio.gather(*(rank(index) for index in range(3)))
        assert sorted(found, key=len) == [{}, {}, {0: PAGE}]

    run(main())


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_refused_there_is_one_warning_and_the_region_is_there(ranks, code):
    """As in a container: the kernel says so to a process whose filter forbids it."""
    rank = ranks.start(preexec=refuser("mbind", "move_pages", code=code))
    if rank.ask("hook", call="pretend_nodes")["nodes"] != 1:
        pytest.skip("this host has no node, or several: see vm/test_numa.py")
    rank.ask("listen")
    for numa in ([0], "interleave", "first-touch", None):
        report = rank.open(SIZE, numa=numa)["report"]
        assert (report["populated"], report["nodes"]) == (SIZE, None)
        rank.ask("close")
    (warned,) = [text for level, text in rank.ask("logged")["records"] if level == "WARNING"]
    assert warned.startswith("shared-memory region: mbind")
    assert "--cap-add=SYS_NICE" in warned


def test_whatever_else_the_kernel_says_comes_out_and_nothing_is_left(run, name, path, two_nodes, monkeypatch):
    monkeypatch.setattr(_numa, "read_allowed_nodes", lambda: (0, ABSENT))

    async def main():
        async with aioshm.open_region(name, SIZE, numa="interleave"):
            pass

    with pytest.raises(OSError, match=f"mbind to node {ABSENT}") as caught:
        run(main())
    assert caught.value.errno == errno.EINVAL
    assert not path.exists()


def test_a_cancellation_is_felt_between_two_stripes(run, name, path, two_nodes, monkeypatch):
    began, go_on, told = threading.Event(), threading.Event(), []
    real = _libc.try_mbind

    def slow(*call: Any) -> int:
        told.append(call)
        began.set()
        go_on.wait(10)
        return real(*call)

    monkeypatch.setattr(_libc, "try_mbind", slow)
    monkeypatch.setattr(_numa, "read_allowed_nodes", lambda: (0, 0))

    async def enter() -> None:
        async with aioshm.open_region(name, SIZE, numa="interleave"):
            pytest.fail("it was cancelled")

    async def main():
        opening = asyncio.create_task(enter())
        await asyncio.to_thread(began.wait, 10)
        opening.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    run(main())
    assert len(told) == 1
    assert not path.exists()


def test_where_no_node_may_be_taken_from_nothing_is_asked_for(run, name, monkeypatch):
    """A cpuset without a node that has memory, as it can be read for a moment while it is being changed."""
    monkeypatch.setattr(_numa, "read_node_numbers", lambda: (0, 1))
    monkeypatch.setattr(_numa, "read_allowed_nodes", lambda: ())

    async def main():
        async with aioshm.open_region(name, SIZE, numa="interleave") as region:
            assert region.report.populated == SIZE

    run(main())
