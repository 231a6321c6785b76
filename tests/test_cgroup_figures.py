"""What the control groups' files say, on made trees: limit, usage, what is reclaimable, swap, and the CPU quota."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_tree import MEMORY, V1_UNLIMITED, V2, Tree

from aioshm._cgroup import MemoryFigures, cpu_quota, memory_levels, read_figures, read_hugetlb_figures


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class TestFigures:
    def test_limit_usage_and_reclaimable_are_of_one_level(self, tree):
        tree.inside("0::/pod/engine")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/pod/engine", "max", 40, "active_file 1\ninactive_file 2\n")
        tree.v2(f"{V2}/pod", 100, 50, "active_file 10\ninactive_file 20\nslab_reclaimable 5\n")
        assert tree.figures() == [MemoryFigures(f"{V2}/pod", 100, 50, 35)]

    def test_the_root_of_the_mount_says_nothing_about_us(self, tree):
        tree.inside("2:memory:/docker/abc")
        tree.mount(MEMORY, version=1)
        tree.v1(MEMORY, V1_UNLIMITED, 9000)
        tree.v1(f"{MEMORY}/docker", V1_UNLIMITED, 800)
        tree.v1(f"{MEMORY}/docker/abc", 512, 100)
        assert tree.figures() == [MemoryFigures(f"{MEMORY}/docker/abc", 512, 100, 0)]

    def test_every_level_with_a_limit_is_read(self, tree):
        tree.inside("2:memory:/a/b")
        tree.mount(MEMORY, version=1)
        tree.v1(f"{MEMORY}/a/b", 300, 10)
        tree.v1(f"{MEMORY}/a", 200, 150)
        assert [(one.level, one.available) for one in tree.figures()] == [(f"{MEMORY}/a/b", 290), (f"{MEMORY}/a", 50)]

    def test_v2_counts_file_cache_and_slab_but_not_shared_memory(self, tree):
        stat = "anon 1000\nfile 999\nshmem 500\ninactive_anon 400\nactive_anon 300\nslab_unreclaimable 60\n"
        tree.v2("/a", 1000, 1000, stat + "inactive_file 20\nactive_file 3\nslab_reclaimable 1\nslab 61\n")
        assert tree.level("/a", 2).read_reclaimable() == 24

    def test_v1_counts_the_groups_below_too_and_each_byte_once(self, tree):
        stat = "cache 900\nshmem 800\nactive_file 1\ninactive_file 2\n"
        tree.v1(
            "/a", 1000, 1000, stat + "total_cache 950\ntotal_shmem 880\ntotal_active_file 30\ntotal_inactive_file 4\n"
        )
        assert tree.level("/a", 1).read_reclaimable() == 34

    def test_usage_above_the_limit_leaves_nothing_and_never_less(self, tree):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 100, 180, "inactive_file 30\n")
        (found,) = tree.figures()
        assert (found.headroom, found.available) == (0, 0)
        tree.v2(f"{V2}/a", 100, 180, "inactive_file 90\n")
        (found,) = tree.figures()
        assert (found.headroom, found.available) == (0, 10)

    def test_no_more_is_reclaimable_than_is_in_use(self, tree):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 100, 40, "inactive_file 90\n")  # the two files are read one after the other
        (found,) = tree.figures()
        assert (found.reclaimable, found.available) == (40, 100)

    def test_figures_are_read_anew_each_time(self, tree):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 100, 40)
        levels = memory_levels(str(tree.root))
        assert [one.available for one in read_figures(levels)] == [60]
        tree.v2(f"{V2}/a", 70, 50)
        assert [one.available for one in read_figures(levels)] == [20]


class TestSwap:
    def test_v2_swap_is_counted_by_itself(self, tree):
        tree.v2("/a", 100, 100)
        tree.write("/a/memory.swap.max", "50\n")
        tree.write("/a/memory.swap.current", "20\n")
        assert tree.level("/a", 2).read_swap(1000) == 30
        assert tree.level("/a", 2).read_swap(7) == 7
        assert tree.level("/a", 2).read_swap(0) == 0

    @pytest.mark.parametrize(("limit", "swap"), [("0", 0), ("max", 1000), (None, 1000), ("10", 0)])
    def test_v2_without_swap_or_without_a_limit(self, tree, limit, swap):
        tree.v2("/a", 100, 100)
        if limit is not None:
            tree.write("/a/memory.swap.max", limit)
        tree.write("/a/memory.swap.current", "20")
        assert tree.level("/a", 2).read_swap(1000) == swap

    @pytest.mark.parametrize(
        ("both", "both_used", "usage", "swap"),
        [
            (150, 100, 100, 50),  # memory is full; 50 more may be swapped out
            (150, 80, 80, 50),  # 70 are left altogether, 20 of them as memory
            (100, 40, 40, 0),  # no swap beyond memory
            (150, 140, 100, 10),
            (150, 150, 100, 0),
            (150, 160, 120, 0),
        ],
    )
    def test_v1_counts_memory_and_swap_together(self, tree, both, both_used, usage, swap):
        tree.v1("/a", 100, usage)
        tree.write("/a/memory.memsw.limit_in_bytes", f"{both}\n")
        tree.write("/a/memory.memsw.usage_in_bytes", f"{both_used}\n")
        assert tree.level("/a", 1).read_swap(1000) == swap

    @pytest.mark.parametrize("both", [None, V1_UNLIMITED])
    def test_v1_without_swap_accounting_the_host_is_the_limit(self, tree, both):
        tree.v1("/a", 100, 50)
        if both is not None:
            tree.write("/a/memory.memsw.limit_in_bytes", f"{both}\n")
        assert tree.level("/a", 1).read_swap(1000) == 1000

    def test_swap_stands_in_the_figures_as_reclaimable(self, tree):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 100, 90, "inactive_file 5\n")
        tree.write(f"{V2}/a/memory.swap.max", "30")
        tree.write(f"{V2}/a/memory.swap.current", "10")
        assert [one.reclaimable for one in tree.figures(host_swap=1000)] == [25]
        assert [one.reclaimable for one in tree.figures()] == [5]


class TestCpuQuota:
    @pytest.mark.parametrize(
        ("text", "quota"),
        [
            ("150000 100000\n", 1.5),
            ("50000 100000", 0.5),
            ("max 100000\n", None),
            ("", None),
            ("max", None),
            ("200000", None),
            ("200000 0", None),
            ("x y", None),
            ("-1 100000", None),
        ],
    )
    def test_v2(self, tree, text, quota):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.write(f"{V2}/a/cpu.max", text)
        assert cpu_quota(str(tree.root)) == quota

    @pytest.mark.parametrize(("us", "quota"), [("250000", 2.5), ("-1", None), ("", None), ("0", None)])
    def test_v1(self, tree, us, quota):
        tree.inside("3:cpu,cpuacct:/a", "2:memory:/b")
        tree.mount("/sys/fs/cgroup/cpu,cpuacct", version=1, controllers="cpu,cpuacct")
        tree.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", us)
        tree.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
        assert cpu_quota(str(tree.root)) == quota

    def test_the_tightest_of_the_chain(self, tree):
        tree.inside("0::/pod/engine")
        tree.mount(V2, version=2)
        tree.write(f"{V2}/pod/engine/cpu.max", "max 100000")
        tree.write(f"{V2}/pod/cpu.max", "300000 100000")
        tree.write(f"{V2}/cpu.max", "800000 100000")
        assert cpu_quota(str(tree.root)) == 3.0

    def test_v1_without_its_period_is_no_quota(self, tree):
        tree.inside("3:cpu:/a")
        tree.mount("/cpu", version=1, controllers="cpu")
        tree.write("/cpu/a/cpu.cfs_quota_us", "100000")
        assert cpu_quota(str(tree.root)) is None

    def test_cpusets_are_another_controller(self, tree):
        tree.inside("3:cpuset:/a")
        tree.mount("/cpuset", version=1, controllers="cpuset")
        tree.write("/cpuset/a/cpu.cfs_quota_us", "100000")
        tree.write("/cpuset/a/cpu.cfs_period_us", "100000")
        assert cpu_quota(str(tree.root)) is None


class TestHugetlb:
    def figures(self, tree, page=2 << 20, *, reserves=False):
        found = read_hugetlb_figures(page, reserves=reserves, root=str(tree.root))
        return [(one.level.removeprefix(str(tree.root)), one.limit, one.usage) for one in found]

    def write(self, tree, path, kind, limit, usage, *, version=2):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        for name, value in zip(names, (limit, usage), strict=True):
            tree.write(f"{path}/hugetlb.{kind}.{name}", f"{value}\n")

    def test_every_level_with_a_limit_on_that_size_of_page(self, tree):
        tree.inside("0::/pod/engine")
        tree.mount(V2, version=2)
        self.write(tree, f"{V2}/pod/engine", "2MB", 40, 10)
        self.write(tree, f"{V2}/pod/engine", "1GB", 7, 1)
        self.write(tree, f"{V2}/pod", "2MB", 30, 20)
        self.write(tree, f"{V2}/pod", "1GB", "max", 1)
        assert self.figures(tree) == [(f"{V2}/pod/engine", 40, 10), (f"{V2}/pod", 30, 20)]
        assert self.figures(tree, 1 << 30) == [(f"{V2}/pod/engine", 7, 1)]
        assert self.figures(tree, 64 << 10) == []

    def test_reservations_have_a_limit_of_their_own(self, tree):
        tree.inside("0::/pod")
        tree.mount(V2, version=2)
        self.write(tree, f"{V2}/pod", "2MB", "max", 10)
        self.write(tree, f"{V2}/pod", "2MB.rsvd", 30, 20)
        assert self.figures(tree) == []
        assert self.figures(tree, reserves=True) == [(f"{V2}/pod", 30, 20)]

    def test_v1_has_a_tree_of_its_own(self, tree):
        where = "/sys/fs/cgroup/hugetlb"
        tree.inside("5:hugetlb:/pod", "2:memory:/other")
        tree.mount(where, version=1, controllers="hugetlb")
        self.write(tree, f"{where}/pod", "64KB", 1 << 20, 0, version=1)
        self.write(tree, where, "64KB", 0x7FFFFFFFFFFF0000, 0, version=1)
        assert self.figures(tree, 64 << 10) == [(f"{where}/pod", 1 << 20, 0)]

    def test_without_the_controller_nothing_is_limited(self, tree):
        assert self.figures(tree, reserves=True) == []
