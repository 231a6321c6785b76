"""Where this process stands among the control groups, as /proc and /sys tell it on made trees, and what is no limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_tree import MEMORY, V1_UNLIMITED, V2, Tree

from aioshm._cgroup import MemoryFigures, cpu_quota, memory_levels, read_figures


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class TestWhereWeStand:
    def test_v2_own_group_first_then_its_ancestors_to_the_mount(self, tree):
        tree.inside("0::/kubepods/pod7/engine")
        tree.mount(V2, version=2)
        assert tree.levels() == [f"{V2}/kubepods/pod7/engine", f"{V2}/kubepods/pod7", f"{V2}/kubepods", V2]
        assert {one.version for one in memory_levels(str(tree.root))} == {2}

    def test_v1_takes_the_hierarchy_of_the_memory_controller(self, tree):
        tree.inside("3:cpu,cpuacct:/other", "2:memory:/docker/abc", "1:name=systemd:/x")
        tree.mount("/sys/fs/cgroup/cpu,cpuacct", version=1, controllers="cpu,cpuacct")
        tree.mount(MEMORY, version=1)
        assert tree.levels() == [f"{MEMORY}/docker/abc", f"{MEMORY}/docker", MEMORY]
        assert {one.version for one in memory_levels(str(tree.root))} == {1}

    def test_v1_controllers_mounted_together(self, tree):
        tree.inside("2:cpu,memory:/a")
        tree.mount("/cg", version=1, controllers="cpu,memory")
        assert tree.levels() == ["/cg/a", "/cg"]

    def test_a_controller_whose_name_only_begins_alike_is_another(self, tree):
        tree.inside("2:memory2:/a", "3:name=memory:/b")
        tree.mount("/cg", version=1, controllers="memory2")
        tree.mount("/named", version=1, controllers="name=memory")
        assert tree.levels() == []

    def test_hybrid_memory_stays_in_v1(self, tree):
        tree.inside("4:memory:/a", "0::/b")
        tree.mount("/sys/fs/cgroup/unified", version=2)
        tree.mount(MEMORY, version=1)
        assert tree.levels() == [f"{MEMORY}/a", MEMORY]

    def test_hybrid_memory_moved_to_v2(self, tree):
        tree.inside("4:cpu:/a", "0::/b")
        tree.mount("/sys/fs/cgroup/cpu", version=1, controllers="cpu")
        tree.mount("/sys/fs/cgroup/unified", version=2)
        assert tree.levels() == ["/sys/fs/cgroup/unified/b", "/sys/fs/cgroup/unified"]

    def test_hybrid_v1_is_listed_but_only_v2_is_mounted_here(self, tree):
        tree.inside("4:memory:/a", "0::/b")
        tree.mount(V2, version=2)
        assert tree.levels() == [f"{V2}/b", V2]

    def test_the_root_group(self, tree):
        tree.inside("0::/")
        tree.mount(V2, version=2)
        assert tree.levels() == [V2]

    def test_a_container_sees_its_hosts_path_and_only_its_own_part_of_the_tree(self, tree):
        tree.inside("2:memory:/docker/abc")
        tree.mount(MEMORY, version=1, root="/docker/abc")
        assert tree.levels() == [MEMORY]

    def test_below_the_part_that_is_mounted(self, tree):
        tree.inside("2:memory:/docker/abc/engine/rank")
        tree.mount(MEMORY, version=1, root="/docker/abc")
        assert tree.levels() == [f"{MEMORY}/engine/rank", f"{MEMORY}/engine", MEMORY]

    @pytest.mark.parametrize("own", ["/", "/docker/abcdef", "/docker/ab", "/elsewhere", "/../sibling"])
    def test_not_below_the_part_that_is_mounted_the_mount_point_is_what_there_is(self, tree, own):
        tree.inside(f"0::{own}")
        tree.mount(V2, version=2, root="/docker/abc")
        assert tree.levels() == [V2]

    def test_outside_the_root_of_the_cgroup_namespace(self, tree):
        tree.inside("0::/../../other")
        tree.mount(V2, version=2)
        assert tree.levels() == [V2]

    def test_mounted_from_above_the_namespaces_root(self, tree):
        tree.inside("0::/")
        tree.mount(V2, version=2, root="/..")
        assert tree.levels() == [V2]

    @pytest.mark.parametrize("narrow_first", [True, False])
    def test_of_two_mounts_that_hold_us_the_wider_shows_more_ancestors(self, tree, narrow_first):
        tree.inside("0::/pod/engine")
        mounts = [("/narrow", "/pod"), ("/wide", "/")]
        for where, root in mounts if narrow_first else mounts[::-1]:
            tree.mount(where, version=2, root=root)
        assert tree.levels() == ["/wide/pod/engine", "/wide/pod", "/wide"]

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_a_bind_mount_of_somebody_elses_group_is_passed_over(self, tree, ours_first):
        tree.inside("2:memory:/docker/abc")
        mounts = [(MEMORY, "/docker/abc"), ("/monitor/x", "/x")]
        for where, root in mounts if ours_first else mounts[::-1]:
            tree.mount(where, version=1, root=root)
        assert tree.levels() == [MEMORY]

    def test_octal_escapes_of_a_mount(self, tree):
        tree.inside("0::/a b\\c/d")
        tree.mount("/sys/my\\040groups\\134\\011x", version=2, root="/a\\040b\\134c")
        assert tree.levels() == ["/sys/my groups\\\tx/d", "/sys/my groups\\\tx"]

    def test_optional_fields_of_a_mount_may_be_any_number(self, tree):
        tree.inside("0::/a")
        tree.mount(V2, version=2, optional=" shared:9 master:1 propagate_from:2")
        assert tree.levels() == [f"{V2}/a", V2]

    @pytest.mark.parametrize(
        "odd", ["a:b", "k\u00f6nig", "line\u2028separator", "\x0b\r", "\udcff", "-.slice", "a - b"]
    )
    def test_odd_names_of_groups(self, tree, odd):
        tree.inside(f"0::/{odd}/x")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/{odd}", 100, 50)
        assert tree.levels() == [f"{V2}/{odd}/x", f"{V2}/{odd}", V2]
        assert [one.limit for one in tree.figures()] == [100]

    def test_a_group_that_was_removed_under_us(self, tree):
        tree.inside("0::/pod/gone (deleted)")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/pod", 100, 50)
        assert tree.figures() == [MemoryFigures(f"{V2}/pod", 100, 50, 0)]


class TestMissingAndGarbled:
    def test_no_proc_at_all(self, tmp_path):
        assert memory_levels(str(tmp_path)) == ()
        assert cpu_quota(str(tmp_path)) is None

    def test_no_membership(self, tree):
        tree.mount(V2, version=2)
        assert tree.levels() == []
        tree.inside()
        assert tree.levels() == []

    def test_no_mount(self, tree):
        tree.inside("0::/a", "2:memory:/b")
        assert tree.levels() == []

    @pytest.mark.parametrize("line", ["", "garbage", "0:", "0", "::", "x::/a", "1:cpu", "0:memory"])
    def test_garbled_membership(self, tree, line):
        tree.inside(line)
        tree.mount(V2, version=2)
        tree.mount(MEMORY, version=1)
        assert tree.levels() == []

    @pytest.mark.parametrize(
        "line", ["", "garbage", " - ", "1 2 3 - cgroup2", "1 2 3 4 - cgroup2 x y", "- cgroup2 a b"]
    )
    def test_garbled_mountinfo(self, tree, line):
        tree.inside("0::/a")
        tree.mounts.append(line)
        tree.mount(V2, version=2)
        assert tree.levels() == [f"{V2}/a", V2]

    def test_levels_without_files_are_left_out_and_the_others_kept(self, tree):
        tree.inside("0::/a/b/c")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 300, 30)  # b and c have no memory controller; the mount's root never has the files
        assert tree.figures() == [MemoryFigures(f"{V2}/a", 300, 30, 0)]

    @pytest.mark.parametrize("text", ["", "max", "none", "-1", "1.5", "0x10", "\n", str(1 << 62), str(V1_UNLIMITED)])
    def test_what_is_no_limit(self, tree, text):
        tree.write("/a/memory.max", text)
        tree.write("/b/memory.limit_in_bytes", text)
        assert tree.level("/a", 2).read_limit() is None
        assert tree.level("/b", 1).read_limit() is None

    def test_a_limit_of_nothing_is_a_limit(self, tree):
        tree.v2("/a", 0, 0)
        assert tree.level("/a", 2).read_limit() == 0

    @pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
    def test_limit_and_usage_come_together_or_not_at_all(self, tree, missing):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 100, 50)
        (tree.root / f"sys/fs/cgroup/a/{missing}").unlink()
        assert tree.figures() == []

    def test_garbled_usage(self, tree):
        tree.inside("0::/a")
        tree.mount(V2, version=2)
        tree.v2(f"{V2}/a", 100, "many")
        assert tree.figures() == []

    @pytest.mark.parametrize(
        "stat", ["", "active_file\n", "active_file x\ninactive_file 7\n", "\0\n inactive_file 9\n"]
    )
    def test_a_garbled_stat_counts_for_what_it_says(self, tree, stat):
        tree.v2("/a", 100, 50, stat)
        assert tree.level("/a", 2).read_reclaimable() == (7 if "inactive_file 7" in stat else 0)

    def test_a_missing_stat_says_that_nothing_is_reclaimable(self, tree):
        assert tree.level("/nowhere", 2).read_reclaimable() == 0
        assert tree.level("/nowhere", 1).read_reclaimable() == 0


def test_the_real_tree_of_this_process_reads_without_an_error():
    levels = memory_levels()
    assert len({one.path for one in levels}) == len(levels)
    for found in read_figures(levels):
        assert found.limit > 0
        assert 0 <= found.reclaimable <= found.usage
    quota = cpu_quota()
    assert quota is None or quota > 0
