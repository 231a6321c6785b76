"""`preflight`: what an `open_region` of this size would find right now, told without allocating anything.

It reads the same facts by the same functions and judges them by the same rules (`_preflight`); only that what would be
raised is collected, so that all that stands in the way is seen at once, and not one thing after the other.
"""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from . import _cgroup, _host, _libc, _preflight
from ._cgroup import MemoryFigures, MemoryLevel
from ._errors import AioshmError
from ._host import FileSystem, Mount
from ._mapping import round_up
from ._rendezvous import translate
from ._request import Need, check_need
from ._threads import run_through

Verdict = Literal["fits", "reclaim", "short"]


@dataclass(frozen=True, kw_only=True)
class DirectoryReport:
    """The directory and the file system under it. Sizes are bytes.

    Attributes:
        path: The directory.
        kind: `"tmpfs"`, `"hugetlbfs"`, or `"other"`, which is not in memory; None where it cannot be looked at.
        mount_point: Where the file system is mounted; None where that cannot be told.
        page: Bytes per page.
        total: What the file system may hold; None where it has no limit of its own.
        free: What it can still take, in a hugetlbfs also what the pool can still give; None where nothing limits it.
    """

    path: str
    kind: Literal["tmpfs", "hugetlbfs", "other"] | None
    mount_point: str | None
    page: int
    total: int | None
    free: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryLevelReport:
    """One limit of memory: a control group, or the host. Sizes are bytes.

    Attributes:
        level: The group's directory, or `"host"`.
        limit: What it allows altogether; None where it has no limit.
        usage: What is in use.
        reclaimable: Of the usage, what the kernel can move out: file cache, slab, and what swap takes. 0 where there
            is no limit to make room below.
        verdict: `"fits"`, `"reclaim"` (fits once the kernel has moved that out) or `"short"`.
    """

    level: str
    limit: int | None
    usage: int
    reclaimable: int
    verdict: Verdict

    @property
    def available(self) -> int | None:
        """Bytes that can be had, reclaim included; None where it has no limit."""
        return None if self.limit is None else max(0, self.limit - self.usage + self.reclaimable)


@dataclass(frozen=True, kw_only=True)
class HugePagesReport:
    """What decides over huge pages, as far as it can be read; whether the kernel gives them only a populate can tell.

    Attributes:
        page: Bytes per huge page: those of the hugetlbfs, or 2 MiB.
        mount_option: The mount's `huge=`, such as `"never"` (aioshm makes huge pages all the same, with
            MADV_COLLAPSE); None where it is no tmpfs, or the mount cannot be told.
        shmem_enabled: The setting in /sys/kernel/mm/transparent_hugepage; `"deny"` and `"force"` overrule the mount's.
        pool_free: Bytes of the hugetlbfs's pool that are not in use; None, as the two below, where it is no hugetlbfs.
        pool_reserved: Of these, bytes promised to mappings.
        pool_surplus: Bytes of pages that were made on demand beside the pool.
    """

    page: int
    mount_option: str | None
    shmem_enabled: str | None
    pool_free: int | None
    pool_reserved: int | None
    pool_surplus: int | None


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What an `open_region` would find. Sizes are bytes.

    Attributes:
        size: Bytes asked about.
        allocated: Bytes the file would take: `size` in whole pages.
        memory_required: Bytes needed of every memory level: the file, its page tables, and a reserve for the process;
            0 in a hugetlbfs, whose pages were set aside when the pool was made.
        largest: The largest size that would fit, in whole pages; None where nothing limits it.
        directory: The directory.
        memory: The memory levels: the process's own control group, those above it, and the host.
        huge_pages: What decides over huge pages.
        warning: What `open_region` would log because it fits only after reclaim, or None.
        problems: All that stands in the way, in the order in which `open_region` would raise it.
    """

    size: int
    allocated: int
    memory_required: int
    largest: int | None
    directory: DirectoryReport
    memory: tuple[MemoryLevelReport, ...]
    huge_pages: HugePagesReport
    warning: str | None
    problems: tuple[AioshmError, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.problems

    def error(self) -> AioshmError | None:
        """Return what `open_region` would raise, to be raised, new each time; None where it fits."""
        return copy.copy(self.problems[0]) if self.problems else None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON knows it; a problem becomes its class, its message, and its facts."""
        return {
            **asdict(replace(self, problems=())),
            "memory": [{**asdict(level), "available": level.available} for level in self.memory],
            "problems": [
                {"error": type(problem).__name__, "message": str(problem), **vars(problem)} for problem in self.problems
            ],
            "fits": self.fits,
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


async def preflight(
    size: int,
    *,
    directory: str | os.PathLike[str] = "/dev/shm",
    allocation_name: str = "shared-memory region",
    hint: str | None = None,
) -> PreflightReport:
    """Say what an `open_region` of this size would find, without allocating anything.

    It speaks for this process and this moment: others may take the memory before it is populated, which
    `open_region` watches. What a leftover of the same name takes counts as used, though the open would remove it first.

    Args:
        size: Bytes of the region.
        directory: Where it would be.
        allocation_name: What the memory is for; stands in every error.
        hint: Appended to errors of capacity, as in `open_region`.

    Returns:
        The report: whether it fits, and what limits it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that makes no sense.
        OSError: Whatever else the kernel says, such as EMFILE. What `open_region` would raise stands in the report.

    Cancellation:
        Felt when the look is done, within milliseconds.

    Example:
        ```python
        report = await aioshm.preflight(64 << 30, allocation_name="CPU KV cache")
        if not report.fits:
            size = report.largest
        ```
    """
    need = check_need(size=size, directory=directory, allocation_name=allocation_name, hint=hint)
    return await run_through(lambda _: _look(need), name="preflight")


def _look(need: Need) -> PreflightReport:
    file_system = _read_file_system(need.directory)
    problems = _find_obstacles(need)
    usable = not problems
    page = file_system.page if file_system is not None else _libc.PAGE
    allocated = round_up(need.size, page)
    free, hugetlb = None, []
    if file_system is not None:
        free, hugetlb = _preflight.free_bytes(file_system), _preflight.hugetlb_figures(file_system)
        if usable:
            problems += _collect(lambda: _preflight.check_space(need, allocated, file_system))
    takes_memory = file_system is None or _preflight.takes_memory(file_system.page)
    required = _preflight.memory_required(allocated) if takes_memory else 0
    levels = _cgroup.own_memory_levels()
    figures = _preflight.read_memory_figures(levels)
    finding = _preflight.judge_memory(required, figures)
    mount = _host.read_mount(need.directory)
    if finding is not None and finding.verdict == "short":
        problems.append(_preflight.memory_error(need, finding))
    finding_of_pages = _preflight.judge_memory(allocated, hugetlb)
    if usable and finding_of_pages is not None and finding_of_pages.verdict == "short":
        problems.append(_preflight.memory_error(need, finding_of_pages, huge_page=page))
    limits = [_preflight.largest_size(one.available, page) for one in figures] if takes_memory else []
    limits += [limit // page * page for limit in (free, *(one.available for one in hugetlb)) if limit is not None]
    return PreflightReport(
        size=need.size,
        allocated=allocated,
        memory_required=required,
        largest=min(limits, default=None) if usable else 0,
        directory=_report_directory(need.directory, file_system, free, mount),
        memory=_report_memory(required, levels, figures),
        huge_pages=_report_huge_pages(file_system, mount),
        warning=_preflight.describe_shortage(need, finding) if finding and finding.verdict == "reclaim" else None,
        problems=tuple(problems),
    )


def _collect(check: Callable[[], object]) -> list[AioshmError]:
    """Return what a check raises."""
    try:
        check()
    except AioshmError as error:
        return [error.with_traceback(None)]
    return []


def _find_obstacles(need: Need) -> list[AioshmError]:
    """Return why no region can stand there, of whatever size."""
    return _collect(lambda: _preflight.read_place(need.directory)) or _collect(lambda: _try_name(need))


def _try_name(need: Need) -> None:
    """Have the kernel say whether a file may be made there, by one without a name or a byte that is gone at once."""
    try:
        fd = os.open(need.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # a file system, or a kernel, that has no such files
            return
        raise translate(error, need) from error
    os.close(fd)


def _read_file_system(directory: str) -> FileSystem | None:
    try:
        return _host.read_file_system(directory) if _libc.SUPPORTED else None
    except OSError:
        return None


def _report_directory(
    directory: str, file_system: FileSystem | None, free: int | None, mount: Mount | None
) -> DirectoryReport:
    return DirectoryReport(
        path=directory,
        kind=file_system.kind if file_system else None,
        mount_point=mount.point if mount else None,
        page=file_system.page if file_system else _libc.PAGE,
        total=(file_system.total or None) if file_system else None,
        free=free,
    )


def _report_memory(
    required: int, levels: tuple[MemoryLevel, ...], figures: list[MemoryFigures]
) -> tuple[MemoryLevelReport, ...]:
    """Return all levels, own group first and the host last; those without a limit in their places among them."""
    limited = {one.level: one for one in figures}
    without = {level.path: level.read_usage() for level in levels if level.path not in limited}
    reports = []
    for level in dict.fromkeys([*(level.path for level in levels), *limited]):
        if level in limited:
            one = limited[level]
            finding = _preflight.judge_memory(required, [one])
            reports.append(
                MemoryLevelReport(
                    level=level,
                    limit=one.limit,
                    usage=one.usage,
                    reclaimable=one.reclaimable,
                    verdict=finding.verdict if finding else "fits",
                )
            )
        elif (usage := without[level]) is not None:
            reports.append(MemoryLevelReport(level=level, limit=None, usage=usage, reclaimable=0, verdict="fits"))
    return tuple(reports)


def _report_huge_pages(file_system: FileSystem | None, mount: Mount | None) -> HugePagesReport:
    kind, page = (file_system.kind, file_system.page) if file_system else (None, _libc.PAGE)
    pool = _host.read_pool(page) if kind == "hugetlbfs" else None
    # The kernel shows the option only where it is another than the default (mm/shmem.c, shmem_show_options).
    option = (mount.find("huge") or "never") if mount and kind == "tmpfs" else None
    return HugePagesReport(
        page=page if kind == "hugetlbfs" else _libc.HUGE_PAGE,
        mount_option=option,
        shmem_enabled=_host.read_shmem_enabled(),
        pool_free=pool.free * page if pool else None,
        pool_reserved=pool.reserved * page if pool else None,
        pool_surplus=pool.surplus * page if pool else None,
    )


for _report in (DirectoryReport, MemoryLevelReport, HugePagesReport, PreflightReport, preflight):
    _report.__module__ = "aioshm"
