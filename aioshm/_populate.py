"""Makes the memory of a range really there: chunk by chunk, in several threads, huge pages where they can be had.

Per chunk one small page of every 2 MiB is touched with MADV_POPULATE_WRITE, which never changes data, and then the
chunk is made huge with MADV_COLLAPSE. That gives huge pages on a plain /dev/shm (mounted `huge=never`) without any
privilege (Linux 6.1, mm/khugepaged.c: madvise_collapse; it needs something to collapse, hence the touch), it is about
three times as fast as small pages, and where a memory group is full it fails with EBUSY where touching would be killed.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext

from . import _cgroup, _libc
from ._errors import HugePagesUnavailableError, InsufficientMemoryError, InsufficientSpaceError
from ._guard import Guard
from ._host import usable_cpus
from ._libc import HUGE_PAGE, PAGE
from ._log import log
from ._mapping import Mapping, round_up
from ._preflight import find_shortage
from ._progress import Ticker
from ._request import Request
from ._threads import StopFlag, run_all_through

# A chunk should take about this long: a cancellation waits for at most one, and so does whoever needs the mmap lock.
_CHUNK_SECONDS = 0.004
_SMALLEST_CHUNK = HUGE_PAGE
_FIRST_CHUNK = 2 * HUGE_PAGE
# Memory can turn slow from one chunk to the next (a virtual machine's host has to find it: 20 ms per 2 MiB, seen), and
# a larger one gains nothing: the kernel's cost per huge page is the same. Mapping what is there is a thousand times
# faster.
_LARGEST_CHUNK = 4 * HUGE_PAGE
_LARGEST_MAPPED_CHUNK = 32 * HUGE_PAGE

# After so many chunks in a row without a huge page there are none to be had, and asking costs a compaction each time.
_PATIENCE = 8

_FREED_STEP = 8 * HUGE_PAGE

# How often a call is repeated that was interrupted, or whose reason was gone when it was looked for.
_TRIES = 100

# Zeroing pages is bound by memory bandwidth, which a socket's first few cores use up.
_MOST_THREADS = 16

# Bytes per second that only huge pages can be mapped at; small ones come at a third of it.
_CHEAP_RATE = 32 << 30


class Populate:
    """The populating of one range: state that its threads share. Run `work` in as many threads as wanted.

    Attributes:
        total: Bytes to populate, in whole pages.
        done: Bytes populated so far.
        huge: Of `done`, bytes known to be backed by huge pages.
        knows_huge: Whether `huge` tells all; not where pages are taken as they come, by a joiner or without collapse.
        small_page_reason: Why not all of it is huge, as far as the kernel says.
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
        is_hugetlb = mapping.page > PAGE
        border = HUGE_PAGE if collapse and not is_hugetlb else mapping.page
        start, end = span.start // border * border, min(round_up(span.stop, border), mapping.length)
        self.total = end - start if span else 0
        self.done = 0
        self.huge = 0
        self.knows_huge = collapse or is_hugetlb
        self.small_page_reason: str | None = None
        self._request = request
        self._address = mapping.address + start
        self._fd = fd
        self._offset = start
        self._page = mapping.page
        self._next = 0
        self._guard = guard
        self._relieve = relieve
        self._largest = _LARGEST_MAPPED_CHUNK if present else _LARGEST_CHUNK
        self._is_hugetlb = is_hugetlb
        self._collapse = collapse and not is_hugetlb
        self._required = self._collapse and request.huge_pages == "require"
        self._in_vain = 0
        self._legacy = False
        self._abandoned = False
        self._inside = 0
        self._lock = threading.Condition()
        if self._collapse and self.total:
            # Where shmem_enabled=advise or the mount says huge=advise, the touch itself then gives the huge page.
            _libc.try_madvise(self._address, self.total, _libc.MADV_HUGEPAGE)

    def work(self, stop: StopFlag) -> None:
        """Populate chunk after chunk until none is left or `stop` is set; run by every thread.

        Raises:
            InsufficientSpaceError: The file system is full.
            InsufficientMemoryError: The guard saw no room for the next chunk.
            HugePagesUnavailableError: Huge pages are required, and the kernel gave none.
            OSError: Whatever else the kernel says, such as ENOMEM or EHWPOISON.
        """
        try:
            self._populate_chunks(stop)
        except InsufficientMemoryError:
            stop.set()
            if self._relieve:
                self._free()
            raise

    def _populate_chunks(self, stop: StopFlag) -> None:
        size = _FIRST_CHUNK
        while not stop and self._come_in():
            try:
                # Taken first and admitted then: who is told no has something to populate that nobody else does.
                chunk = self._take(size)
                if not chunk:
                    return
                started = time.perf_counter()
                self._populate_as_admitted(chunk, stop)
                size = _adapt(len(chunk), time.perf_counter() - started, self._largest)
            finally:
                self._go_out()

    def _populate_as_admitted(self, chunk: range, stop: StopFlag) -> None:
        """Populate a chunk at once, or where memory is getting short, piece by piece."""
        while chunk and not stop:
            with self._admitted(len(chunk)) as granted:
                huge = self._populate(chunk[:granted])
            with self._lock:
                self.done += len(chunk[:granted])
                self.huge += huge
            chunk = chunk[granted:]

    def _free(self) -> None:
        """Free the span step by step from where populating has come to: somebody waits for the first of it."""
        for start in reversed(range(0, self._next, _FREED_STEP)):
            _libc.punch_hole(self._fd, self._offset + start, min(_FREED_STEP, self._next - start))

    def close(self) -> None:
        """Let go of what the guard watches. No thread may be at work any more."""
        if self._guard is not None:
            self._guard.close()

    def abandon(self) -> None:
        """Stop it from another thread, and return when none is in the memory or at the file: within one chunk."""
        with self._lock:
            self._abandoned = True
            self._lock.wait_for(lambda: not self._inside)

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
        size = round_up(size, max(self._page, HUGE_PAGE))
        with self._lock:
            start = self._next
            self._next = min(self.total, start + size)
            return range(start, self._next)

    def _admitted(self, length: int) -> AbstractContextManager[int]:
        return nullcontext(length) if self._guard is None else self._guard.admitted(length, _SMALLEST_CHUNK)

    def _populate(self, chunk: range) -> int:
        """Populate one chunk and return how many bytes of it are known to be huge."""
        if self._is_hugetlb:
            self._touch(chunk.start, len(chunk))
            return len(chunk)
        whole = chunk[: len(chunk) // HUGE_PAGE * HUGE_PAGE]
        huge = self._make_huge(whole) if self._collapse else 0
        if huge < len(chunk):
            self._touch(chunk.start + huge, len(chunk) - huge)
        if self._required and huge < len(whole):  # only now: where space was short, the touch has said so
            raise HugePagesUnavailableError(
                allocation_name=self._request.allocation_name,
                directory=self._request.directory,
                reason=self.small_page_reason or "the kernel did not say why",
            )
        return huge

    def _make_huge(self, whole: range) -> int:
        """Collapse huge page by huge page's worth from the chunk's start; return the bytes that worked out."""
        for start in whole[::HUGE_PAGE]:
            self._touch(start, PAGE)
        if not whole or not self._collapse:  # the touch may have found a kernel too old for either
            return 0
        code = _libc.try_madvise(self._address + whole.start, len(whole), _libc.MADV_COLLAPSE)
        if code == 0:
            self._in_vain = 0
            return len(whole)
        self._explain(code)
        if self._guard is not None:  # a full memory group says EBUSY here, where a touch would be killed
            self._guard.confirm()
        return 0

    def _explain(self, code: int) -> None:
        """Note why a chunk was not collapsed, and give up on huge pages where it will not get better."""
        if code == errno.EINVAL:
            reason = "the kernel refuses MADV_COLLAPSE (older than 6.1, or shmem_enabled=deny)"
        elif code in (errno.ENOMEM, errno.EAGAIN, errno.EBUSY):
            reason = (
                f"no free huge page could be made ({errno.errorcode[code]}: memory is fragmented or nearly used up)"
            )
        else:
            raise OSError(code, f"MADV_COLLAPSE: {os.strerror(code)}")
        with self._lock:
            self._in_vain += 1
            self.small_page_reason = reason
            if code == errno.EINVAL or self._in_vain >= _PATIENCE:
                self._collapse = False

    def _touch(self, start: int, length: int) -> None:
        """Make `length` bytes from `start` resident and mapped; what they hold stays as it is."""
        if not self._legacy:
            code = self._try_populate_write(start, length)
            if code == 0:
                return
            if code != errno.EINVAL:
                raise self._translated(code, "MADV_POPULATE_WRITE")
            self._legacy, self._collapse = True, False
            self.small_page_reason = "the kernel has no MADV_POPULATE_WRITE (older than 5.14)"
            _warn_of_old_kernel(self._request.allocation_name)
        try:
            _libc.fallocate(self._fd, self._offset + start, length)
        except OSError as error:
            raise self._translated(error.errno or 0, "fallocate") from error
        with _libc.reopened(self._fd) as own:
            _libc.mmap(
                self._address + start,
                length,
                _libc.PROT_READ_WRITE,
                _libc.MAP_SHARED | _libc.MAP_FIXED | _libc.MAP_POPULATE,
                own,
                self._offset + start,
            )
        _libc.try_madvise(self._address + start, length, _libc.MADV_DONTDUMP)  # it is a new mapping

    def _try_populate_write(self, start: int, length: int) -> int:
        """Populate and return 0 or an errno; what may pass is tried again, though not for ever."""
        code = 0
        for _ in range(_TRIES):
            code = _libc.try_madvise(self._address + start, length, _libc.MADV_POPULATE_WRITE)
            if code == errno.EFAULT:  # on tmpfs: a page it had no room for. Or others have made room meanwhile
                full = self._find_shortage()
                if full is not None:
                    raise full
            elif code not in (errno.EINTR, errno.EAGAIN):
                break
        return code

    def _translated(self, code: int, call: str) -> Exception:
        """Return what an errno of the kernel means here; the unknown stays as it is."""
        full = self._find_shortage() if code == errno.ENOSPC else None
        return full or OSError(code, f"{call}: {os.strerror(code)}")

    def _find_shortage(self) -> InsufficientSpaceError | None:
        return find_shortage(self._request, max(self._page, self.total - self.done))


async def run_populate(work: Populate, request: Request) -> int:
    """Run `work` in as many threads as the request and the machine allow, and return how many those were.

    Raises:
        BaseException: What `work` raised first. Pages populated until then stay.

    Cancellation:
        Felt within one chunk.
    """
    threads = thread_count(request, work.total) if work.total else 0
    try:
        if threads:
            with Ticker(request.on_progress, lambda: work.done, work.total, what=request.allocation_name):
                await run_all_through([work.work] * threads, name="populate")
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
        start, size = start + size, _LARGEST_MAPPED_CHUNK


def thread_count(request: Request, total: int) -> int:
    """Return how many threads pay: not more than may run at once, ranks together, nor than there is work for."""
    pieces = -(-total // _LARGEST_MAPPED_CHUNK)
    if pieces == 1 or request.threads:
        return min(request.threads or 1, pieces)
    ranks = request.local_world_size or 1
    return min(pieces, _MOST_THREADS, max(1, usable_cpus(_cgroup.own_cpu_quota()) // ranks))


@functools.cache
def _warn_of_old_kernel(allocation_name: str) -> None:
    log.warning("%s: no MADV_POPULATE_WRITE (kernel older than 5.14): populating small pages", allocation_name)


def _adapt(length: int, seconds: float, largest: int) -> int:
    """Return the next chunk's size after one of `length` bytes took `seconds`: whole huge pages, no sudden growth."""
    wanted = int(length * _CHUNK_SECONDS / seconds) if seconds > 0 else length * 2
    wanted = min(max(wanted, _SMALLEST_CHUNK), 2 * max(length, _SMALLEST_CHUNK), largest)
    return wanted // HUGE_PAGE * HUGE_PAGE
