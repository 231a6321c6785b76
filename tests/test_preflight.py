"""Will it fit, from made facts: the judgement, what is raised, what is logged at which level, and in which words."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tree import V2, Tree

import aioshm
from aioshm import _cgroup, _host, _preflight
from aioshm._cgroup import MemoryFigures, memory_levels
from aioshm._host import FileSystem, HostMemory, read_huge_page_pool, read_memory
from aioshm._preflight import RESERVE, free_bytes, host_figures, judge_memory, memory_required
from aioshm._request import Request, check_request

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HUGE = 2 * MIB
ROOMY = FileSystem("/dev/shm", "tmpfs", 4096, 0, 0)  # no limit of its own


def request(**changed: Any) -> Request:
    parameters = inspect.signature(aioshm.open_region).parameters.values()
    arguments = {one.name: one.default for one in parameters if one.default is not one.empty}
    return check_request(**{**arguments, "name": "kv", "size": 4096, "allocation_name": "CPU KV cache", **changed})


def figures(level: str, *, limit: int, usage: int, reclaimable: int = 0) -> MemoryFigures:
    return MemoryFigures(level, limit, usage, reclaimable)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A made `/` that the preflight reads in place of the real one; nothing is in it."""
    tree = Tree(tmp_path)
    root = str(tmp_path)
    monkeypatch.setattr(_cgroup, "own_memory_levels", lambda: memory_levels(root))
    monkeypatch.setattr(_preflight, "leftover_bytes", lambda _: 0)
    monkeypatch.setattr(_host, "read_memory", functools.partial(read_memory, root))
    monkeypatch.setattr(_host, "read_huge_page_pool", functools.partial(read_huge_page_pool, root=root))
    return tree


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What aioshm logs from here on."""
    handler = logging.Handler()
    records: list[logging.LogRecord] = []
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("aioshm")
    caplog.set_level(logging.DEBUG, logger="aioshm")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def put_inside(tree: Tree, *, limit: int, usage: int, file_cache: int = 0) -> str:
    """Put the process into a group with these figures, and return its directory."""
    tree.inside("0::/pod")
    tree.mount(V2, version=2)
    tree.v2(f"{V2}/pod", limit, usage, f"inactive_file {file_cache}\n")
    return f"{tree.root}{V2}/pod"


class TestJudgement:
    def test_without_a_limit_there_is_no_finding(self):
        assert judge_memory(1 << 60, []) is None

    @pytest.mark.parametrize(
        ("required", "verdict"), [(0, "fits"), (60, "fits"), (61, "reclaim"), (90, "reclaim"), (91, "short")]
    )
    def test_on_the_border(self, required, verdict):
        finding = judge_memory(required, [figures("a", limit=100, usage=40, reclaimable=30)])
        assert finding is not None
        assert (finding.verdict, finding.required) == (verdict, required)

    def test_the_tightest_level_decides_whatever_the_order(self):
        loose = figures("loose", limit=1000, usage=100)
        tight = figures("tight", limit=300, usage=250)
        for levels in ([loose, tight], [tight, loose]):
            finding = judge_memory(51, levels)
            assert finding is not None
            assert (finding.verdict, finding.figures) == ("short", tight)
            finding = judge_memory(50, levels)
            assert finding is not None
            assert (finding.verdict, finding.figures) == ("fits", tight)

    def test_a_level_that_has_to_reclaim_is_named_though_another_has_less_to_give(self):
        cached = figures("cached", limit=1000, usage=990, reclaimable=900)
        small = figures("small", limit=200, usage=0)
        finding = judge_memory(100, [small, cached])
        assert finding is not None
        assert (finding.verdict, finding.figures) == ("reclaim", cached)

    def test_of_several_levels_that_have_to_reclaim_the_tightest_is_named(self):
        own = figures("own", limit=100, usage=90, reclaimable=80)
        parent = figures("parent", limit=100, usage=90, reclaimable=60)
        for levels in ([own, parent], [parent, own]):
            finding = judge_memory(50, levels)
            assert finding is not None
            assert (finding.verdict, finding.figures) == ("reclaim", parent)

    def test_a_level_above_its_limit_has_nothing(self):
        finding = judge_memory(1, [figures("a", limit=100, usage=150, reclaimable=50)])
        assert finding is not None
        assert finding.verdict == "short"

    levels = st.lists(
        st.builds(
            MemoryFigures,
            level=st.sampled_from(["a", "b", "host"]),
            limit=st.integers(0, 1000),
            usage=st.integers(0, 1000),
            reclaimable=st.integers(0, 300),
        ),
        min_size=1,
        max_size=4,
    )

    @given(st.integers(0, 1500), levels)
    def test_short_exactly_where_some_level_cannot_give_it(self, required, levels):
        finding = judge_memory(required, levels)
        assert finding is not None
        short = any(required > max(0, one.limit - one.usage + one.reclaimable) for one in levels)
        reclaim = any(required > max(0, one.limit - one.usage) for one in levels)
        assert finding.verdict == ("short" if short else "reclaim" if reclaim else "fits")
        if finding.verdict != "fits":  # what is reported must bear out the verdict
            there = finding.figures.available if short else finding.figures.headroom
            assert required > there

    def test_memory_required_counts_page_tables_and_a_reserve(self):
        assert memory_required(0) == RESERVE == 8 * MIB
        assert memory_required(64 * GIB) == 64 * GIB + 128 * MIB + RESERVE

    def test_the_hosts_figures(self):
        level = host_figures(HostMemory(total=1000, available=300, swap_free=50))
        assert (level.level, level.headroom, level.available) == ("host", 300, 350)


class TestHost:
    def test_meminfo(self, tree):
        tree.meminfo(total=64 * GIB, available=10 * GIB, swap_free=GIB)
        assert read_memory(str(tree.root)) == HostMemory(64 * GIB, 10 * GIB, GIB)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "garbage",
            "MemTotal: x kB\nMemAvailable: 1 kB\n",
            "MemTotal: 5 kB\n",
            "MemAvailable: 5 kB\n",
            "MemTotal:\n",
        ],
    )
    def test_garbled_meminfo_is_not_guessed_at(self, tree, text):
        tree.write("/proc/meminfo", text)
        assert read_memory(str(tree.root)) is None

    def test_a_kernel_without_swap(self, tree):
        tree.write("/proc/meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\n")
        assert read_memory(str(tree.root)) == HostMemory(8192, 4096, 0)

    def test_own_groups_first_and_the_host_last(self, tree):
        group = put_inside(tree, limit=500, usage=100)
        tree.meminfo(total=64 * KIB, available=16 * KIB, swap_free=4 * KIB)
        assert [(one.level, one.limit) for one in _preflight.read_memory_figures()] == [
            (group, 500),
            ("host", 64 * KIB),
        ]
        (tree.root / "proc/meminfo").unlink()
        assert [one.level for one in _preflight.read_memory_figures()] == [group]


class TestWhatIsLogged:
    @pytest.mark.parametrize("policy", ["guard", "warn"])
    def test_one_debug_line_when_it_fits(self, tree, log, policy):
        group = put_inside(tree, limit=500 * MIB, usage=100 * MIB)
        _preflight.check(request(memory_policy=policy), 300 * MIB, ROOMY)
        (line,) = log
        assert (line.levelname, line.name) == ("DEBUG", "aioshm")
        assert line.getMessage() == f"CPU KV cache: 308.6 MiB fit: 400.0 MiB free in {group}"

    @pytest.mark.parametrize("policy", ["guard", "warn"])
    def test_one_warning_when_it_fits_only_after_reclaim(self, tree, log, policy):
        group = put_inside(tree, limit=500 * MIB, usage=450 * MIB, file_cache=400 * MIB)
        tree.meminfo(total=100 * GIB, available=90 * GIB)
        _preflight.check(request(memory_policy=policy), 300 * MIB, ROOMY)
        (line,) = log
        assert line.levelname == "WARNING"
        assert line.getMessage() == (
            f"CPU KV cache: 308.6 MiB required, which fits only after reclaim in memory level {group}: "
            "usage 450.0 MiB, available 450.0 MiB, limit 500.0 MiB, remaining 50.0 MiB"
        )

    def test_one_warning_when_it_does_not_fit_and_the_policy_is_to_warn(self, tree, log):
        group = put_inside(tree, limit=500 * MIB, usage=450 * MIB, file_cache=100 * MIB)
        _preflight.check(request(memory_policy="warn"), 300 * MIB, ROOMY)
        (line,) = log
        assert line.levelname == "WARNING"
        assert line.getMessage() == (
            f"CPU KV cache: 308.6 MiB required, which does NOT fit in memory level {group}: "
            "usage 450.0 MiB, available 150.0 MiB, limit 500.0 MiB, remaining 50.0 MiB"
        )

    def test_an_error_and_no_line_when_it_does_not_fit_and_the_policy_is_to_guard(self, tree, log):
        group = put_inside(tree, limit=500 * MIB, usage=450 * MIB, file_cache=100 * MIB)
        with pytest.raises(aioshm.InsufficientMemoryError) as caught:
            _preflight.check(request(hint="Lower it."), 300 * MIB, ROOMY)
        error = caught.value
        assert vars(error) == {
            "allocation_name": "CPU KV cache",
            "level": group,
            "required": memory_required(300 * MIB),
            "limit": 500 * MIB,
            "usage": 450 * MIB,
            "reclaimable": 100 * MIB,
            "hint": "Lower it.",
            "huge_page": None,
        }
        assert str(error).endswith("container or pod. Lower it.")
        assert log == []

    def test_the_host_can_be_what_is_short(self, tree):
        put_inside(tree, limit=500 * GIB, usage=0)
        tree.meminfo(total=64 * GIB, available=GIB, swap_free=GIB)
        with pytest.raises(aioshm.InsufficientMemoryError, match="on this host") as caught:
            _preflight.check(request(), 3 * GIB, ROOMY)
        assert (caught.value.level, caught.value.available) == ("host", 2 * GIB)

    def test_swap_of_the_host_is_a_reason_to_warn(self, tree, log):
        tree.meminfo(total=64 * GIB, available=GIB, swap_free=4 * GIB)
        _preflight.check(request(), 2 * GIB, ROOMY)
        assert [(line.levelname, "only after reclaim in memory level host" in line.getMessage()) for line in log] == [
            ("WARNING", True)
        ]

    @pytest.mark.parametrize("usage", [0, 400 * MIB, 500 * MIB])
    def test_silence_when_told_to_ignore(self, tree, log, usage):
        put_inside(tree, limit=500 * MIB, usage=usage)
        _preflight.check(request(memory_policy="ignore"), 300 * MIB, ROOMY)
        assert log == []

    @pytest.mark.parametrize("policy", ["guard", "warn", "ignore"])
    def test_silence_where_nothing_can_be_read(self, tree, log, policy):
        _preflight.check(request(memory_policy=policy), 1 << 50, ROOMY)
        assert log == []


class TestSpace:
    def test_exactly_enough_is_enough(self, tree, log):
        _preflight.check(request(), 100 * MIB, FileSystem("/dev/shm", "tmpfs", 4096, 200 * MIB, 100 * MIB))
        assert log == []

    def test_one_page_too_many(self, tree):
        file_system = FileSystem("/dev/shm", "tmpfs", 4096, 200 * MIB, 100 * MIB)
        with pytest.raises(aioshm.InsufficientSpaceError) as caught:
            _preflight.check(request(hint="Lower it."), 100 * MIB + 4096, file_system)
        assert vars(caught.value) == {
            "allocation_name": "CPU KV cache",
            "directory": "/dev/shm",
            "required": 100 * MIB + 4096,
            "available": 100 * MIB,
            "hint": "Lower it.",
            "reclaimable_leftovers": 0,
            "huge_page": None,
        }
        assert str(caught.value) == (
            "Insufficient space in /dev/shm for CPU KV cache: 100.1 MiB required, 100.0 MiB free (0.1 MiB short). "
            "Increase /dev/shm (e.g. --shm-size or --ipc=host, or an emptyDir with medium: Memory and a larger "
            "sizeLimit). Lower it."
        )

    @pytest.mark.parametrize("policy", ["guard", "warn", "ignore"])
    def test_space_is_checked_whatever_the_memory_policy(self, tree, policy):
        with pytest.raises(aioshm.InsufficientSpaceError):
            _preflight.check(request(memory_policy=policy), 2, FileSystem("/dev/shm", "tmpfs", 4096, 2, 1))

    def test_space_comes_before_memory(self, tree, log):
        put_inside(tree, limit=1, usage=1)
        with pytest.raises(aioshm.InsufficientSpaceError):
            _preflight.check(request(), 2, FileSystem("/dev/shm", "tmpfs", 4096, 2, 1))
        assert log == []

    def test_a_tmpfs_without_a_limit_has_none_to_check(self, tree):
        assert free_bytes(ROOMY) is None
        _preflight.check(request(), 1 << 50, ROOMY)


class TestHugePagePool:
    @pytest.mark.parametrize(
        ("pool", "pages"),
        [
            ({"free": 10}, 10),
            ({"free": 10, "reserved": 4}, 6),
            ({"free": 0, "overcommit": 8}, 8),
            ({"free": 10, "reserved": 4, "overcommit": 8, "surplus": 3}, 11),
            ({"free": 2, "overcommit": 3, "surplus": 5}, 2),  # the overcommit limit was lowered meanwhile
            ({"free": 4, "reserved": 6, "overcommit": 8}, 6),
            ({"free": 4, "reserved": 10, "overcommit": 1}, 0),
            ({"free": 0}, 0),
        ],
    )
    @pytest.mark.parametrize("page", [HUGE, GIB, 64 * KIB])
    def test_what_a_pool_can_still_give(self, tree, pool, pages, page):
        tree.pool(page, **pool)
        assert read_huge_page_pool(page, str(tree.root)) == pages * page

    def test_a_pool_of_another_size_is_another_pool(self, tree):
        tree.pool(GIB, free=4)
        assert read_huge_page_pool(HUGE, str(tree.root)) is None

    @pytest.mark.parametrize(
        "file", ["free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages"]
    )
    @pytest.mark.parametrize("text", [None, "", "x"])
    def test_an_unreadable_pool_is_not_guessed_at(self, tree, file, text):
        tree.pool(HUGE, free=4)
        path = tree.root / "sys/kernel/mm/hugepages/hugepages-2048kB" / file
        path.unlink() if text is None else path.write_text(text)
        assert read_huge_page_pool(HUGE, str(tree.root)) is None

    def test_a_mount_without_a_size_is_bounded_by_its_pool(self, tree):
        tree.pool(HUGE, free=4, reserved=1)
        assert free_bytes(FileSystem("/huge", "hugetlbfs", HUGE, 0, 0)) == 3 * HUGE

    @pytest.mark.parametrize(
        ("mount", "free"), [(2 * HUGE, 2 * HUGE), (3 * HUGE, 3 * HUGE), (9 * HUGE, 3 * HUGE), (0, 0)]
    )
    def test_a_mount_with_a_size_is_bounded_by_both(self, tree, mount, free):
        tree.pool(HUGE, free=3)
        assert free_bytes(FileSystem("/huge", "hugetlbfs", HUGE, 9 * HUGE, mount)) == free

    def test_a_mount_with_a_size_and_an_unreadable_pool(self, tree):
        assert free_bytes(FileSystem("/huge", "hugetlbfs", HUGE, 9 * HUGE, 4 * HUGE)) == 4 * HUGE

    def test_huge_pages_are_no_memory_of_groups_or_host(self, tree, log):
        tree.pool(HUGE, free=3)
        put_inside(tree, limit=1, usage=1)
        tree.meminfo(total=4 * KIB, available=0)
        _preflight.check(request(), 3 * HUGE, FileSystem("/huge", "hugetlbfs", HUGE, 0, 0))
        assert log == []
        with pytest.raises(aioshm.InsufficientSpaceError) as caught:
            _preflight.check(request(directory="/huge"), 4 * HUGE, FileSystem("/huge", "hugetlbfs", HUGE, 0, 0))
        assert (caught.value.required, caught.value.available) == (4 * HUGE, 3 * HUGE)
