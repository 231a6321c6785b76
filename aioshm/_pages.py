"""Makes the pages of a range: huge ones where they can be had, small ones elsewhere; it knows the kernel's ways.

One small page of every 2 MiB is touched with MADV_POPULATE_WRITE, which never changes data, and then the range is made
huge with MADV_COLLAPSE. That gives huge pages on a plain /dev/shm (mounted `huge=never`) without any
privilege (Linux 6.1, mm/khugepaged.c: madvise_collapse; it needs something to collapse, hence the touch), it is about
three times as fast as small pages, and where a memory group is full it fails with EBUSY where touching would be killed.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable

from . import _libc
from ._errors import HugePagesUnavailableError, InsufficientMemoryError, InsufficientSpaceError
from ._libc import HUGE_PAGE, PAGE
from ._log import log
from ._mapping import Mapping, round_up
from ._preflight import find_shortage
from ._request import Request
from ._worth import Way, Worth

# After so many ranges in a row without a huge page there are none to be had, and asking costs a compaction each time.
_PATIENCE = 8

# How often a call is repeated that was interrupted, or whose reason was gone when it was looked for.
_TRIES = 100


class Pages:
    """The pages of one span of a mapping: state that the threads share which make them.

    Attributes:
        total: Bytes of the span, in whole pages.
        collapse: Whether huge pages are asked for; no longer once there are none to be had.
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
        confirm: Callable[[], None],
        missing: Callable[[], int],
    ) -> None:
        """Prepare; nothing is touched.

        Args:
            request: For names in errors, and whether huge pages are required.
            mapping: Where they are made.
            fd: The file under it.
            span: Bytes of the mapping; whole pages around it count, huge ones where they are to be made.
            collapse: Whether to make huge pages; otherwise what is there is mapped, and small pages fill the gaps.
            confirm: Called where the kernel refused a huge page, before small ones are touched; may raise.
            missing: Returns how many bytes of the span are not made yet.
        """
        self.is_hugetlb = mapping.page > PAGE
        border = HUGE_PAGE if collapse and not self.is_hugetlb else mapping.page
        start, end = span.start // border * border, min(round_up(span.stop, border), mapping.length)
        self.total = end - start if span else 0
        self.collapse = collapse and not self.is_hugetlb
        self.small_page_reason: str | None = None
        self._request = request
        self._address = mapping.address + start
        self._fd = fd
        self._offset = start
        self._page = mapping.page
        self._confirm = confirm
        self._missing = missing
        self._required = self.collapse and request.huge_pages == "require"
        self._worth = Worth() if self.collapse and not self._required else None
        self._sampled: list[range] = []
        self._in_vain = 0
        self._mapping = mapping
        self._hinted = self.collapse and bool(self.total)
        self._cut_short = self._unwanted = False
        self._legacy = False
        self._lock = threading.Lock()
        if self._hinted:
            # Where shmem_enabled=advise or the mount says huge=advise, the touch itself then gives the huge page.
            with mapping.advising:
                mapping.makers += 1
                _libc.try_madvise(self._address, self.total, _libc.MADV_HUGEPAGE)

    def make(self, chunk: range) -> int:
        """Make the pages of a chunk of the span, and return how many bytes of it are known to be huge.

        Where it is cut short, some pages of the chunk are not made.

        Raises:
            InsufficientSpaceError: The file system is full.
            InsufficientMemoryError: A control group may not have so many hugetlb pages.
            HugePagesUnavailableError: Huge pages are required, and the kernel gave none.
            OSError: Whatever else the kernel says, such as ENOMEM or EHWPOISON.
            BaseException: What `confirm` raised.
        """
        if self.is_hugetlb:
            self._touch(chunk.start, len(chunk))
            return len(chunk)
        started = time.thread_time()
        whole = chunk[: len(chunk) // HUGE_PAGE * HUGE_PAGE]
        way = self._choose() if whole else "small"
        huge = self._make_huge(whole) if way == "huge" else 0
        if self._cut_short:
            return huge
        if huge < len(chunk):
            self._touch(chunk.start + huge, len(chunk) - huge)
        if self._worth is not None and whole:
            self._note(self._worth, way, whole, time.thread_time() - started)
        if self._required and huge < len(whole):  # only now: where space was short, the touch has said so
            raise HugePagesUnavailableError(
                allocation_name=self._request.allocation_name,
                directory=self._request.directory,
                reason=self.small_page_reason or "the kernel did not say why",
            )
        return huge

    def make_up(self) -> int | None:
        """Make huge, at the end, the next of what a trial left in small pages; return the bytes, None: nothing is left.

        Nothing is left either where huge pages are not asked for any more.
        """
        with self._lock:
            chunk = self._sampled.pop() if self.collapse and self._sampled else None
        if chunk is None:
            return None
        return 0 if self._try_collapse(chunk) else len(chunk)

    def unmap(self, chunk: range) -> None:
        """Take a chunk's pages out of our address space; they stay in the file, and what they hold stays as it is."""
        _libc.try_madvise(self._address + chunk.start, len(chunk), _libc.MADV_DONTNEED)

    def map(self, chunk: range) -> None:
        """Map a chunk's pages, which are there.

        Raises:
            OSError: As for `make`.
        """
        self._touch(chunk.start, len(chunk))

    def free(self, chunk: range) -> None:
        """Free a chunk of the span again; what it held is gone."""
        _libc.punch_hole(self._fd, self._offset + chunk.start, len(chunk))

    def cut_short(self) -> None:
        """Have a collapse that other threads are in end after the huge page in work, and make nothing any more.

        Between two huge pages it looks whether the mapping still wants any (hugepage_vma_revalidate). Where the host
        of a virtual machine has to find the memory each takes 5 to 20 ms, and a chunk is up to four of them. Not where
        another populate is at work on the mapping: it would be refused its own, or told that a part is all.
        """
        if self._cut_short:
            return
        self._cut_short = True
        if self._hinted and self.collapse:
            with self._mapping.advising:
                if self._mapping.makers == 1:
                    self._unwanted = True
                    _libc.try_madvise(self._address, self.total, _libc.MADV_NOHUGEPAGE)

    def close(self) -> None:
        """Undo in the mapping what cutting short did; for when no thread is at work any more. Once."""
        if self._hinted:
            with self._mapping.advising:
                self._mapping.makers -= 1
                if self._unwanted:
                    _libc.try_madvise(self._address, self.total, _libc.MADV_HUGEPAGE)

    def _choose(self) -> Way:
        if not self.collapse:
            return "small"
        return "huge" if self._worth is None else self._worth.choose()

    def _note(self, worth: Worth, way: Way, whole: range, seconds: float) -> None:
        """Note the processor time that it took, a refusal included; remember a trial's small pages; heed a verdict."""
        worth.note(way, len(whole), seconds)
        with self._lock:
            if way == "small" and self.collapse:
                self._sampled.append(whole)
            if worth.verdict is not None and self.collapse:
                self.collapse, self.small_page_reason = False, worth.verdict

    def _make_huge(self, whole: range) -> int:
        """Collapse huge page by huge page's worth from the chunk's start; return the bytes that worked out."""
        for start in whole[::HUGE_PAGE]:
            self._touch(start, PAGE)
        if not self.collapse:  # the touch may have found a kernel too old for either
            return 0
        if self._try_collapse(whole):
            if not self._cut_short:
                self._confirm()  # a full memory group says EBUSY here, where a touch would be killed
            return 0
        return len(whole)

    def _try_collapse(self, whole: range) -> int:
        """Collapse and return 0 or an errno; how that goes on is noted."""
        code = _libc.try_madvise(self._address + whole.start, len(whole), _libc.MADV_COLLAPSE)
        if code:
            self._explain(code)
        else:
            self._in_vain = 0
        return code

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
                self.collapse = False

    def _touch(self, start: int, length: int) -> None:
        """Make `length` bytes from `start` resident and mapped; what they hold stays as it is."""
        if not self._legacy:
            code = self._try_populate_write(start, length)
            if code == 0:
                return
            if code != errno.EINVAL:
                raise self._translated(code, "MADV_POPULATE_WRITE")
            self._legacy, self.collapse = True, False
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

    def _find_shortage(self) -> InsufficientSpaceError | InsufficientMemoryError | None:
        return find_shortage(self._request, max(self._page, self._missing()))


@functools.cache
def _warn_of_old_kernel(allocation_name: str) -> None:
    log.warning("%s: no MADV_POPULATE_WRITE (kernel older than 5.14): populating small pages", allocation_name)
