"""`open_region`: where everything meets. The order of its steps is the protocol; every way out gives all of it back."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from . import _libc, _preflight
from ._errors import UnsuitableDirectoryError, UnsupportedPlatformError
from ._guard import Guard
from ._host import FileSystem, read_file_system
from ._mapping import Mapping, round_up
from ._populate import Populate, run_populate
from ._region import Region
from ._rendezvous import Seat, enter
from ._report import OpenReport
from ._request import HugePages, MemoryPolicy, Request, check_request
from ._tenancy import Tenancy
from ._threads import run_through
from ._units import mib

if TYPE_CHECKING:
    from ._progress import Progress

_log = logging.getLogger("aioshm")
_log.addHandler(logging.NullHandler())  # a program that sets up no logging reads nothing on stderr


def open_region(
    name: str,
    size: int,
    *,
    directory: str | os.PathLike[str] = "/dev/shm",  # noqa: S108 - shared memory is what this is about
    allocation_name: str = "shared-memory region",
    hint: str | None = None,
    timeout: float | None = 30.0,
    populate: bool = True,
    huge_pages: HugePages = "try",
    threads: int | None = None,
    memory_policy: MemoryPolicy = "guard",
    on_progress: Callable[[Progress], None] | None = None,
) -> AbstractAsyncContextManager[Region]:
    """Open the region of shared host memory called `name`: make it, or join it where it lives.

    The first process to come makes it, and every other one of this user that asks for the same name joins it; the last
    to leave removes it. Entering returns only when the memory is really there, in this process too, or raises.
    The event loop runs on all the while.

    Args:
        name: 1 to 200 of the characters `A-Z a-z 0-9 . _ -`, without `..`. The file is
            `{directory}/aioshm-{euid}-{name}`.
        size: Bytes; every process must pass the same.
        directory: A tmpfs or hugetlbfs mount that all processes see.
        allocation_name: What the memory is for; stands in every error and log line.
        hint: Appended to errors of capacity: what your users can do, in your own options' names.
        timeout: Seconds to wait while nobody is at work on the region (None: for ever). It never bounds the work of
            a living process: a joiner waits for as long as the creator lives and populates.
        populate: Whether to make all of it resident and mapped. With False pages come at first touch, and where
            there is no room then, SIGBUS or the OOM killer answers instead of an error.
        huge_pages: `"try"` takes what the kernel gives, `"require"` raises where it gives small pages, `"off"`
            does not ask. A hugetlbfs directory has its own page size in any case.
        threads: Threads that populate in this process; None: what the affinity mask and the CPU quota allow.
        memory_policy: What to do where the memory cgroups or the host have no room: `"guard"` raises before
            the OOM killer comes, and looks again before each chunk; `"warn"` only logs; `"ignore"` does not look.
        on_progress: Called on the loop a few times a second while populating.

    Returns:
        An async context manager, for one use. Entering it yields the Region, leaving it closes the Region.

    Raises:
        TypeError: At the call: an argument has the wrong type.
        ValueError: At the call: an argument has a value that makes no sense. Nothing was touched.
        InsufficientSpaceError: On entering, like all below: the file system has no room.
        InsufficientMemoryError: A memory cgroup or the host has no room.
        JoinTimeoutError: The region was neither finished nor given up in time, and nobody was at work on it.
        RegionMismatchError: It lives, with another size. It is left as it is.
        RegionAccessError: Something at the path is not a region of this user. It is left as it is.
        RegionRemovedError: The name was deleted from outside meanwhile.
        HugePagesUnavailableError: Huge pages were required, and the kernel gave none.
        UnsuitableDirectoryError: The directory is missing, not writable, or not in memory.
        UnsupportedPlatformError: Not 64-bit Linux.
        RuntimeError: The context manager was entered a second time.
        OSError: Whatever else the kernel says. After any of them nothing of this call is left.

    Cancellation:
        Felt within 20 ms at any point of entering, however large the region; then what was taken is given back, and
        only then it goes on. Leaving the block is always completed first.

    Example:
        ```python
        async with aioshm.open_region("kv", 64 << 30, allocation_name="CPU KV cache") as region:
            kv = region.tensor((num_blocks, block_bytes))
        ```
    """
    return _Opening(
        check_request(
            name=name,
            size=size,
            directory=directory,
            allocation_name=allocation_name,
            hint=hint,
            timeout=timeout,
            populate=populate,
            huge_pages=huge_pages,
            threads=threads,
            memory_policy=memory_policy,
            on_progress=on_progress,
        )
    )


class _Opening(AbstractAsyncContextManager[Region]):
    """One use of `open_region`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._entered = False
        self._region: Region | None = None

    async def __aenter__(self) -> Region:
        if self._entered:
            raise RuntimeError("this open_region(...) was entered before; call open_region again for another open")
        self._entered = True
        self._region = await _open(self._request)
        return self._region

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        region, self._region = self._region, None
        if region is not None:
            await region.aclose()


async def _open(request: Request) -> Region:
    started = time.monotonic()
    file_system = _check_directory(request.directory)
    # tmpfs keeps the exact size; hugetlbfs refuses to be sized to anything but whole pages.
    file_size = round_up(request.size, file_system.page if file_system.kind == "hugetlbfs" else 1)
    seat = await enter(request, file_size)
    tenancy = Tenancy(seat)
    try:
        entered = time.monotonic()
        if seat.forming:
            await run_through(lambda _: _make_room(request, seat, file_size), name="preflight")
        sized = time.monotonic()
        tenancy.mapping = mapping = Mapping(seat.description.fd, size=request.size, page=file_system.page)
        region = Region(request, tenancy, mapping)
        work = Populate(
            request,
            mapping,
            seat.description.fd,
            span=range(mapping.length if request.populate else 0),
            collapse=seat.forming and request.huge_pages != "off",
            guard=Guard(request) if seat.forming and request.memory_policy == "guard" else None,
        )
        threads = await run_populate(work, request)
        if seat.forming:
            seat.finish()
    except BaseException:
        await tenancy.give_back()
        raise
    done = time.monotonic()
    region.report = OpenReport(
        role=seat.role,
        recycled=seat.recycled,
        size=request.size,
        allocated=mapping.length,
        populated=work.done,
        huge=work.huge if work.knows_huge else None,
        threads=threads,
        wait_seconds=entered - started,
        preflight_seconds=sized - entered,
        populate_seconds=done - sized,
        total_seconds=done - started,
        small_page_reason=work.small_page_reason,
    )
    _tell(region.report, request)
    return region


def _check_directory(directory: str) -> FileSystem:
    """Return what stands under the directory, if a region can stand there.

    On a disk a region would be written back for ever, at the disk's speed: refused, never used silently.
    """
    if not _libc.SUPPORTED:
        raise UnsupportedPlatformError(reason=f"{os.uname().sysname if hasattr(os, 'uname') else os.name}, or 32 bits")
    try:
        file_system = read_file_system(directory)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnsuitableDirectoryError(directory=directory, reason=reason[0].lower() + reason[1:]) from error
    if not os.path.isdir(directory):
        raise UnsuitableDirectoryError(directory=directory, reason="it is not a directory")
    if file_system.kind == "other":
        raise UnsuitableDirectoryError(directory=directory, reason="it is not in memory (neither tmpfs nor hugetlbfs)")
    return file_system


def _make_room(request: Request, seat: Seat, file_size: int) -> None:
    """Look whether it fits, and size the file. Runs in a worker thread, under the exclusive gate."""
    file_system = read_file_system(request.directory)  # again: a leftover may have been removed since
    _preflight.check(request, round_up(request.size, file_system.page), file_system)
    os.ftruncate(seat.description.fd, file_size)


def _tell(report: OpenReport, request: Request) -> None:
    _log.info(
        "%s: %s %s, %s MiB, in %.3f s%s",
        request.allocation_name,
        "created" if report.role == "creator" else "joined",
        request.path,
        mib(request.size),
        report.total_seconds,
        " (took over a leftover)" if report.recycled else "",
    )
    if report.populated:
        share = report.huge_share
        _log.info(
            "%s: populated %s MiB at %.2f GiB/s in %d threads%s%s",
            request.allocation_name,
            mib(report.populated),
            report.rate / (1 << 30),
            report.threads,
            "" if share is None else f", {share:.0%} in huge pages",
            "" if report.small_page_reason is None else f" ({report.small_page_reason})",
        )
