"""Memory by the kernel's own calls, without the interpreter lock: what there is to be reached."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def advise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(address, length, advice):
        raise _error()


@contextlib.contextmanager
def mapped(size: int, fd: int | None = None) -> Iterator[int]:
    """Map a file, or private memory, on a huge page's border, and yield the address."""
    length = size + HUGE_PAGE
    reserved = _libc.mmap(None, length, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if reserved == _FAILED:
        raise _error()
    try:
        address = -(-reserved // HUGE_PAGE) * HUGE_PAGE
        flags = _MAP_FIXED | (_MAP_PRIVATE | _MAP_ANONYMOUS if fd is None else _MAP_SHARED)
        if _libc.mmap(address, size, _PROT_READ_WRITE, flags, -1 if fd is None else fd, 0) == _FAILED:
            raise _error()
        yield address
    finally:
        _libc.munmap(reserved, length)


def in_threads(threads: int, address: int, size: int, work: Callable[[int, int], object]) -> None:
    """Run `work(address, length)` on equal parts, on huge-page borders, in as many threads."""
    pieces = -(-size // HUGE_PAGE)
    borders = [min(size, pieces * index // threads * HUGE_PAGE) for index in range(threads + 1)]
    parts = [(address + start, stop - start) for start, stop in itertools.pairwise(borders)]
    others = [threading.Thread(target=work, args=part) for part in parts[1:]]
    for thread in others:
        thread.start()
    work(*parts[0])
    for thread in others:
        thread.join()


def make_huge(address: int, size: int) -> None:
    """Populate with huge pages where the kernel makes them, and with small ones elsewhere."""
    for start in range(address, address + size, HUGE_PAGE):
        advise(start, mmap.PAGESIZE, MADV_POPULATE_WRITE)
    with contextlib.suppress(OSError):
        advise(address, size, MADV_COLLAPSE)
    advise(address, size, MADV_POPULATE_WRITE)


def fill(address: int, length: int) -> None:
    ctypes.memset(address, 0x5A, length)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
