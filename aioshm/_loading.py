"""Loads a file into a region without stopping the loop: `load_from`, and the only user of aiofiles."""

from __future__ import annotations

import errno
import functools
import os
import stat
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import aiofiles

from ._errors import RegionClosedError, ShortFileError
from ._log import log
from ._preflight import find_shortage
from ._progress import Progress, Ticker
from ._request import check_index, check_path
from ._threads import run_regardless, run_through
from ._units import mib

if TYPE_CHECKING:
    from ._region import Region

# A read should take about this long: a cancellation waits for at most one. Larger reads would not be faster: from the
# page cache 4 MiB take about 1 ms, and handing one to the thread and back about 0.1 ms.
_READ_SECONDS = 0.008
_SMALLEST_READ = 1 << 18
_FIRST_READ = 1 << 20
_LARGEST_READ = 1 << 25


def load_from(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    file_offset: int = 0,
    length: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Callable[[Region], Awaitable[None]]:
    """Return an async function that loads a file into the region it is given.

    As `open_region(..., initialize=load_from(path))` it runs once, in the creator, before any other process gets the
    region; or call it on a region that is open: `await load_from(path)(region)`. It may be used again, and opens the
    file anew each time. The bytes go from the file straight into the region, in a thread.

    Args:
        path: A regular file. A relative path is taken from where the process is now.
        offset: Byte of the region at which the first byte goes.
        file_offset: Byte of the file at which to begin.
        length: Bytes; None: to the end of the file, at least one.
        on_progress: Called on the loop a few times a second while loading, and at the end.

    Returns:
        The function.

    Raises:
        TypeError: At the call: an argument has the wrong type.
        ValueError: At the call: an argument has a value that makes no sense. Or on loading, before a byte is written:
            the region has no room for so much at `offset`.
        ShortFileError: On loading, like all below: the file has fewer bytes, seen before one is written; or it shrank
            while it was read, and the region holds a part of it.
        InsufficientSpaceError: The region was not populated, and its file system is full.
        InsufficientMemoryError: It was not, and a control group may not have so many hugetlb pages.
        RegionClosedError: The region was closed, before or meanwhile.
        OSError: The file is missing, a directory, not readable or broken; `filename` says which. As `initialize`, any
            of them comes out of the creator's `open_region`, and there is no region.

    Cancellation:
        Felt within one read, about 8 ms of a file that comes steadily; a disk or server that hangs is waited for.
        After it nothing is written to the region any more, and the file is closed.

    Example:
        ```python
        async with aioshm.open_region("weights", size, initialize=aioshm.load_from("model.safetensors")) as region:
            ...
        ```
    """
    if on_progress is not None and not callable(on_progress):
        raise TypeError(f"on_progress must be callable or None, not {type(on_progress).__name__}")
    return functools.partial(
        _load,
        path=check_path("path", path, "a file"),
        offset=_check_bytes("offset", offset),
        file_offset=_check_bytes("file_offset", file_offset),
        length=None if length is None else _check_bytes("length", length),
        on_progress=on_progress,
    )


async def _load(
    region: Region,
    *,
    path: str,
    offset: int,
    file_offset: int,
    length: int | None,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    started = time.monotonic()
    loading = _Loading(region, path)
    try:
        size = await run_through(lambda _: loading.open(), name="load")
        span = _find_span(path, size, file_offset, length, offset, region.size)
        await loading.read(span, file_offset, on_progress)
    finally:
        await run_regardless(loading.close, name="load")
    seconds = time.monotonic() - started
    rate = len(span) / seconds / (1 << 30)
    log.info("loaded %s MiB from %s into %s at %.2f GiB/s", mib(len(span)), path, region.path, rate)


class _Loading:
    """What one load holds: the file, the one thread that reads it, and the view that it reads into.

    The file is opened here and lent to aiofiles: what aiofiles opens is lost where that is cancelled (aiofiles #165).
    The thread is our own: in the default executor a read would queue behind others' work, and could not be waited for.
    """

    def __init__(self, region: Region, path: str) -> None:
        self._region = region
        self._path = path
        self._fd = -1
        self._view = self._chunk = region.buffer
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioshm-load")

    def open(self) -> int:
        """Open the file and return its size.

        Raises:
            OSError: It is missing, not readable, a directory, or not a regular file.
        """
        # Without O_NONBLOCK a FIFO would be waited for until somebody writes; on a regular file it does nothing.
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ESPIPE, "Not a regular file", self._path)
        return status.st_size

    async def read(self, span: range, file_offset: int, on_progress: Callable[[Progress], None] | None) -> None:
        """Read from `file_offset` on into the bytes of the region that `span` names, one read after the other."""
        # Unbuffered: what is read goes from the page cache to its place without another copy.
        file = await aiofiles.open(self._fd, "rb", buffering=0, closefd=False, executor=self._executor)
        await file.seek(file_offset)
        done, size = 0, _FIRST_READ
        with Ticker(on_progress, lambda: done, len(span), what=f"loading {self._path}"):
            while done < len(span):
                began = time.perf_counter()
                # Not in a `with`: where this is cancelled the thread is still in it, and only `close` can let it go.
                self._chunk = self._view[span.start + done : min(span.start + done + size, span.stop)]
                try:
                    count = await file.readinto(self._chunk)
                except OSError as error:
                    raise self._translated(error, len(span) - done) from error
                self._chunk.release()
                if not count:
                    raise ShortFileError(
                        path=self._path, file_offset=file_offset, required=len(span), available=done, shrank=True
                    )
                if self._region.closed:
                    raise RegionClosedError(name=self._region.name)
                done += count
                size = _adapt(size, count, time.perf_counter() - began)

    def close(self) -> None:
        """Wait for the read in flight, end the thread, close the file, let go of the memory. Twice is fine."""
        self._executor.shutdown()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._chunk.release()
        self._view.release()

    def _translated(self, error: OSError, missing: int) -> Exception:
        """Return what an error of a read means. EFAULT: there was no room for a page of the region."""
        full = find_shortage(self._region._request, missing) if error.errno == errno.EFAULT else None
        return full or OSError(error.errno, error.strerror, self._path)


def _find_span(path: str, size: int, file_offset: int, length: int | None, offset: int, region_size: int) -> range:
    """Return the bytes of the region that will be written, or raise: nothing has been touched by then."""
    available = max(0, size - file_offset)
    required = max(1, available) if length is None else length
    if required > available:
        raise ShortFileError(path=path, file_offset=file_offset, required=required, available=available, shrank=False)
    if offset + required > region_size:
        raise ValueError(
            f"{required} bytes of {path} do not fit into the region from byte {offset} on: it has {region_size} bytes"
        )
    return range(offset, offset + required)


def _adapt(size: int, count: int, seconds: float) -> int:
    """Return the size of the next read after one of `count` bytes took `seconds`: no sudden growth, no sudden fall."""
    wanted = int(count * _READ_SECONDS / seconds) if seconds > 0 else 2 * size
    return min(max(wanted, size // 2, _SMALLEST_READ), 2 * size, _LARGEST_READ)


def _check_bytes(field: str, value: object) -> int:
    number = check_index(field, value)
    if number < 0:
        raise ValueError(f"{field} must not be negative, and is {number}")
    return number


load_from.__module__ = "aioshm"
