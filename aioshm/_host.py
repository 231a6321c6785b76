"""What the host says of itself: memory, processors, and the file system under a directory. Read-only."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

from . import _libc
from ._cgroup import unescape

_NODES = "sys/devices/system/node"
_NODE = re.compile(r"node\d+")


@dataclass(frozen=True)
class HostMemory:
    """The host's memory, in bytes, as /proc/meminfo counts it.

    `available` is the kernel's own estimate of what can be had without swapping (MemAvailable), file
    cache that it would drop included.
    """

    total: int
    available: int
    swap_free: int


@dataclass(frozen=True)
class FileSystem:
    """The file system under a directory.

    Attributes:
        directory: The directory.
        kind: `"tmpfs"`, `"hugetlbfs"` or `"other"`.
        page: Bytes per page: allocation happens in whole ones.
        total: Bytes it may hold; 0 when it has no limit of its own.
        free: Bytes that an unprivileged process can still take.
    """

    directory: str
    kind: Literal["tmpfs", "hugetlbfs", "other"]
    page: int
    total: int
    free: int


@dataclass(frozen=True)
class Mount:
    """The mount that a directory stands on.

    Attributes:
        point: Where it is mounted.
        options: The options of its file system, such as `("rw", "size=65536k", "huge=never")`.
    """

    point: str
    options: tuple[str, ...]

    def find(self, option: str) -> str | None:
        """Return the value of an option; None where it is not among them."""
        values = (text.partition("=")[2] for text in self.options if text.startswith(option + "="))
        return next(values, None)


@dataclass(frozen=True)
class HugePagePool:
    """The hugetlb pages of one size: see the kernel's admin-guide/mm/hugetlbpage.rst.

    Attributes:
        page: Bytes of each.
        free: Pages that are not in use.
        reserved: Of the free, pages promised to mappings.
        overcommit: Pages that may be made on demand beside the pool.
        surplus: Pages that were made so.
    """

    page: int
    free: int
    reserved: int
    overcommit: int
    surplus: int

    @property
    def available(self) -> int:
        """Bytes that can still be had: what is free and not promised, and what may still be made on demand."""
        return max(0, self.free - self.reserved + max(0, self.overcommit - self.surplus)) * self.page


@dataclass(frozen=True)
class Node:
    """One NUMA node and its memory, in bytes; `reclaimable` is what the kernel would drop: file cache and slab."""

    number: int
    total: int
    free: int
    reclaimable: int = 0


def read_memory(root: str = "/") -> HostMemory | None:
    """Read the host's memory; None where it cannot be read.

    Args:
        root: What stands for `/`, so that a made tree can be read.
    """
    figures: dict[str, int] = {}
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key in ("MemTotal", "MemAvailable", "SwapFree"):
                    figures[key] = int(value.split()[0]) * 1024
        return HostMemory(figures["MemTotal"], figures["MemAvailable"], figures.get("SwapFree", 0))
    except (OSError, ValueError, LookupError):
        return None


def read_file_system(directory: str) -> FileSystem:
    """Read what stands under `directory`.

    Raises:
        OSError: As the kernel says: it is missing, or cannot be searched.
    """
    magic = _libc.file_system_magic(directory)
    kinds: dict[int, Literal["tmpfs", "hugetlbfs"]] = {_libc.TMPFS_MAGIC: "tmpfs", _libc.HUGETLBFS_MAGIC: "hugetlbfs"}
    figures = os.statvfs(directory)
    return FileSystem(
        directory=directory,
        kind=kinds.get(magic, "other"),
        page=figures.f_bsize if magic == _libc.HUGETLBFS_MAGIC else _libc.PAGE,
        total=figures.f_blocks * figures.f_frsize,
        free=figures.f_bavail * figures.f_frsize,
    )


def read_huge_page_pool(page: int, root: str = "/") -> int | None:
    """Return the bytes that hugetlb pages of `page` bytes can still give; None where it cannot be read.

    A hugetlbfs without `size=` has no figures of its own.
    """
    pool = read_pool(page, root)
    return None if pool is None else pool.available


def read_pool(page: int, root: str = "/") -> HugePagePool | None:
    """Read the pool of hugetlb pages of `page` bytes; None where there is none, or it cannot be read."""
    pool = os.path.join(root, f"sys/kernel/mm/hugepages/hugepages-{page // 1024}kB")
    try:
        free, reserved, overcommit, surplus = (
            _read_number(os.path.join(pool, name))
            for name in ("free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
        )
    except (OSError, ValueError):
        return None
    return HugePagePool(page, free, reserved, overcommit, surplus)


def read_stalls(root: str = "/") -> int | None:
    """Return how often, since the host was started, whoever wanted memory had to compact or reclaim it first.

    None where it cannot be read.
    """
    try:
        with open(os.path.join(root, "proc/vmstat"), encoding="ascii") as lines:
            counts = dict(line.split() for line in lines)
        return sum(int(value) for key, value in counts.items() if re.match("compact_stall|allocstall", key))
    except (OSError, ValueError):
        return None


def read_shmem_enabled(root: str = "/") -> str | None:
    """Return the word that `shmem_enabled` is set to, such as `"never"`; None where it cannot be read.

    For mounts of their own, such as /dev/shm, it decides only where it is `"deny"` or `"force"`; otherwise the mount's
    own `huge=` counts. See the kernel's admin-guide/mm/transhuge.rst.
    """
    try:
        with open(os.path.join(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled"), encoding="ascii") as file:
            chosen = re.search(r"\[(\w+)\]", file.read())
    except (OSError, ValueError):
        return None
    return chosen[1] if chosen else None


def read_mount(directory: str, root: str = "/") -> Mount | None:
    """Return the mount that `directory` stands on; None where it cannot be told.

    By its number, which the kernel tells of an open file (proc(5), fdinfo): a path may be mounted over.
    """
    try:
        fd = os.open(directory, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
        try:
            with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
                numbers = [line.split()[1] for line in lines if line.startswith("mnt_id:")]
        finally:
            os.close(fd)
        with open(
            os.path.join(root, "proc/self/mountinfo"), encoding="utf-8", errors="surrogateescape", newline="\n"
        ) as file:
            text = file.read()
    except (OSError, ValueError, LookupError):
        return None
    return find_mount(text, numbers[0]) if numbers else None


def find_mount(mountinfo: str, number: str) -> Mount | None:
    """Return the mount of this number from the text of a mountinfo file (proc(5)), or None."""
    for line in mountinfo.split("\n"):
        before, _, after = line.partition(" - ")
        fields, details = before.split(" "), after.split(" ")
        if fields[0] == number and len(fields) > 4 and len(details) > 2:
            return Mount(unescape(fields[4]), tuple(details[2].split(",")))
    return None


def read_nodes(root: str = "/") -> tuple[Node, ...]:
    """Read the NUMA nodes that have memory, in order; none where the kernel was built without NUMA."""
    try:
        names = os.listdir(os.path.join(root, _NODES))
    except OSError:
        return ()
    nodes = (read_node(number, root) for number in sorted(int(name[4:]) for name in names if _NODE.fullmatch(name)))
    return tuple(node for node in nodes if node is not None and node.total)


def read_node(number: int, root: str = "/") -> Node | None:
    """Read the memory of one NUMA node; None where it cannot be read."""
    figures: dict[str, int] = {}
    try:
        with open(os.path.join(root, _NODES, f"node{number}/meminfo"), encoding="ascii") as lines:
            for line in lines:
                fields = line.split()  # Node 0 MemTotal: 16000000 kB
                if len(fields) > 3:
                    figures[fields[2]] = int(fields[3]) * 1024
        reclaimable = sum(figures.get(key, 0) for key in ("Active(file):", "Inactive(file):", "SReclaimable:"))
        return Node(number, figures["MemTotal:"], figures["MemFree:"], reclaimable)
    except (OSError, ValueError, LookupError):
        return None


def read_node_pool(number: int, page: int, root: str = "/") -> tuple[int, int] | None:
    """Return how many hugetlb pages of `page` bytes a NUMA node has, and how many are free; None where unknown."""
    pool = os.path.join(root, _NODES, f"node{number}/hugepages/hugepages-{page // 1024}kB")
    try:
        return _read_number(os.path.join(pool, "nr_hugepages")), _read_number(os.path.join(pool, "free_hugepages"))
    except (OSError, ValueError):
        return None


def read_node_numbers(root: str = "/") -> tuple[int, ...]:
    """Return the NUMA nodes that have memory; none where the kernel was built without NUMA, or it cannot be read."""
    try:
        with open(os.path.join(root, _NODES, "has_memory"), encoding="ascii") as file:
            return _parse_list(file.read())
    except (OSError, ValueError):
        return ()


def read_allowed_nodes(root: str = "/") -> tuple[int, ...]:
    """Return those of the NUMA nodes with memory that the cpuset of this process lets it take from."""
    nodes = read_node_numbers(root)
    try:
        with open(os.path.join(root, "proc/self/status"), encoding="ascii", errors="replace") as lines:
            allowed = [line.split()[1] for line in lines if line.startswith("Mems_allowed_list:")]
        return tuple(sorted(set(nodes) & set(_parse_list(allowed[0]))))
    except (OSError, ValueError, LookupError):
        return nodes


def read_node_reserves(root: str = "/") -> dict[int, int]:
    """Return the bytes of each NUMA node that the kernel keeps to itself; nothing where they cannot be read.

    As its own estimate has it (mm/page_alloc.c: calculate_totalreserve_pages): what is free up to the high watermark,
    and what it protects of each zone.
    """
    reserves: dict[int, int] = {}
    node = high = managed = 0
    try:
        with open(os.path.join(root, "proc/zoneinfo"), encoding="ascii") as lines:
            for line in lines:
                fields = line.split()
                if fields[:1] == ["Node"]:  # Node 0, zone   Normal
                    node = int(fields[1].rstrip(","))
                elif fields[:1] == ["high"]:
                    high = int(fields[1])
                elif fields[:1] == ["managed"]:
                    managed = int(fields[1])
                elif fields[:1] == ["protection:"]:
                    protected = max(int(figure.strip("(),")) for figure in fields[1:])
                    reserves[node] = reserves.get(node, 0) + min(managed, high + protected) * _libc.PAGE
    except (OSError, ValueError, LookupError):
        return {}
    return reserves


def _parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as the kernel writes it: `0-2,7`."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return tuple(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def usable_cpus(quota: float | None) -> int:
    """Return how many processors this process may keep busy: its affinity mask, cut to the cgroup's quota.

    Args:
        quota: Processors' worth of time per period, or None for no limit.
    """
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus, math.floor(quota))) if quota is not None else cpus


def _read_number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())
