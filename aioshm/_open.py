"""`open_region`: where everything meets. The order of its steps is the protocol; every way out gives all of it back."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from . import _libc, _numa, _preflight
from ._guard import guard_for
from ._log import log
from ._mapping import Mapping, round_up
from ._populate import Populate, map_while_cheap, run_populate
from ._region import Region
from ._rendezvous import Seat, enter
from ._report import OpenReport
from ._request import HugePages, MemoryPolicy, Placement, Request, check_request
from ._room import make_room, map_region
from ._roster import BrokenUpError, Roster
from ._tenancy import Tenancy
from ._threads import run_through
from ._units import mib

if TYPE_CHECKING:
    from ._progress import Progress

T = TypeVar("T")


def open_region(
    name: str,
    size: int,
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    directory: str | os.PathLike[str] = "/dev/shm",
    allocation_name: str = "shared-memory region",
    hint: str | None = None,
    timeout: float | None = 30.0,
    populate: bool = True,
    huge_pages: HugePages = "try",
    numa: Placement | Sequence[int] | None = None,
    threads: int | None = None,
    memory_policy: MemoryPolicy = "guard",
    initialize: Callable[[Region], Awaitable[None]] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> AbstractAsyncContextManager[Region]:
    """Open the region of shared host memory called `name`: make it, or join it where it lives.

    The first process to come makes it, and every other one of this user that asks for the same name joins it; the last
    to leave removes it. With `local_rank` and `local_world_size` the processes are the ranks of a cohort: they
    populate together, and when all of them are ready the name is removed, so that nothing can be left behind
    whatever happens to them later. Entering returns only when the memory is really there, or raises. The event loop
    runs on all the while.

    Args:
        name: 1 to 200 of the characters `A-Z a-z 0-9 . _ -`, without `..`. The file is
            `{directory}/aioshm-{euid}-{name}`.
        size: Bytes; every process must pass the same.
        local_rank: This process's rank among those of this host, from 0; with `local_world_size`, or neither.
        local_world_size: How many ranks there are on this host (not on all hosts together), at most 1024.
        directory: A tmpfs or hugetlbfs mount that all processes see.
        allocation_name: What the memory is for; stands in every error and log line.
        hint: Appended to errors of capacity: what your users can do, in your own options' names.
        timeout: Seconds for all ranks to show up, or without a cohort, to wait while nobody is at work on the region
            (None: for ever). It never bounds the work of a living process: one that populates is waited for as long
            as it lives.
        populate: Whether to make it resident and mapped: all of it, in a cohort at least this rank's share, a
            contiguous part. With False pages come at first touch, and where there is no room then, SIGBUS or the OOM
            killer answers instead of an error.
        huge_pages: `"try"` takes what the kernel gives, `"require"` raises where the creator, or any rank of a cohort,
            gets small pages (but for an end of less than 2 MiB), `"off"` does not ask. A hugetlbfs directory has its
            own page size in any case.
        numa: Where it lies on a host of several memory nodes. `"first-touch"`: on the node of the processor that
            populates it, so in a cohort each rank's share on that rank's own; None: likewise, unless the process has a
            policy of its own (`numactl`); `"interleave"`: dealt out over all nodes in turn; node numbers, such as
            `[0, 1]`: bound to these, in turn where there are several. Without a cohort the creator's word counts, in a
            cohort each rank's for its own share. Where the kernel does not let us say it, as in many containers, there
            is one warning, and it goes on as with None.
        threads: Threads that populate in this process; None: what the affinity mask and the CPU quota allow, divided
            among the ranks of a cohort.
        memory_policy: What to do where the memory cgroups or the host have no room: `"guard"` raises before
            the OOM killer comes, and looks again before each chunk; `"warn"` only logs; `"ignore"` does not look.
        initialize: Awaited with the region by its creator only, when all of it is populated and before anybody else
            gets it. What it raises comes out of the creator's call. The other ranks of a cohort then get PeerLostError;
            without one, the next of those who wait becomes the creator.
        on_progress: Called on the loop a few times a second while populating.

    Returns:
        An async context manager, for one use. Entering it yields the Region, leaving it closes the Region.

    Raises:
        TypeError: At the call: an argument has the wrong type.
        ValueError: At the call: an argument has a value that makes no sense; on entering: there is no such node as
            `numa` says. Nothing was touched.
        InsufficientSpaceError: On entering, like all below: the file system has no room.
        InsufficientMemoryError: A memory cgroup, the host or a node of `numa` has no room; in a hugetlbfs, a cgroup
            that limits its pages.
        JoinTimeoutError: Ranks never came, or without a cohort: the region was neither finished nor given up in time,
            and nobody was at work on it.
        PeerLostError: A rank that had come went away before all were ready.
        RankInUseError: Another living process has this rank. Its region is left as it is.
        RegionMismatchError: It lives, with another size or local world size. It is left as it is.
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
            local_rank=local_rank,
            local_world_size=local_world_size,
            directory=directory,
            allocation_name=allocation_name,
            hint=hint,
            timeout=timeout,
            populate=populate,
            huge_pages=huge_pages,
            numa=numa,
            threads=threads,
            memory_policy=memory_policy,
            initialize=initialize,
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
    clock = _Clock()
    while True:
        try:
            return await _open_once(request, clock)
        except BrokenUpError:  # all is given back; the time-out goes on from where it began
            continue


async def _open_once(request: Request, clock: _Clock) -> Region:
    file_system = _preflight.read_place(request.directory)
    _numa.check_numbers(request)
    # tmpfs keeps the exact size; hugetlbfs refuses to be sized to anything but whole pages.
    file_size = round_up(request.size, file_system.page if file_system.kind == "hugetlbfs" else 1)
    seat = await enter(request, file_size)
    tenancy = Tenancy(seat)
    try:
        roster = _claim(request, tenancy, clock.started)
        clock.lap("wait")
        if seat.forming:
            await run_through(lambda stop: make_room(request, seat, file_size, stop), name="preflight")
            if roster is not None:
                seat.let_in()
        clock.lap("preflight")
        tenancy.mapping = mapping = map_region(request, seat, file_system.page)
        share, makes = _share(request, mapping), seat.role == "creator" or request.is_cohort
        request = await _numa.place(request, mapping, seat.description.fd, span=share, makes=makes)
        region = Region(request, tenancy, mapping)
        work = _plan(request, seat, mapping, share, makes=makes)
        threads = await _watched(roster, lambda: run_populate(work, request))
        clock.lap("populate")
        if request.initialize is not None and seat.role == "creator":
            await _initialize(request.initialize, region, roster)
        clock.lap("initialize")
        if roster is not None:
            await roster.release()
            if request.populate:
                await run_through(lambda stop: map_while_cheap(mapping, stop), name="map")
        elif seat.forming:
            seat.finish()
        nodes = await _numa.find_nodes(mapping, share, work.done)
        clock.lap("release")
    except BaseException:
        await tenancy.give_back()
        raise
    region.report = _make_report(request, seat, mapping, work, nodes=nodes, threads=threads, seconds=clock.laps)
    _tell(region.report, request)
    return region


class _Clock:
    """Seconds per phase, one after the other; a phase that is come through again is added up."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.laps: dict[str, float] = {}
        self._last = self.started

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now


def _claim(request: Request, tenancy: Tenancy, started: float) -> Roster | None:
    if not request.is_cohort:
        return None
    roster = Roster(tenancy.seat.description, request, started)
    roster.claim()
    tenancy.roster = roster  # only now: who got no rank must not break up the others' cohort
    return roster


def _plan(request: Request, seat: Seat, mapping: Mapping, share: range, *, makes: bool) -> Populate:
    """Return the populating that is this process's: all of it, its share in a cohort, or nothing.

    A joiner without a cohort finds the pages there, and they are charged to whoever made them: nothing to guard.
    """
    return Populate(
        request,
        mapping,
        seat.description.fd,
        span=share if request.populate else range(0),
        collapse=makes and request.huge_pages != "off",
        guard=guard_for(request, seat.description.fd, mapping.page) if makes else None,
        present=not makes,
        relieve=makes,
    )


def _share(request: Request, mapping: Mapping) -> range:
    """Return what this rank populates: contiguous, so that its own node touches it first, on huge-page borders."""
    if not request.is_cohort:
        return range(mapping.length)
    rank, world, border = request.local_rank, request.local_world_size, max(_libc.HUGE_PAGE, mapping.page)
    pieces = -(-mapping.length // border)
    start, stop = (pieces * index // world * border for index in (rank, rank + 1))
    return range(start, min(stop, mapping.length))


async def _watched(roster: Roster | None, work: Callable[[], Awaitable[T]]) -> T:
    return await work() if roster is None else await roster.watched(work)


async def _initialize(initialize: Callable[[Region], Awaitable[None]], region: Region, roster: Roster | None) -> None:
    """Run the caller's initialize when all memory is there, and before anybody else is let on."""
    if roster is not None:
        await roster.wait_others_ready()
    await _watched(roster, lambda: initialize(region))


def _make_report(
    request: Request,
    seat: Seat,
    mapping: Mapping,
    work: Populate,
    *,
    nodes: dict[int, int] | None,
    threads: int,
    seconds: dict[str, float],
) -> OpenReport:
    return OpenReport(
        role=seat.role,
        recycled=seat.recycled,
        size=request.size,
        allocated=mapping.length,
        populated=work.done,
        huge=work.huge if work.knows_huge else None,
        nodes=nodes,
        threads=threads,
        wait_seconds=seconds["wait"],
        preflight_seconds=seconds["preflight"],
        populate_seconds=seconds["populate"],
        initialize_seconds=seconds["initialize"],
        release_seconds=seconds["release"],
        total_seconds=sum(seconds.values()),
        small_page_reason=work.small_page_reason or _explain_end(work),
    )


def _explain_end(work: Populate) -> str | None:
    """Return why the last part has small pages, where all before it is huge."""
    return "its end is less than a huge page" if work.knows_huge and work.huge < work.done else None


def _tell(report: OpenReport, request: Request) -> None:
    log.info(
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
        log.info(
            "%s: %s %s MiB at %.2f GiB/s in %d thread%s%s%s%s",
            request.allocation_name,
            "populated" if report.role == "creator" or request.is_cohort else "mapped",
            mib(report.populated),
            report.rate / (1 << 30),
            report.threads,
            "" if report.threads == 1 else "s",
            "" if share is None else f", {share:.0%} in huge pages",
            "" if report.small_page_reason is None else f" ({report.small_page_reason})",
            f", {_numa.in_words(report.nodes)}" if report.nodes and (request.numa or len(report.nodes) > 1) else "",
        )


open_region.__module__ = "aioshm"
