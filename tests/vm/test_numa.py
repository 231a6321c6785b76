"""Two real memory nodes: a region lies where it was asked to, small pages and huge ones, and its report says so."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_maps import bytes_by_node
from refusing import NUMBERS, refuser

import aioshm
from aioshm import _host, _libc, _numa
from aioshm._preflight import node_figures

MIB = 1 << 20
PAGE = 2 * MIB
SIZE = 8 * MIB
HALVES = {0: SIZE // 2, 1: SIZE // 2}
NODES = Path("/sys/devices/system/node")

pytestmark = pytest.mark.vm


@pytest.fixture
def settle() -> Iterator[Callable[..., None]]:
    """Stay on one processor (each node has one), and bind this process as `numactl --membind` does what it starts."""
    before = os.sched_getaffinity(0)

    def settle(cpu: int | None = None, *, bound_to: int | None = None) -> None:
        os.sched_setaffinity(0, before if cpu is None else {cpu})  # threads inherit it, and the policy
        mode, mask = (0, 0) if bound_to is None else (_libc.MPOL_BIND, 1 << bound_to)
        words = (ctypes.c_ulong * 1)(mask)
        assert _libc._try_syscall(NUMBERS["x86_64"]["set_mempolicy"], mode, words, 65) == 0

    yield settle
    settle()


@pytest.fixture
def leave() -> Iterator[Callable[[int], None]]:
    """Leave node 1 so many bytes: the rest goes into its pool of huge pages, which takes no time."""
    pool = NODES / "node1/hugepages/hugepages-2048kB/nr_hugepages"
    before = pool.read_text()

    def leave(size: int) -> None:
        pool.write_text(str(int(pool.read_text()) + (node_figures([1])[0].available - size) // PAGE))

    yield leave
    pool.write_text(before)


def test_there_are_two_nodes_with_a_processor_each():
    assert (NODES / "online").read_text().strip() == "0-1"
    assert [(NODES / f"node{node}/cpulist").read_text().strip() for node in (0, 1)] == ["0", "1"]
    assert _host.read_allowed_nodes() == _host.read_node_numbers() == (0, 1)
    reserves = _host.read_node_reserves()
    assert all(0 < reserves[node.number] < node.total // 8 for node in _host.read_nodes())


@pytest.mark.parametrize("huge_pages", ["require", "off"])
@pytest.mark.parametrize(
    ("numa", "expected"),
    [(None, None), ("first-touch", None), ([0], {0: SIZE}), ([1], {1: SIZE}), ("interleave", HALVES), ([1, 0], HALVES)],
)
def test_the_region_lies_where_it_was_asked_to(run, name, settle, huge_pages, numa, expected):
    async def main(cpu: int) -> None:
        async with aioshm.open_region(name, SIZE, huge_pages=huge_pages, threads=1, numa=numa) as region:
            assert bytes_by_node(region) == region.report.nodes == (expected or {cpu: SIZE})
            assert region.report.huge in (None, SIZE)

    for cpu in (0, 1):
        settle(cpu)
        run(main(cpu))


def test_the_nodes_take_turns(run, name):
    """Whole huge pages' worth each, from the one named first on; the end belongs to whose turn it is."""
    size = 3 * PAGE + MIB

    async def main():
        async with aioshm.open_region(name, size, numa=[1, 0]) as region:
            address = region._mapping.address
            ends = range(address + MIB - 4096, address + size, MIB)
            assert _libc.page_nodes(list(ends)) == [1, 1, 0, 0, 1, 1, 0]
            assert region.report.nodes == {0: PAGE + MIB, 1: 2 * PAGE}

    run(main())


def test_the_kernels_own_interleaving_would_not_do(run, name, monkeypatch):
    """The pages that are touched for the huge ones are every 512th: all on one node. It is why there are stripes."""

    def policies(request: Any, nodes: Any, span: range, **_: Any) -> Iterator[_numa.Policy]:
        yield _numa.Policy(span, _libc.MPOL_INTERLEAVE, (0, 1))

    monkeypatch.setattr(_numa, "choose_policies", policies)

    async def main():
        async with aioshm.open_region(name, SIZE, numa="interleave", huge_pages="require") as region:
            assert len(region.report.nodes) == 1

    run(main())


@pytest.mark.parametrize(("numa", "node"), [(None, 1), ("first-touch", 0), ([0], 0)])
def test_a_policy_of_the_process_holds_unless_something_else_is_asked_for(run, name, settle, numa, node):
    async def main():
        async with aioshm.open_region(name, SIZE, numa=numa) as region:
            assert region.report.nodes == {node: SIZE}

    settle(0, bound_to=1)
    run(main())


@pytest.mark.parametrize(
    ("numa", "small", "expected"),
    [([1], {"1": 8192}, {1: SIZE}), ("interleave", {"0": 4096, "1": 4096}, HALVES)],
)
def test_later_faults_obey_too_whoever_makes_them(run, name, ranks, numa, small, expected):
    joiner = ranks.start(preexec=lambda: os.sched_setaffinity(0, {0}))

    async def main():
        async with aioshm.open_region(name, SIZE, populate=False, numa=numa) as region:
            assert region.report.nodes == bytes_by_node(region) == {}
            joiner.open(SIZE, populate=False)  # of another mind: the creator's word counts
            for offset in (0, PAGE):
                joiner.ask("write", offset=offset, text="x")
            assert joiner.ask("nodes")["nodes"] == small
            await region.populate()
            assert bytes_by_node(region) == expected

    run(main())
    joiner.ask("close")


def test_a_joiner_says_where_it_lies(run, name):
    async def main():
        async with (
            aioshm.open_region(name, SIZE, numa=[1]),
            aioshm.open_region(name, SIZE, numa=[0]) as joined,
        ):
            assert joined.report.role == "joiner"
            assert joined.report.nodes == {1: SIZE}

    run(main())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, None), [{0: SIZE}, {1: SIZE}]),  # each touches its own first
        (([1], "interleave"), [{1: SIZE}, HALVES]),
    ],
)
def test_each_rank_decides_for_its_share(ranks, asked, expected):
    crew = [ranks.start(preexec=partial(os.sched_setaffinity, 0, {cpu})) for cpu in (0, 1)]
    for index, (rank, numa) in enumerate(zip(crew, asked, strict=True)):
        options = {"local_rank": index, "local_world_size": 2, "numa": numa}
        rank.send("open", name=rank.name, size=2 * SIZE, options=options)
    answers = [rank.answer() for rank in crew]
    found = [{int(node): size for node, size in answer["report"]["nodes"].items()} for answer in answers]
    assert found == expected
    for rank in crew:
        rank.ask("close")


@pytest.mark.parametrize(
    ("numa", "expected"),
    [("first-touch", {0: SIZE}), ([1], {1: SIZE}), ("interleave", HALVES), ([1, 0], HALVES)],
)
def test_pages_of_a_pool(run, name, hugetlbfs, settle, numa, expected):
    directory = hugetlbfs()

    async def main(*, populate: bool) -> None:
        async with aioshm.open_region(name, SIZE, directory=directory, numa=numa, populate=populate) as region:
            if populate:
                assert region.report.nodes == expected
            region.buffer[::PAGE] = b"x" * (SIZE // PAGE)
            assert bytes_by_node(region) == expected

    settle(0, bound_to=1 if numa == "first-touch" else 0)
    for populate in (True, False):
        run(main(populate=populate))


def test_a_pool_that_is_short_on_that_node(run, name, hugetlbfs):
    directory = hugetlbfs()
    _, free = _host.read_node_pool(1, PAGE)

    async def main():
        async with aioshm.open_region(name, (free + 1) * PAGE, directory=directory, numa=[1]):
            pass

    with pytest.raises(aioshm.InsufficientMemoryError, match="on NUMA node 1") as caught:
        run(main())
    assert (caught.value.level, caught.value.required, caught.value.available) == (
        "node 1",
        (free + 1) * PAGE,
        free * PAGE,
    )
    assert list(directory.iterdir()) == []


def test_a_node_that_is_full(run, name, leave):
    """Bound memory knows no other node, however much is free there: an error instead of a kill. The rest spills."""
    came: list[int] = []

    async def open_(size: int, numa: Any, on_progress: Callable[[aioshm.Progress], None]) -> dict[int, int]:
        async with aioshm.open_region(name, size, numa=numa, on_progress=on_progress) as region:
            return region.report.nodes

    def fill(progress: aioshm.Progress) -> None:
        if not came:
            leave(32 * MIB)
        came.append(progress.done)

    leave(256 * MIB)
    with pytest.raises(aioshm.InsufficientMemoryError, match="on NUMA node 1") as caught:
        run(open_(160 * MIB, [1], fill))  # others take it meanwhile
    assert caught.value.level == "node 1"
    assert came

    assert node_figures([0])[0].available > 256 * MIB
    came.clear()
    with pytest.raises(aioshm.InsufficientMemoryError, match="on NUMA node 1"):
        run(open_(128 * MIB, [1], lambda progress: came.append(progress.done)))
    assert came == []  # before a page was touched

    leave(-32 * MIB)  # what the kernel keeps to itself is not all of it out of reach
    nodes = run(open_(128 * MIB, "interleave", lambda _: None))
    assert sum(nodes.values()) == 128 * MIB
    assert nodes[0] > 64 * MIB


def test_where_the_kernel_refuses_there_is_one_warning_and_the_first_touch_decides(ranks):
    refuse = refuser("mbind", "set_mempolicy", "get_mempolicy", "move_pages")

    def prepare() -> None:
        os.sched_setaffinity(0, {0})
        refuse()

    rank = ranks.start(preexec=prepare)
    rank.ask("listen")
    for numa in ([1], "interleave", "first-touch"):
        assert rank.open(SIZE, numa=numa)["report"]["nodes"] is None
        assert rank.ask("nodes")["nodes"] == {"0": SIZE}
        rank.ask("close")
    (warned,) = [text for level, text in rank.ask("logged")["records"] if level == "WARNING"]
    assert "mbind" in warned
    assert "SYS_NICE" in warned


def test_nothing_of_it_stays(run, name, settle):
    """Neither on the next region of that name, nor on the process."""

    async def main():
        async with aioshm.open_region(name, SIZE, numa=[1]):
            assert "bind:1" in Path("/proc/self/numa_maps").read_text()  # as the kernel says of the file
        assert "bind:1" not in Path("/proc/self/numa_maps").read_text()
        async with aioshm.open_region(name, SIZE) as region:
            assert region.report.nodes == {0: SIZE}

    settle(0)
    run(main())


def test_the_log_says_where(run, name, caplog):
    async def main():
        async with aioshm.open_region(name, SIZE, numa=[1]):
            pass
        async with aioshm.open_region(name, SIZE, numa=[1, 0]):
            pass

    caplog.set_level("INFO", "aioshm")
    run(main())
    populated = [record.getMessage() for record in caplog.records if "populated" in record.getMessage()]
    assert populated[0].endswith(", on node 1")
    assert populated[1].endswith(", 4.0 MiB on node 0, 4.0 MiB on node 1")
