"""One range of addresses that shows a region's file, and the rule for when it goes: never under a living view.

Not `mmap.mmap`: it cannot be aligned to a huge page, and `torch.frombuffer(mmap_object)` keeps no export of it, so that
closing it unmaps memory under a living tensor. Here the views (memoryview, NumPy, torch) all hold the *anchor*, a
ctypes array over the range; while one lives the range stays, and when the last one dies a finalizer unmaps it. As long
as no view was handed out there is no anchor, and unmapping is an explicit call. Code in aioshm passes the address
around, never the anchor: the traceback of an error in flight would keep it, and with it the memory that
the error path is giving back.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref

from . import _libc

# What is unmapped at once, and how many seconds that should take: of small pages the smallest piece takes 3 ms.
_SMALLEST_PIECE = 32 << 20
_PIECE_SECONDS = 0.002


class Mapping:
    """`length` bytes of a file, mapped shared and writable, at an address that is a multiple of `alignment`.

    Attributes:
        length: Bytes mapped: whole pages.
        size: Bytes that views show.
        page: Bytes per page of its file system.
        makers: How many populates ask for huge pages in it; to be changed, and acted upon, under `advising`.
        advising: Held by who advises the kernel on huge pages for a part of it, which parts may overlap.
    """

    def __init__(self, fd: int, *, size: int, page: int, alignment: int = _libc.HUGE_PAGE) -> None:
        """Map the file; nothing is populated.

        Raises:
            OSError: As mmap(2) says, ENOMEM where the address space or a hugetlbfs pool is short; nothing is mapped.
        """
        self.size = size
        self.page = page
        self.length: int = round_up(size, page)
        with _libc.reopened(fd) as own:
            self._address = _map_aligned(own, self.length, max(page, alignment))
        self.makers: int = 0
        self.advising: threading.Lock = threading.Lock()
        self._lock = threading.Lock()
        self._anchor: ctypes.Array[ctypes.c_ubyte] | None = None
        self._finalizer: weakref.finalize[..., ctypes.Array[ctypes.c_ubyte]] | None = None
        # Nobody wants hundreds of GiB in a core file. Not vital: the answer is not looked at.
        _libc.try_madvise(self._address, self.length, _libc.MADV_DONTDUMP)

    @property
    def address(self) -> int:
        """Where it starts. Not to be used after `release`."""
        if not self._address:
            raise ValueError("the mapping was released")
        return self._address

    def anchor(self) -> ctypes.Array[ctypes.c_ubyte]:
        """Return what views are made from, and keep alive: a ctypes array of `size` bytes."""
        with self._lock:
            if self._anchor is None:
                self._anchor = (ctypes.c_ubyte * self.size).from_address(self.address)
                self._finalizer = self._unmap_with(self._anchor, self.address)
            return self._anchor

    def release(self) -> range:
        """Let go of the anchor, and return the addresses that the caller must now unmap: none where a view lives.

        With a view alive the range stays until it dies; `still_mapped` tells. Twice is fine.
        """
        with self._lock:  # another thread may be making a view this very moment
            address, self._address = self._address, 0
            if not address:
                return range(0)
            if self._anchor is not None and self._finalizer is not None:
                self._finalizer.detach()
                watch = weakref.ref(self._anchor)
                self._anchor = None
                survivor = watch()
                if survivor is not None:
                    self._finalizer = self._unmap_with(survivor, address)
                    return range(0)
            return range(address, address + self.length)

    @property
    def still_mapped(self) -> bool:
        """Whether a view keeps the range mapped after `release`."""
        return not self._address and self._finalizer is not None and self._finalizer.alive

    def _unmap_with(
        self, anchor: ctypes.Array[ctypes.c_ubyte], address: int
    ) -> weakref.finalize[..., ctypes.Array[ctypes.c_ubyte]]:
        finalizer = weakref.finalize(anchor, _libc.munmap, address, self.length)
        finalizer.atexit = False  # at exit views may be alive still, and the kernel unmaps anyway
        return finalizer


def unmap(addresses: range, page: int = _libc.PAGE) -> None:
    """Unmap what `Mapping.release` returned. Blocks for about 0.1 s per GiB of small pages: for a worker thread.

    Piece by piece, for munmap(2) keeps the process's mmap lock until it is done, and whoever allocates memory waits.

    Args:
        addresses: What is to be unmapped, in whole pages.
        page: Their size.
    """
    smallest = step = round_up(_SMALLEST_PIECE, page)
    while addresses:
        piece, addresses = addresses[:step], addresses[step:]
        began = time.perf_counter()
        _libc.munmap(piece.start, len(piece))
        seconds = time.perf_counter() - began
        if seconds < _PIECE_SECONDS:  # huge pages, or hardly any
            step *= 2
        elif seconds > 2 * _PIECE_SECONDS:
            step = max(smallest, step // 2)


def round_up(size: int, page: int) -> int:
    """Return the smallest multiple of `page` that is not less than `size`."""
    return -(-size // page) * page


def _map_aligned(fd: int, length: int, alignment: int) -> int:
    """Reserve more than is needed, put the file over the aligned part, give the rest back.

    mmap(2) itself aligns to small pages only, and a huge page needs a 2 MiB border in file and address alike.
    """
    reserved = length + alignment
    hole = _libc.mmap(
        None, reserved, _libc.PROT_NONE, _libc.MAP_PRIVATE | _libc.MAP_ANONYMOUS | _libc.MAP_NORESERVE, -1
    )
    address = round_up(hole, alignment)
    try:
        _libc.mmap(address, length, _libc.PROT_READ_WRITE, _libc.MAP_SHARED | _libc.MAP_FIXED, fd)
    except BaseException:
        _libc.munmap(hole, reserved)
        raise
    if address > hole:
        _libc.munmap(hole, address - hole)
    if hole + reserved > address + length:
        _libc.munmap(address + length, hole + reserved - address - length)
    return address
