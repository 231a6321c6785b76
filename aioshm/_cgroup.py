"""The control groups this process is in: their memory limits and usage, level by level, and the CPU quota.

Both hierarchies are read: v2 (one tree) and v1 (one per controller), also side by side on a hybrid host. Where the tree
is mounted comes from /proc/self/mountinfo, where we stand in it from /proc/self/cgroup (see cgroups(7), proc(5));
a limit at the root of the mount says nothing about our own group. What cannot be read is left out: no limit
is known there, and a guess would refuse memory that is there.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# A v1 group without a limit shows LONG_MAX rounded down to a page (mm/page_counter.c, PAGE_COUNTER_MAX).
_V1_UNLIMITED = 1 << 62

# memory.high does not kill: it slows down whoever is above it, so much that a populate would hardly ever end.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}


@dataclass(frozen=True)
class MemoryLevel:
    """One control group on the way from this process's own to the root of the mount.

    Attributes:
        path: Its directory.
        version: 1 or 2.
    """

    path: str
    version: int

    def read_limit(self) -> int | None:
        """Return the limit in bytes, in v2 the lower of memory.max and memory.high; None: none, or unreadable."""
        return _lowest(_read(os.path.join(self.path, name)) for name in _LIMITS[self.version])

    def read_usage(self) -> int | None:
        """Return the bytes charged to the group and the groups below it; None where it cannot be read."""
        return _number(_read(os.path.join(self.path, _USAGE[self.version])))

    def read_reclaimable(self) -> int:
        """Return the bytes of the usage that the kernel gives up under pressure: file cache and slab.

        tmpfs pages are not on the file lists but on the anonymous ones, so shared memory is rightly
        not counted. 0 where it cannot be read.
        """
        return _reclaimable(_read(os.path.join(self.path, "memory.stat")) or "", self.version)

    def read_oom_kills(self) -> int:
        """Return how many processes the OOM killer has taken here, in v2 in the groups below too; 0: unreadable."""
        for line in (_read(os.path.join(self.path, _EVENTS[self.version])) or "").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return _number(value) or 0
        return 0

    def read_swap(self, host_swap: int) -> int:
        """Return the bytes the group may still swap out, at most the host's free swap.

        v1 counts memory and swap together (memory.memsw), v2 swap by itself. Without those files
        swap is not accounted for, and only the host's is a limit.
        """
        if host_swap <= 0:
            return 0
        if self.version == 2:
            return self._read_swap_left(host_swap)
        both = _limit(_read(os.path.join(self.path, "memory.memsw.limit_in_bytes")))
        used = _number(_read(os.path.join(self.path, "memory.memsw.usage_in_bytes"))) or 0
        memory, usage = self.read_limit(), self.read_usage()
        if both is None or memory is None or usage is None:
            return host_swap
        return min(host_swap, max(0, (both - used) - max(0, memory - usage)))

    def _read_swap_left(self, host_swap: int) -> int:
        """Return the least that a v2 swap limit leaves: one above holds too, where no memory limit need stand by it."""
        left, path = host_swap, self.path
        while (text := _read(os.path.join(path, "memory.swap.max"))) is not None:
            limit = _limit(text)
            if limit is not None:
                used = _number(_read(os.path.join(path, "memory.swap.current"))) or 0
                left = min(left, max(0, limit - used))
            path = os.path.dirname(path)  # the root of the tree has no such file
        return left


class LevelWatch:
    """The limit and the usage of one level, read again and again through files that stay open: a tenth of the cost."""

    def __init__(self, level: MemoryLevel) -> None:
        self.level = level
        self._limit_fds = [_open(os.path.join(level.path, name)) for name in _LIMITS[level.version]]
        self._usage_fd = _open(os.path.join(level.path, _USAGE[level.version]))

    def read_limit(self) -> int | None:
        """Return the limit in bytes, as `MemoryLevel.read_limit`."""
        return _lowest(map(_read_again, self._limit_fds))

    def read_usage(self) -> int | None:
        """Return the bytes charged to the group and the groups below it; None where it cannot be read."""
        return _number(_read_again(self._usage_fd))

    def close(self) -> None:
        """Close the files; twice is fine."""
        for fd in (*self._limit_fds, self._usage_fd):
            if fd is not None:
                os.close(fd)
        self._limit_fds, self._usage_fd = [], None


@dataclass(frozen=True)
class MemoryFigures:
    """What one level said at one moment, in bytes: limit and usage always of the same level.

    Attributes:
        level: The group's directory, or `"host"`.
        limit: What the level allows altogether.
        usage: What is in use.
        reclaimable: Of the usage, what the kernel can move out: file cache, slab, and what swap takes.
    """

    level: str
    limit: int
    usage: int
    reclaimable: int

    @property
    def headroom(self) -> int:
        """Bytes that can be had without reclaim."""
        return max(0, self.limit - self.usage)

    @property
    def available(self) -> int:
        """Bytes that can be had, reclaim included."""
        return max(0, self.limit - self.usage + self.reclaimable)


def memory_levels(root: str = "/") -> tuple[MemoryLevel, ...]:
    """Find the memory groups of this process, its own first, every ancestor up to the root of the mount after it.

    Args:
        root: What stands for `/`, so that a made tree can be read. The directories found start with it.
    """
    found = _find(root, "memory")
    if found is None:
        return ()
    directories, version = found
    return tuple(MemoryLevel(directory, version) for directory in directories)


def read_figures(levels: tuple[MemoryLevel, ...], host_swap: int = 0) -> list[MemoryFigures]:
    """Read every level that has a limit; the others, and those that cannot be read, are left out.

    Args:
        levels: Where to look.
        host_swap: Free swap of the host, in bytes.
    """
    figures = []
    for level in levels:
        limit, usage = level.read_limit(), level.read_usage()
        if limit is not None and usage is not None:
            reclaimable = level.read_reclaimable() + level.read_swap(host_swap)
            figures.append(MemoryFigures(level.path, limit, usage, min(usage, reclaimable)))
    return figures


def read_hugetlb_figures(page: int, *, reserves: bool, root: str = "/") -> list[MemoryFigures]:
    """Read every level that limits hugetlb pages, as a pod's `hugepages-2Mi` does.

    Args:
        page: Bytes per page.
        reserves: Whether the pages are still to be mapped: that is charged by itself (`rsvd`), and limited as well.
        root: What stands for `/`.
    """
    directories, version = _find(root, "hugetlb") or ([], 2)
    unit, shift = next((unit, shift) for unit, shift in (("GB", 30), ("MB", 20), ("KB", 10)) if page >> shift)
    limit_name, usage_name = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    figures = []
    for directory in directories:
        for kind in ("rsvd.", "") if reserves else ("",):
            file = os.path.join(directory, f"hugetlb.{page >> shift}{unit}.{kind}")
            limit, usage = _limit(_read(file + limit_name)), _number(_read(file + usage_name))
            if limit is not None and usage is not None:
                figures.append(MemoryFigures(directory, limit, usage, 0))
    return figures


def cpu_quota(root: str = "/") -> float | None:
    """Return the tightest CPU quota over this process, in processors (1.5 is 150 ms per 100 ms); None: no limit."""
    return _tightest_quota(_find(root, "cpu"))


def own_cpu_quota() -> float | None:
    """Return `cpu_quota()`, with the directories looked up once."""
    return _tightest_quota(_own_cpu_directories())


@functools.cache
def own_memory_levels() -> tuple[MemoryLevel, ...]:
    """Return `memory_levels()`, looked up once: where a process stands hardly ever changes, its figures always do."""
    return memory_levels()


@functools.cache
def _own_cpu_directories() -> tuple[list[str], int] | None:
    return _find("/", "cpu")


def _tightest_quota(found: tuple[list[str], int] | None) -> float | None:
    directories, version = found or ([], 2)
    quotas = [quota for directory in directories if (quota := _quota(directory, version)) is not None]
    return min(quotas, default=None)


def _find(root: str, controller: str) -> tuple[list[str], int] | None:
    """Return the directories, own first, of the hierarchy that has `controller`, and its version."""
    # Not splitlines(): a group's name may hold what that takes for the end of a line.
    memberships = (_read(os.path.join(root, "proc/self/cgroup")) or "").split("\n")
    mounts = (_read(os.path.join(root, "proc/self/mountinfo")) or "").split("\n")
    # v1 first: on a hybrid host the controller sits there, and the v2 tree has none of its files.
    for version in (1, 2):
        own = _membership(memberships, controller, version)
        mount = _mount(mounts, controller, version, own) if own is not None else None
        if own is not None and mount is not None:
            return [root.rstrip("/") + path for path in _climb(own, *mount)], version
    return None


def _membership(lines: list[str], controller: str, version: int) -> str | None:
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and (number == "0" and not controllers if version == 2 else controller in controllers.split(",")):
            return path
    return None


def _mount(lines: list[str], controller: str, version: int, own: str) -> tuple[str, str] | None:
    """Return the root within the hierarchy that is mounted, and where; of several mounts the widest that holds us."""
    found = []
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields, details = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(details) < 3:
            continue
        kind = details[0]
        if (kind == "cgroup2") if version == 2 else (kind == "cgroup" and controller in details[2].split(",")):
            found.append((unescape(fields[3]), unescape(fields[4])))
    return min(found, key=lambda mount: (not _is_below(own, mount[0]), len(mount[0])), default=None)


def _is_below(own: str, mounted_root: str) -> bool:
    return mounted_root in ("/", own) or own.startswith(mounted_root + "/")


def _climb(own: str, mounted_root: str, mount_point: str) -> Iterator[str]:
    """Yield the directories from our own group up to the mount point.

    A container sees its host's path in /proc/self/cgroup but only its own sub-tree mounted: then the
    part below the mounted root counts, and where we are not below it at all, the mount point is what we have.
    """
    inside = own[len(mounted_root) :] if _is_below(own, mounted_root) else ""
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:  # outside the cgroup namespace's root: cgroup_namespaces(7)
        parts = []
    for depth in range(len(parts), -1, -1):
        yield "/".join([mount_point.rstrip("/"), *parts[:depth]]) or "/"


def unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo: space, tab, newline, backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(path: str) -> str | None:
    fd = _open(path)
    if fd is None:
        return None
    try:  # by hand: a file object costs three times as much as the call, and a look reads a dozen of them
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b"")).decode("utf-8", errors="surrogateescape")
    except OSError:
        return None
    finally:
        os.close(fd)


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read_again(fd: int | None) -> str | None:
    """Read a file of a control group from its start: the kernel then writes it anew."""
    if fd is None:
        return None
    try:
        return os.pread(fd, 64, 0).decode("ascii", errors="replace")
    except OSError:  # ENODEV: the group was removed, and we were moved out of it
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _limit(text: str | None) -> int | None:
    limit = _number(text)  # "max" is no number, and no limit
    return limit if limit is not None and 0 <= limit < _V1_UNLIMITED else None


def _lowest(texts: Iterable[str | None]) -> int | None:
    return min((limit for limit in map(_limit, texts) if limit is not None), default=None)


def _reclaimable(stat: str, version: int) -> int:
    """Sum the lists that reclaim works on. v1 counts the sub-groups only in its `total_` lines."""
    wanted = (
        {"total_active_file", "total_inactive_file"}
        if version == 1
        else {"active_file", "inactive_file", "slab_reclaimable"}
    )
    total = 0
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key in wanted:
            total += _number(value) or 0
    return total


def _quota(directory: str, version: int) -> float | None:
    if version == 2:
        quota, _, period = (_read(os.path.join(directory, "cpu.max")) or "").partition(" ")
    else:
        quota = _read(os.path.join(directory, "cpu.cfs_quota_us")) or ""
        period = _read(os.path.join(directory, "cpu.cfs_period_us")) or ""
    microseconds, per = _number(quota), _number(period)
    return microseconds / per if microseconds is not None and per and microseconds > 0 else None
