"""The narrow seam to the C library: memory, its nodes, statfs, fallocate, inotify, slices. Nothing else calls it.

`mmap.mmap.madvise()` holds the interpreter lock for the whole call (CPython's Modules/mmapmodule.c has no
Py_BEGIN_ALLOW_THREADS around it, up to 3.15), so a thread that populates with it stops the event loop
all the same. A call through `ctypes.CDLL` releases the lock, and these functions may be called from worker threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
HUGE_PAGE = 2 << 20

# linux/mman.h; the mmap module lacks the newer ones.
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

PROT_NONE = 0
PROT_READ_WRITE = 0x3
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MAP_POPULATE = 0x8000

# linux/mempolicy.h. Preferred without a node means the node of the processor that touches it: MPOL_LOCAL is newer.
MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_INTERLEAVE = 3

# The C library has no function for these (libnuma has, glibc from 2.41 on), so they are called by number:
# asm/unistd_64.h, and for all but x86_64 asm-generic/unistd.h.
_GENERIC = (235, 239, 274)
_MBIND, _MOVE_PAGES, _SCHED_SETATTR = {"x86_64": (237, 279, 314), "aarch64": _GENERIC, "riscv64": _GENERIC}.get(
    os.uname().machine if hasattr(os, "uname") else "", (None, None, None)
)

# linux/falloc.h
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02

# linux/magic.h
TMPFS_MAGIC = 0x01021994
HUGETLBFS_MAGIC = 0x958458F6

# linux/inotify.h: what happens to a region's file that somebody may wait for. Unlinking is a change of attributes.
_IN_MODIFY = 0x002
_IN_ATTRIB = 0x004
_IN_CLOSE_WRITE = 0x008

SUPPORTED = sys.platform == "linux" and sys.maxsize > 1 << 32

if SUPPORTED:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    _libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    _libc.syscall.restype = ctypes.c_long

_MAP_FAILED = ctypes.c_void_p(-1).value


def mmap(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    """Map and return the address. See mmap(2).

    Raises:
        OSError: As the kernel says; nothing was mapped.
    """
    result: int = _libc.mmap(address, length, protection, flags, fd, offset)
    if result == _MAP_FAILED:
        raise _last_error("mmap")
    return result


def munmap(address: int, length: int) -> None:
    """Unmap. See munmap(2).

    Raises:
        OSError: As the kernel says.
    """
    if _libc.munmap(address, length):
        raise _last_error("munmap")


def try_madvise(address: int, length: int, advice: int) -> int:
    """Give advice and return 0 or an errno: for callers who decide by it. See madvise(2)."""
    return ctypes.get_errno() if _libc.madvise(address, length, advice) else 0


def try_mbind(address: int, length: int, mode: int, nodes: Sequence[int]) -> int:
    """Set the memory policy of a range and return 0 or an errno: for callers who decide by it. See mbind(2)."""
    mask = 0
    for node in nodes:
        mask |= 1 << node
    words = mask.bit_length() // 64 + 1  # with a bit to spare: the kernel takes one off (mm/mempolicy.c: get_nodes)
    held = (ctypes.c_uint64 * words).from_buffer_copy(mask.to_bytes(8 * words, "little"))
    return _try_syscall(_MBIND, address, length, mode, held, 64 * words, 0)


def page_nodes(addresses: Sequence[int]) -> list[int]:
    """Return for each address of this process the node that its page lies on, or less than 0 where there is no page.

    See move_pages(2), which moves nothing where it is told no nodes.

    Raises:
        OSError: As the kernel says: EPERM in a container that may not ask.
    """
    count = len(addresses)
    pages, states = (ctypes.c_uint64 * count)(*addresses), (ctypes.c_int * count)()
    code = _try_syscall(_MOVE_PAGES, 0, count, pages, None, states, 0)
    if code:
        raise OSError(code, f"move_pages: {os.strerror(code)}")
    return list(states)


def _try_syscall(number: int | None, *arguments: int | ctypes.Array[Any] | None) -> int:
    """Make a system call that returns nothing of interest, and return 0 or an errno."""
    if number is None:
        return errno.ENOSYS
    # Variadic, so every integer has to be as wide as a register.
    wide = (ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments)
    return ctypes.get_errno() if _libc.syscall(ctypes.c_long(number), *wide) < 0 else 0


@contextlib.contextmanager
def reopened(fd: int) -> Iterator[int]:
    """Give another open file description of the same file, to map it through.

    A mapping keeps the description it was made from until it is unmapped, and the description keeps its locks
    (the kernel's fs/file_table.c, __fput): our own would outlast us under a view, and in a forked child that merely
    inherited the addresses. The name will not do, for it may be gone. Without /proc there is no other way than `fd`.
    """
    try:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        other = os.dup(fd)
    try:
        yield other
    finally:
        os.close(other)


def fallocate(fd: int, offset: int, length: int) -> None:
    """Allocate the file's pages in this range; the file keeps its content and its size. See fallocate(2).

    Not `os.posix_fallocate`: that lets the file grow to the end of its last page, and where a file system
    knows no fallocate, glibc imitates it by writing.

    Raises:
        OSError: As the kernel says; ENOSPC when the file system is full.
    """
    while _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, offset, length):
        if ctypes.get_errno() != errno.EINTR:
            raise _last_error("fallocate")


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the file's pages in this range, mapped or not; it reads as zeros afterwards. See fallocate(2).

    Raises:
        OSError: As the kernel says.
    """
    if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length):
        raise _last_error("fallocate")


def inotify_init() -> int:
    """Return a new inotify descriptor that does not block. See inotify_init(2).

    Raises:
        OSError: As the kernel says; EMFILE where the user's instances are used up.
    """
    fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _last_error("inotify_init1")
    return fd


def inotify_add_watch(fd: int, path: str) -> None:
    """Watch the file at `path`, a link followed, for changes of its size or attributes, and for closed descriptions.

    See inotify_add_watch(2).

    Raises:
        OSError: As the kernel says; ENOSPC where the user's watches are used up.
    """
    if _libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY | _IN_ATTRIB | _IN_CLOSE_WRITE) < 0:
        raise _last_error("inotify_add_watch")


def try_slice(seconds: float) -> bool:
    """Let the calling thread run for so long before others that want no more than it; False where that cannot be had.

    Not its share of the processor changes by this, but who is woken up meanwhile, and has a shorter slice, goes first
    (Linux 6.12, kernel/sched/fair.c: PREEMPT_SHORT). Ignored by older kernels. See sched_setattr(2).
    """
    try:
        policy, nice = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    except OSError:  # musl says ENOSYS to the first whatever the kernel knows, and a seccomp filter may to either
        return False
    if policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    attributes = struct.pack("=IIQiIQQQ", 48, policy, 0, nice, 0, int(seconds * 1e9), 0, 0)
    held = (ctypes.c_char * len(attributes)).from_buffer_copy(attributes)
    return _try_syscall(_SCHED_SETATTR, 0, held, 0) == 0


def file_system_magic(path: str) -> int:
    """Return the type of the file system that `path` stands on. See statfs(2), `f_type`.

    Raises:
        OSError: As the kernel says, with `path` as its filename.
    """
    # struct statfs is 120 bytes where the C library is 64-bit; f_type is its first long.
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int.from_bytes(buffer.raw[:8], sys.byteorder) & 0xFFFF_FFFF


def _last_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
