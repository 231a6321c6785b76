"""Makes the memory of a range really there: chunk by chunk, in several threads, each asked for at the guard."""

from __future__ import annotations

import functools
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext

from . import _cgroup, _libc, _pace
from ._errors import InsufficientMemoryError
from ._guard import Guard
from ._host import usable_cpus
from ._libc import HUGE_PAGE
from ._mapping import Mapping, round_up
from ._pages import Pages
from ._progress import Ticker
from ._request import Request
from ._threads import StopFlag, run_all_through

_FREED_STEP = 8 * HUGE_PAGE

# What is mapped at the most before it is unmapped: each time the other processors are interrupted (a TLB flush).
_UNMAPPED_STEP = 16 * HUGE_PAGE
# How far before it other threads may still have been at work the last time.
_OVERLAP = 32 * HUGE_PAGE

# Bytes per second that only huge pages can be mapped at; small ones come at a third of it.
_CHEAP_RATE = 32 << 30


class Populate:
    """The populating of one range: state that its threads share. Run `work` in as many threads as wanted.

    Attributes:
        total: Bytes to populate, in whole pages.
        done: Bytes populated so far.
        huge: Of `done`, bytes known to be backed by huge pages.
        knows_huge: Whether `huge` tells all; not where pages are taken as they come, by a joiner or without collapse.
    """

    def __init__(
        self,
        request: Request,
        mapping: Mapping,
        fd: int,
        *,
        span: range,
        collapse: bool,
        guard: Guard | None,
        present: bool = False,
        relieve: bool = False,
    ) -> None:
        """Prepare; nothing is touched.

        Args:
            request: For names in errors, and whether huge pages are required.
            mapping: Where to populate.
            fd: The file under it.
            span: Bytes of the mapping; whole pages around it are populated, huge ones where they are to be made.
            collapse: Whether to make huge pages; otherwise what is there is mapped, and small pages fill the gaps.
            guard: Asked before each chunk, or None. Closed by `run_populate`.
            present: Whether another process populated it, so that it needs mapping only.
            relieve: Whether to free the span where the guard says no, at once and in the thread that was told so; only
                for who makes the region, and has shown it to nobody. Whoever else takes memory does not wait until
                threads have ended and others have begun.
        """
        self._pages = Pages(
            request,
            mapping,
            fd,
            span=span,
            collapse=collapse,
            confirm=guard.confirm if guard is not None else _accept,
            missing=lambda: self.total - self.done,
        )
        self.total = self._pages.total
        self.done = 0
        self.huge = 0
        self.knows_huge = collapse or self._pages.is_hugetlb
        self._page = max(mapping.page, HUGE_PAGE)
        self._next = 0
        self._guard = guard
        self._relieve = relieve
        self._largest = _pace.LARGEST_MAPPED_CHUNK if present else _pace.LARGEST_CHUNK
        self._unmapped = range(0)
        self._abandoned = False
        self._stop: StopFlag | None = None
        self._inside = 0
        self._lock = threading.Condition()

    @property
    def small_page_reason(self) -> str | None:
        """Why not all of it is huge, as far as the kernel says."""
        return self._pages.small_page_reason

    def work(self, stop: StopFlag, duty: float = 1.0) -> None:
        """Populate chunk after chunk until none is left or `stop` is set; run by every thread.

        Args:
            stop: Looked at before each chunk.
            duty: Which share of its time the thread may be busy.

        Raises:
            InsufficientSpaceError: The file system is full.
            InsufficientMemoryError: The guard saw no room for the next chunk, or a control group may not have so many
                hugetlb pages.
            HugePagesUnavailableError: Huge pages are required, and the kernel gave none.
            OSError: Whatever else the kernel says, such as ENOMEM or EHWPOISON.
        """
        self._stop = stop
        stop.on_set(self._cut_short)
        _libc.try_slice(_pace.SLICE_SECONDS)
        try:
            self._populate_chunks(stop, duty)
        except InsufficientMemoryError:
            join = stop.set_aside()
            if self._relieve:
                self._free()
            join()
            raise

    def _populate_chunks(self, stop: StopFlag, duty: float) -> None:
        size = _pace.FIRST_CHUNK
        rests = _pace.Rests(duty, time.perf_counter(), time.thread_time()) if duty < 1 else None
        while not stop and self._come_in():
            try:
                # Taken first and admitted then: who is told no has something to populate that nobody else does.
                chunk = self._take(size)
                if not chunk:
                    break
                started, before = time.perf_counter(), time.thread_time()
                self._populate_as_admitted(chunk, stop)
                busy, elapsed = time.thread_time() - before, time.perf_counter() - started
                size = _pace.next_chunk(len(chunk), busy, elapsed, self._largest)
            finally:
                self._go_out()
            if rests is not None:
                rest = rests.due(time.perf_counter(), time.thread_time())
                if rest:  # counted out: nobody who unmaps waits for it
                    stop.wait(rest)
        self._make_up(stop)
        self._map_again(stop)

    def _make_up(self, stop: StopFlag) -> None:
        """Make huge what a trial left in small pages."""
        while not stop and self._come_in():
            try:
                huge = self._pages.make_up()
                if huge is None:
                    return
                with self._lock:
                    self.huge += huge
            finally:
                self._go_out()

    def _populate_as_admitted(self, chunk: range, stop: StopFlag) -> None:
        """Populate a chunk at once, or where memory is getting short, piece by piece."""
        while chunk and not stop:
            with self._admitted(len(chunk)) as granted:
                huge = self._populate(chunk[:granted])
                self._unmap(chunk[:granted])
            if stop:  # it may have been cut short
                return
            with self._lock:
                self.done += len(chunk[:granted])
                self.huge += huge
            chunk = chunk[granted:]

    def _unmap(self, piece: range) -> None:
        """Where memory is getting short unmap what was populated, until all of it is; its pages stay in the file.

        Should others reach the limit before the guard sees them, the OOM killer takes the process that has most memory
        mapped (mm/oom_kill.c, oom_badness), whoever asked for the last page: so hardly any of this is mapped for as
        long as it can be given back. Huge pages cost 3 % more that way, small ones half as much again.
        """
        if self._guard is None or not self._guard.crowded or self._pages.is_hugetlb:
            return
        with self._lock:
            if piece.stop - self._unmapped.stop < _UNMAPPED_STEP:
                return
            span = range(max(0, self._unmapped.stop - _OVERLAP), piece.stop)
            self._unmapped = range(piece.stop)
        for start in span[:: _pace.LARGEST_MAPPED_CHUNK]:
            self._pages.unmap(range(start, min(start + _pace.LARGEST_MAPPED_CHUNK, span.stop)))

    def _map_again(self, stop: StopFlag) -> None:
        """Map what was unmapped, once all is populated, for as long as the guard sees no danger."""
        while not stop and self.done == self.total and self._come_in():
            try:
                with self._lock:
                    piece = self._unmapped[: _pace.LARGEST_CHUNK]  # it may be small pages
                    self._unmapped = self._unmapped[len(piece) :]
                if not piece:
                    return
                with self._admitted(0):
                    self._pages.map(piece)
            finally:
                self._go_out()

    def _free(self) -> None:
        """Free the span step by step from where populating has come to: somebody waits for the first of it."""
        step = max(_FREED_STEP, self._page)
        for start in reversed(range(0, self._next, step)):
            self._pages.free(range(start, min(start + step, self._next)))

    def close(self) -> None:
        """Let go of what the guard watches. No thread may be at work any more."""
        with self._lock:
            if not self._abandoned:
                self._pages.close()
            self._abandoned = True
            self._stop = None  # it knows this, too
        if self._guard is not None:
            self._guard.close()

    def abandon(self) -> None:
        """Stop it from another thread, and return when none is in the memory or at the file: within one chunk."""
        with self._lock:
            if self._stop is not None:  # for who rests
                self._stop.set()
            abandoned, self._abandoned = self._abandoned, True
            self._lock.wait_for(lambda: not self._inside)
            if not abandoned:
                self._pages.close()

    def _cut_short(self) -> None:
        with self._lock:
            if not self._abandoned:  # else the memory may be somebody else's by now
                self._pages.cut_short()

    def _come_in(self) -> bool:
        """Count this thread in, for one chunk; False where it was abandoned. `_go_out` counts it out."""
        with self._lock:
            if not self._abandoned:
                self._inside += 1
            return not self._abandoned

    def _go_out(self) -> None:
        with self._lock:
            self._inside -= 1
            self._lock.notify_all()

    def _take(self, size: int) -> range:
        """Return the next chunk, as offsets into the span; an empty one at the end."""
        size = round_up(size, self._page)
        with self._lock:
            start = self._next
            self._next = min(self.total, start + size)
            return range(start, self._next)

    def _admitted(self, length: int) -> AbstractContextManager[int]:
        return nullcontext(length) if self._guard is None else self._guard.admitted(length, _pace.SMALLEST_CHUNK)

    def _populate(self, chunk: range) -> int:
        """Populate one chunk and return how many bytes of it are known to be huge."""
        return self._pages.make(chunk)


def _accept() -> None:
    """Nobody guards: a refused huge page is not asked about."""


async def run_populate(work: Populate, request: Request) -> int:
    """Run `work` in as many threads as the request and the machine allow, and return how many those were.

    Raises:
        BaseException: What `work` raised first. Pages populated until then stay.

    Cancellation:
        Felt within one chunk.
    """
    quota, ranks = _cgroup.own_cpu_quota(), request.local_world_size or 1
    threads = _pace.thread_count(request, work.total, quota) if work.total else 0
    try:
        if threads:
            with Ticker(request.on_progress, lambda: work.done, work.total, what=request.allocation_name):
                # One process has the processors of its mask; where ranks are bound to different ones, all may be busy.
                cpus = usable_cpus(None) if ranks == 1 else os.cpu_count() or 1
                duty = _pace.duty(quota, cpus=cpus, ranks=ranks, threads=threads)
                await run_all_through([functools.partial(work.work, duty=duty)] * threads, name="populate")
    finally:
        work.close()
    return threads


def map_while_cheap(mapping: Mapping, stop: StopFlag) -> None:
    """Map what the other ranks populated, for as long as that goes fast: with huge pages it takes 0.5 ms per GiB.

    With small pages it would take a hundred times as long, for memory that this rank may never look at.
    """
    start, size = 0, HUGE_PAGE  # the first piece is the sample
    while start < mapping.length and not stop:
        size = min(size, mapping.length - start)
        began = time.perf_counter()
        code = _libc.try_madvise(mapping.address + start, size, _libc.MADV_POPULATE_WRITE)
        if code or time.perf_counter() - began > size / _CHEAP_RATE:
            return
        start, size = start + size, _pace.LARGEST_MAPPED_CHUNK
