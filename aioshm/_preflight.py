"""Will it fit: facts in, findings out. What is read stands in `_host` and `_cgroup`; nothing is allocated here.

Two limits can kill a server that does not look: the free bytes of the file system, and the memory that the process
may use. tmpfs may be larger than either the container's limit or the host's memory, and then touching pages ends
in the OOM killer, not in an error. Only the creator checks: a joiner would count the creator's pages as missing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from . import _cgroup, _host, _libc
from ._cgroup import MemoryFigures, MemoryLevel
from ._errors import (
    InsufficientMemoryError,
    InsufficientSpaceError,
    UnsuitableDirectoryError,
    UnsupportedPlatformError,
)
from ._host import FileSystem, HostMemory
from ._leftovers import leftover_bytes
from ._log import log
from ._request import Need, Request
from ._units import mib, mib_down, mib_up

# Left to the process beside the region: its own heap goes on growing, and a cgroup is charged in batches.
RESERVE = 8 << 20


@dataclass(frozen=True)
class Finding:
    """What one memory level says to a request.

    Attributes:
        verdict: `"fits"`, `"reclaim"` (fits once the kernel has dropped caches) or `"short"`.
        required: Bytes needed: the region, its page tables, and a reserve for the process.
        figures: What the level said.
    """

    verdict: Literal["fits", "reclaim", "short"]
    required: int
    figures: MemoryFigures


def memory_required(size: int) -> int:
    """Return the bytes of memory that populating `size` bytes takes at the most.

    Page tables of small pages cost 8 bytes per 4 KiB and are charged to the group as well.
    """
    return size + size // (_libc.PAGE // 8) + RESERVE


def largest_size(available: int, page: int) -> int:
    """Return the most bytes, in whole pages, whose `memory_required` is not more than `available`."""
    parts = _libc.PAGE // 8
    return max(0, available - RESERVE) * parts // (parts + 1) // page * page


def judge_memory(required: int, levels: list[MemoryFigures]) -> Finding | None:
    """Judge by the tightest of `levels`, the one with the least to give; None where there is no limit at all."""
    if not levels:
        return None
    tightest = min(levels, key=lambda figures: figures.available)
    # The warning is due where any level has to reclaim, the error where the tightest cannot even then.
    if required > tightest.available:
        return Finding("short", required, tightest)
    reclaiming = [figures for figures in levels if required > figures.headroom]
    if reclaiming:
        return Finding("reclaim", required, min(reclaiming, key=lambda figures: figures.available))
    return Finding("fits", required, tightest)


def host_figures(memory: HostMemory) -> MemoryFigures:
    """Return the host's memory as a level: MemAvailable counts what the kernel would drop, swap comes on top."""
    return MemoryFigures("host", memory.total, memory.total - memory.available, memory.swap_free)


def node_figures(nodes: Iterable[int]) -> list[MemoryFigures]:
    """Read NUMA nodes as levels, for memory that is bound to them.

    As the host's: what the kernel would drop is to be had, and what it keeps to itself is not.
    """
    read = (_host.read_node(number) for number in nodes)
    kept = _node_reserves()
    return [
        MemoryFigures(f"node {node.number}", node.total, node.total - max(0, available), 0)
        for node in read
        if node is not None
        for available in [node.free + node.reclaimable - kept.get(node.number, 0)]
    ]


@functools.cache
def _node_reserves() -> dict[int, int]:
    return _host.read_node_reserves()  # a long file, and as good as constant


def read_memory_figures(levels: tuple[MemoryLevel, ...] | None = None) -> list[MemoryFigures]:
    """Read all levels that limit this process now: its control groups, and the host last."""
    host = _host.read_memory()
    figures = _cgroup.read_figures(
        _cgroup.own_memory_levels() if levels is None else levels, host.swap_free if host else 0
    )
    return [*figures, host_figures(host)] if host else figures


def free_bytes(file_system: FileSystem) -> int | None:
    """Return the bytes that the file system can still take; None where it has no limit of its own.

    A hugetlbfs takes its pages from the pool: a `size=` of the mount bounds it further, and promises nothing.
    """
    own = file_system.free if file_system.total else None
    pool = _host.read_huge_page_pool(file_system.page) if file_system.kind == "hugetlbfs" else None
    return min((limit for limit in (own, pool) if limit is not None), default=None)


def read_place(directory: str) -> FileSystem:
    """Return what stands under the directory, if a region can stand there.

    On a disk a region would be written back for ever, at the disk's speed: refused, never used silently.

    Raises:
        UnsuitableDirectoryError: It cannot.
        UnsupportedPlatformError: Nowhere on this platform.
    """
    if not _libc.SUPPORTED:
        raise UnsupportedPlatformError(reason=f"{os.uname().sysname if hasattr(os, 'uname') else os.name}, or 32 bits")
    try:
        file_system = _host.read_file_system(directory)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnsuitableDirectoryError(directory=directory, reason=reason[0].lower() + reason[1:]) from error
    if not os.path.isdir(directory):
        raise UnsuitableDirectoryError(directory=directory, reason="it is not a directory")
    if file_system.kind == "other":
        raise UnsuitableDirectoryError(directory=directory, reason="it is not in memory (neither tmpfs nor hugetlbfs)")
    return file_system


def takes_memory(page: int) -> bool:
    """Whether what is stored in pages of that size is charged to memory groups and taken from what the host has free.

    hugetlb pages were taken out of the host's memory when the pool was made, and memory groups do not count them.
    """
    return page == _libc.PAGE


def check(request: Request, allocated: int, file_system: FileSystem) -> None:
    """Raise where `allocated` bytes cannot fit; log what was found.

    Args:
        request: What was asked for: names, hint and policy.
        allocated: The size in whole pages.
        file_system: What stands under the directory, read a moment ago.

    Raises:
        InsufficientSpaceError: The file system has no room.
        InsufficientMemoryError: A memory level has no room even after reclaim, and the policy is "guard".
    """
    check_space(request, allocated, file_system)
    if request.memory_policy == "ignore":
        return
    if takes_memory(file_system.page):
        finding = judge_memory(memory_required(allocated), read_memory_figures())
    else:
        finding = judge_hugetlb(allocated, file_system)
    if finding is not None:
        _act_on(finding, request, file_system.page)


def find_shortage(
    need: Need, required: int, *, reserves: bool = False
) -> InsufficientSpaceError | InsufficientMemoryError | None:
    """Look whether a page could not be had for want of space: return the error that says so, or None.

    Args:
        need: What it was for.
        required: Bytes still needed.
        reserves: Whether a mapping is still to reserve them, in a hugetlbfs. Once it has, its own are not free there.
    """
    try:
        file_system = _host.read_file_system(need.directory)
        finding = judge_hugetlb(required, file_system, reserves=reserves)
        if finding is not None and finding.verdict == "short":
            raise memory_error(need, finding, huge_page=file_system.page)
        check_space(need, required, file_system)
    except (InsufficientSpaceError, InsufficientMemoryError) as error:
        return error
    return None


def check_space(need: Need, required: int, file_system: FileSystem) -> None:
    """Raise InsufficientSpaceError where `required` bytes do not fit into the file system."""
    available = free_bytes(file_system)
    if available is not None and required > available:
        raise InsufficientSpaceError(
            allocation_name=need.allocation_name,
            directory=need.directory,
            required=required,
            available=available,
            hint=need.hint,
            reclaimable_leftovers=leftover_bytes(need.directory),
            huge_page=file_system.page if file_system.kind == "hugetlbfs" else None,
        )


def hugetlb_figures(file_system: FileSystem, *, reserves: bool = True) -> list[MemoryFigures]:
    """Read what control groups allow of a hugetlbfs's pages: a touch beyond is SIGBUS, whatever the pool has."""
    return _cgroup.read_hugetlb_figures(file_system.page, reserves=reserves) if file_system.kind == "hugetlbfs" else []


def judge_hugetlb(required: int, file_system: FileSystem, *, reserves: bool = True) -> Finding | None:
    """Judge by the tightest limit on a hugetlbfs's pages; None where there is none."""
    return judge_memory(required, hugetlb_figures(file_system, reserves=reserves))


def check_nodes(request: Request, parts: dict[int, int]) -> None:
    """Look whether NUMA nodes have room for their parts, in bytes; log what was found.

    Raises:
        InsufficientMemoryError: One has none, and the policy is "guard".
    """
    for figures in node_figures(parts) if request.memory_policy != "ignore" else ():
        finding = judge_memory(memory_required(parts[int(figures.level.split()[1])]), [figures])
        if finding is not None:
            _act_on(finding, request)


def check_node_pools(need: Need, parts: dict[int, int], page: int) -> None:
    """Raise InsufficientMemoryError where a NUMA node has too few free huge pages in its pool for its part."""
    whole = _host.read_pool(page)
    for node, part in parts.items():
        pool = _host.read_node_pool(node, page)
        if pool is None or whole is None:
            continue
        total, free = (count * page for count in pool)
        figures = MemoryFigures(f"node {node}", total, total - free, max(0, whole.overcommit - whole.surplus) * page)
        if part > figures.available:
            raise memory_error(need, Finding("short", part, figures))


def memory_error(need: Need, finding: Finding, *, huge_page: int | None = None) -> InsufficientMemoryError:
    """Return the error that says what `finding` found."""
    figures = finding.figures
    return InsufficientMemoryError(
        allocation_name=need.allocation_name,
        level=figures.level,
        required=finding.required,
        limit=figures.limit,
        usage=figures.usage,
        reclaimable=figures.reclaimable,
        hint=need.hint,
        huge_page=huge_page,
    )


def describe_shortage(need: Need, finding: Finding) -> str:
    """Return the sentence of the warning where it fits only after reclaim, or not even then."""
    figures = finding.figures
    fits = "which fits only after reclaim" if finding.verdict == "reclaim" else "which does NOT fit"
    return (
        f"{need.allocation_name}: {mib_up(finding.required)} MiB required, {fits} in memory level {figures.level}: "
        f"usage {mib(figures.usage)} MiB, available {mib_down(figures.available)} MiB, limit {mib(figures.limit)} MiB, "
        f"remaining {mib_down(figures.headroom)} MiB"
    )


def _act_on(finding: Finding, request: Request, page: int = _libc.PAGE) -> None:
    if finding.verdict == "short" and request.memory_policy == "guard":
        raise memory_error(request, finding, huge_page=None if takes_memory(page) else page)
    figures = finding.figures
    if finding.verdict == "fits":
        log.debug(
            "%s: %s MiB fit: %s MiB free in %s",
            request.allocation_name,
            mib_up(finding.required),
            mib_down(figures.headroom),
            figures.level,
        )
        return
    log.warning("%s", describe_shortage(request, finding))
