"""What the host says beside its memory: mounts and their options, huge-page settings and pools, NUMA nodes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from made_tree import Tree

from aioshm._host import (
    HugePagePool,
    Mount,
    Node,
    find_mount,
    read_mount,
    read_nodes,
    read_pool,
    read_shmem_enabled,
    read_stalls,
)

MIB = 1 << 20
MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
31 22 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=65536k,huge=within_size
310 22 0:27 / /mnt/a\\040b\\134c rw master:1 propagate_from:2 - tmpfs none rw
32 22 0:28 /sub /else ro - tmpfs none rw
33 garbled
34 22 0:29 / /short - tmpfs
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("number", "mount"),
    [
        ("31", Mount("/dev/shm", ("rw", "size=65536k", "huge=within_size"))),
        ("310", Mount("/mnt/a b\\c", ("rw",))),
        ("32", Mount("/else", ("rw",))),
        ("3", None),
        ("33", None),
        ("34", None),
        ("", None),
    ],
)
def test_a_mount_is_found_by_its_number(number, mount):
    assert find_mount(MOUNTINFO, number) == mount


def test_options_with_and_without_a_value():
    mount = Mount("/", ("rw", "huge=always", "hugest=x", "size=1k"))
    assert (mount.find("huge"), mount.find("size"), mount.find("rw"), mount.find("hug")) == ("always", "1k", None, None)


def test_where_no_mount_can_be_told(tmp_path):
    assert read_mount(str(tmp_path / "missing")) is None
    assert read_mount(str(tmp_path), root=str(tmp_path)) is None


@pytest.mark.root
def test_the_upper_of_two_mounts_in_one_place_is_the_one_that_counts(small_tmpfs):
    where = small_tmpfs(mib=8, options="huge=never")
    over = ["mount", "-t", "tmpfs", "-o", "size=16m,huge=always", "aioshm-test", str(where)]
    subprocess.run(over, check=True)
    try:
        mount = read_mount(str(where))
        assert mount is not None
        assert (mount.point, mount.find("huge"), mount.find("size")) == (str(where), "always", "16384k")
        inner = where / "inner"
        inner.mkdir()
        assert read_mount(str(inner)) == mount
        link = where / "link"
        link.symlink_to(inner)
        assert read_mount(str(link)) == mount
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("always within_size advise [never] deny force\n", "never"),
        ("always within_size advise never [deny] force\n", "deny"),
        ("[always] within_size", "always"),
        ("always", None),
        ("", None),
        (None, None),
    ],
)
def test_shmem_enabled(tree, text, word):
    if text is not None:
        tree.write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", text)
    assert read_shmem_enabled(str(tree.root)) == word


def test_a_pool(tree):
    tree.pool(2 * MIB, free=10, reserved=4, overcommit=8, surplus=3)
    pool = read_pool(2 * MIB, str(tree.root))
    assert pool == HugePagePool(2 * MIB, free=10, reserved=4, overcommit=8, surplus=3)
    assert pool.available == 11 * 2 * MIB
    assert read_pool(1 << 30, str(tree.root)) is None


@pytest.mark.parametrize(
    ("text", "stalls"),
    [
        ("allocstall_dma 1\nallocstall_normal 20\ncompact_stall 300\ncompact_fail 4000\n", 321),
        ("compact_fail 1\n", 0),
        ("compact_stall many\n", None),
        ("compact_stall\n", None),
        (None, None),
    ],
)
def test_stalls_are_counted_of_both_kinds(tree, text, stalls):
    if text is not None:
        tree.write("proc/vmstat", text)
    assert read_stalls(str(tree.root)) == stalls


def test_the_stalls_of_this_host_can_be_read():
    assert read_stalls() >= 0


def test_nodes_in_order_and_only_those_with_memory(tree):
    for number, total in ((10, 4096), (0, 1024), (2, 0)):
        text = (
            f"\nNode {number} MemTotal: {total} kB\nNode {number} MemFree: {total // 4} kB\nNode {number} Dirty: 3 kB\n"
        )
        tree.write(f"/sys/devices/system/node/node{number}/meminfo", text)
    tree.write("/sys/devices/system/node/node3/meminfo", "garbled")
    tree.write("/sys/devices/system/node/possible", "0-3")
    (tree.root / "sys/devices/system/node/node4").mkdir()
    assert read_nodes(str(tree.root)) == (Node(0, 1 << 20, 1 << 18), Node(10, 4 << 20, 1 << 20))


def test_a_kernel_without_nodes(tree):
    assert read_nodes(str(tree.root)) == ()


def test_the_nodes_of_this_host_have_what_the_host_has():
    nodes = read_nodes()
    if not nodes:
        pytest.skip("this kernel knows no NUMA nodes")
    assert all(0 < node.free < node.total for node in nodes)
    assert sum(node.total for node in nodes) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.5
