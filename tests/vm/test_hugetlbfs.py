"""A hugetlbfs directory used as such: its page, its pool, and the size that was asked for. On the emulated machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cgroups import MemoryGroup, start_in
from memory_maps import mapped

import aioshm
from aioshm._host import read_huge_page_pool

MIB = 1 << 20
PAGE = 2 * MIB
GIB = 1 << 30

pytestmark = [pytest.mark.vm, pytest.mark.root]


def pool(name: str = "free_hugepages", page: int = PAGE) -> int:
    return int(Path(f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/{name}").read_text())


@pytest.fixture(autouse=True)
def _pool_is_whole_again(_on_the_machine: None):
    before = pool(), pool("resv_hugepages")
    yield
    assert (pool(), pool("resv_hugepages")) == before


async def fail(name: str, size: int, directory: Path, **options: Any) -> BaseException:
    """Open, and return the error it raises."""
    with pytest.raises((aioshm.AioshmError, OSError)) as caught:
        async with aioshm.open_region(name, size, directory=directory, **options):
            pass
    return caught.value


@pytest.mark.parametrize("huge_pages", ["try", "require", "off"])
def test_the_file_has_whole_pages_and_the_region_the_size_that_was_asked_for(run, name, hugetlbfs, huge_pages):
    directory, size, free = hugetlbfs(), 3 * MIB + 5, pool()

    async def main():
        async with aioshm.open_region(name, size, directory=directory, huge_pages=huge_pages) as region:
            assert (region.size, len(region.buffer)) == (size, size)
            assert os.stat(region.path).st_size == 2 * PAGE
            report = region.report
            assert (report.size, report.allocated, report.populated, report.huge) == (size, *[2 * PAGE] * 3)
            assert free - pool() == 2
            assert mapped(region, "KernelPageSize") == PAGE
            async with aioshm.open_region(name, size, directory=directory) as joined:
                assert (joined.created, joined.size, joined.report.allocated) == (False, size, 2 * PAGE)
                joined.buffer[size - 1] = 7
                assert region.buffer[size - 1] == 7
                assert free - pool() == 2
        assert list(directory.iterdir()) == []

    run(main())


def test_ranks_share_whole_pages(run, name, hugetlbfs):
    directory, size, free = hugetlbfs(), 4 * PAGE + 1, pool()

    async def rank(index: int, opened: asyncio.Barrier) -> tuple[int, bool]:
        options = {"local_rank": index, "local_world_size": 3, "directory": directory}
        async with aioshm.open_region(name, size, **options) as region:
            region.buffer[index] = index + 1
            await opened.wait()
            assert bytes(region.buffer[:3]) == b"\1\2\3"
            assert free - pool() == 5
            assert not os.path.exists(region.path)
            return region.report.populated

    async def main():
        opened = asyncio.Barrier(3)
        populated = await asyncio.gather(*(rank(index, opened) for index in range(3)))
        assert sorted(populated) == [PAGE, 2 * PAGE, 2 * PAGE]

    run(main())


def test_a_joiner_with_another_size_is_told(run, name, hugetlbfs):
    directory = hugetlbfs()

    async def main():
        async with aioshm.open_region(name, 3 * MIB, directory=directory):
            error = await fail(name, 4 * MIB + 1, directory)
        assert type(error) is aioshm.RegionMismatchError
        assert (error.field, error.expected, error.found) == ("size", 4 * MIB + 1, 3 * MIB)

    run(main())


def test_a_joiner_whose_size_takes_as_many_pages_is_told_too(run, name, hugetlbfs):
    directory = hugetlbfs()

    async def main():
        async with aioshm.open_region(name, 3 * MIB, directory=directory):
            error = await fail(name, 3 * MIB + 1, directory)
        assert type(error) is aioshm.RegionMismatchError
        assert (error.field, error.expected, error.found) == ("size", 3 * MIB + 1, 3 * MIB)

    run(main())


@pytest.mark.parametrize(("options", "bound"), [("", None), (",size=512M", None), (",size=16M", 16 * MIB)])
def test_what_the_pool_or_the_mount_cannot_hold_is_refused(run, name, hugetlbfs, options, bound):
    directory = hugetlbfs(f"pagesize=2M{options}")
    available = bound or pool() * PAGE
    error = run(fail(name, available + 1, directory, hint="Lower it."))
    assert type(error) is aioshm.InsufficientSpaceError
    assert (error.required, error.available, error.directory) == (available + PAGE, available, str(directory))
    assert str(error).endswith("Lower it.")
    assert "hugepages-2048kB/nr_hugepages" in str(error)
    assert "--shm-size" not in str(error)
    assert list(directory.iterdir()) == []

    async def main():
        async with aioshm.open_region(name, available, directory=directory) as region:
            assert region.report.huge == available

    run(main())  # to the last page


def test_pages_promised_to_others_are_not_free(run, name, hugetlbfs):
    directory = hugetlbfs()
    whole = pool() * PAGE

    async def main():
        async with aioshm.open_region(f"{name}-other", 3 * PAGE, directory=directory, populate=False):
            assert (pool(), pool("resv_hugepages")) == (whole // PAGE, 3)
            error = await fail(name, whole - 2 * PAGE, directory)
        assert type(error) is aioshm.InsufficientSpaceError
        assert (error.required, error.available) == (whole - 2 * PAGE, whole - 3 * PAGE)

    run(main())


def test_pages_that_the_kernel_may_still_make_count(run, name, hugetlbfs):
    directory, free = hugetlbfs(), pool()
    overcommit = Path(f"/sys/kernel/mm/hugepages/hugepages-{PAGE // 1024}kB/nr_overcommit_hugepages")
    overcommit.write_text("4")
    try:
        assert read_huge_page_pool(PAGE) == (free + 4) * PAGE

        async def main():
            async with aioshm.open_region(name, (free + 4) * PAGE, directory=directory) as region:
                assert region.report.huge == (free + 4) * PAGE
                assert pool("surplus_hugepages") == 4

        run(main())
    finally:
        overcommit.write_text("0")


def test_a_pool_that_others_take_after_the_look(ranks, name, run, hugetlbfs):
    """The kernel says ENOMEM when the file is mapped: that is no room, with the figures of the pool as it is now."""
    directory, whole = hugetlbfs(), pool() * PAGE
    rank = ranks.start()
    rank.ask("warm_up")
    rank.ask("stop_at", point="checked")
    rank.send("try_open", name=name, size=whole - 2 * PAGE, options={"directory": str(directory), "hint": "Lower it."})
    rank.wait_stopped()

    async def main():
        async with aioshm.open_region(f"{name}-other", 3 * PAGE, directory=directory):
            rank.resume()
            return rank.answer()

    answer = run(main())
    assert answer["outcome"] == "InsufficientSpaceError", answer
    assert (answer["facts"]["required"], answer["facts"]["available"]) == (whole - 2 * PAGE, whole - 3 * PAGE)
    assert list(directory.iterdir()) == []


def test_the_pages_of_a_leftover_are_there_for_the_next(ranks, name, run, hugetlbfs):
    directory, size = hugetlbfs(), pool() * PAGE
    rank = ranks.start()
    rank.open(size, directory=str(directory))
    rank.kill()
    assert pool() == 0

    async def main():
        async with aioshm.open_region(name, size, directory=directory) as region:
            assert (region.created, region.report.recycled) == (True, True)

    run(main())


def test_memory_groups_do_not_count_huge_pages(memory_group, ranks, hugetlbfs):
    group = memory_group(limit=96 * MIB)
    rank = ranks.start(preexec=group.enter)
    rank.open(50 * PAGE, directory=str(hugetlbfs()))
    assert group.usage < 96 * MIB
    rank.ask("close")
    rank.end()


def test_a_page_of_one_gibibyte(run, name, hugetlbfs):
    if not read_huge_page_pool(GIB):
        pytest.skip("the host of the machine had too little memory for it")
    directory = hugetlbfs("pagesize=1G")

    async def main():
        async with aioshm.open_region(name, 5 * MIB, directory=directory) as region:
            assert os.stat(region.path).st_size == region.report.huge == GIB
            assert mapped(region, "KernelPageSize") == GIB
            region.buffer[5 * MIB - 1] = 7

    run(main())
    error = run(fail(name, GIB + 1, directory))
    assert type(error) is aioshm.InsufficientSpaceError
    assert (error.required, error.available) == (2 * GIB, GIB)


@pytest.fixture
def limited(memory_group) -> Callable[[str, int], MemoryGroup]:
    """Make a control group that may have so many bytes of huge pages, by one of its limits."""
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+hugetlb")

    def limit(file: str, size: int) -> MemoryGroup:
        group = memory_group(limit=None)
        (group.path / file).write_text(str(size))
        return group

    return limit


@pytest.mark.parametrize("file", ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max"])
@pytest.mark.parametrize("policy", ["guard", "ignore"])
def test_what_a_control_group_may_not_have_of_the_pool_is_refused(ranks, limited, hugetlbfs, file, policy):
    """As a pod's `hugepages-2Mi` says; the kernel's own word for it is SIGBUS, or "Bad address"."""
    directory, group = hugetlbfs(), limited(file, 4 * PAGE)
    rank = start_in(ranks, group)
    options = {"directory": str(directory), "memory_policy": policy}
    rank.send("try_open", name=rank.name, size=5 * PAGE, options=options)
    answer = rank.answer()
    assert answer["outcome"] == "InsufficientMemoryError", answer
    facts = answer["facts"]
    assert (facts["level"], facts["limit"], facts["huge_page"]) == (str(group.path), 4 * PAGE, PAGE)
    # Where nobody looks before, the limit on touching is felt once it is reached.
    late = policy == "ignore" and "rsvd" not in file
    assert (facts["usage"], facts["required"]) == ((4 * PAGE, PAGE) if late else (0, 5 * PAGE))
    assert "hugepages-2Mi" in answer["message"]
    assert list(directory.iterdir()) == []
    rank.open(4 * PAGE, **options)
    rank.ask("close")
    rank.end()


def test_what_others_of_the_group_took_after_the_look(ranks, limited, hugetlbfs):
    """Not populated yet, a region is not counted: both fit when they look, and one of them when they populate."""
    directory, group = str(hugetlbfs()), limited("hugetlb.2MB.max", 4 * PAGE)
    first, second = start_in(ranks, group), start_in(ranks, group)
    first.ask("stop_at", point="checked")
    first.send("try_open", name=f"{first.name}-a", size=3 * PAGE, options={"directory": directory})
    first.wait_stopped()
    second.send("try_open", name=f"{first.name}-b", size=3 * PAGE, options={"directory": directory})
    assert second.answer()["outcome"] == "open"
    first.resume()
    answer = first.answer()
    assert answer["outcome"] == "InsufficientMemoryError", answer
    facts = answer["facts"]
    assert (facts["level"], facts["limit"], facts["usage"]) == (str(group.path), 4 * PAGE, 4 * PAGE)
    second.ask("close")
    for rank in (first, second):
        rank.end()


def test_what_is_reserved_for_the_region_itself_is_no_short_pool(ranks, limited, hugetlbfs):
    """Its own pages are not free for others, and still missing: it is the group that says no, not the pool."""
    directory, group = str(hugetlbfs()), limited("hugetlb.2MB.max", 4 * PAGE)
    rank = start_in(ranks, group)
    rank.send(
        "try_open", name=rank.name, size=pool() * PAGE, options={"directory": directory, "memory_policy": "ignore"}
    )
    answer = rank.answer()
    assert (answer["outcome"], answer["facts"]["level"]) == ("InsufficientMemoryError", str(group.path)), answer
    rank.end()


def test_preflight_tells_of_it(ranks, limited, hugetlbfs, run):
    directory, group = hugetlbfs(), limited("hugetlb.2MB.max", 4 * PAGE)
    before = Path("/proc/self/cgroup").read_text().split("::")[1].strip()
    group.enter()
    try:
        report = run(aioshm.preflight(5 * PAGE, directory=directory))
    finally:
        Path(f"/sys/fs/cgroup{before}/cgroup.procs").write_text(str(os.getpid()))
    (problem,) = report.problems
    assert type(problem) is aioshm.InsufficientMemoryError
    assert (report.largest, problem.level, problem.huge_page) == (4 * PAGE, str(group.path), PAGE)
