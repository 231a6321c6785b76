"""What the host says of itself: memory, processors, and the file system under a directory. Read-only."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from . import _libc


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
    kind: str
    page: int
    total: int
    free: int


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
    kinds = {_libc.TMPFS_MAGIC: "tmpfs", _libc.HUGETLBFS_MAGIC: "hugetlbfs"}
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

    Free pages less those promised to mappings (reserved), plus the surplus that may still be made on demand. See the
    kernel's admin-guide/mm/hugetlbpage.rst. A hugetlbfs without `size=` has no figures of its own.
    """
    pool = os.path.join(root, f"sys/kernel/mm/hugepages/hugepages-{page // 1024}kB")
    try:
        free, reserved, overcommit, surplus = (
            _read_number(os.path.join(pool, name))
            for name in ("free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
        )
    except (OSError, ValueError):
        return None
    return max(0, free - reserved + max(0, overcommit - surplus)) * page


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
