"""The lock table: what each byte range means, and the open file description that holds the locks.

All coordination state is the kernel's: open-file-description locks on bytes of the region's file far beyond its end
(fcntl(2), F_OFD_SETLK; a lock may stand where no data is). They vanish with their holder, however it dies, and they
work across containers that share the directory, where pids do not. POSIX F_SETLK locks would not do: they belong to the
process, so ranks run as tasks of one process would not see each other, and closing any descriptor of the file drops
them.

    range              held as     by                                  means
    GATE               exclusive   creator while forming, last one out  nobody else may enter
    GATE               shared      everyone inside                      the region is alive
    WORLD + n          shared      everyone inside (n = 0: no cohort)   its local world size is n
    SHORTFALL + n      shared      everyone inside                      its size is n bytes less than the file's
    CLAIM + rank       exclusive   that rank                            the rank is taken, and alive
    READY + rank       exclusive   that rank                            its share is populated
    RELEASE            exclusive   whoever releases or breaks up a cohort  exactly one does, and may remove the name
    PID + rank<<22|pid exclusive   that rank                            lets an error name the peer's pid

Two bits of the file's mode are all that outlives its writer. READY_BIT, owner-execute: without a cohort the creator
populated and initialized the region, and a shared gate without it proves nothing but that somebody came in; with a
cohort all ranks were ready and were released. BROKEN_BIT, sticky: a rank left its cohort before that. With a cohort the
name goes right after either.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import _libc
from ._errors import UnsupportedPlatformError


@dataclass(frozen=True)
class Range:
    """Bytes of the file, far beyond its end, that are locked as one."""

    start: int
    length: int = 1

    def at(self, index: int) -> Range:
        """Return the single byte number `index` of this range."""
        return Range(self.start + index)


_BASE = 1 << 62
MAX_RANKS = 1 << 10
PID_BITS = 22  # the largest pid_max there is: include/linux/threads.h, PID_MAX_LIMIT
_MAX_WORLD = 1 << 20

GATE = Range(_BASE)
RELEASE = Range(_BASE + 1)
CLAIM = Range(_BASE + (1 << 32), MAX_RANKS)
READY = Range(_BASE + (2 << 32), MAX_RANKS)
PID = Range(_BASE + (3 << 32), MAX_RANKS << PID_BITS)
WORLD = Range(_BASE + (1 << 50), _MAX_WORLD)
# Less than a page: only on hugetlbfs, where a file has whole ones, of up to 16 GiB.
SHORTFALL = Range(_BASE + (1 << 51), 1 << 40)

READY_BIT = stat.S_IXUSR
BROKEN_BIT = stat.S_ISVTX

# struct flock where off_t is 64 bits: type, whence, start, length, pid (which must be 0 for OFD locks).
_FLOCK = struct.Struct("hhqqi4x")

# Held over every open-and-register, and over every fork: a child could otherwise inherit a description it does not know
# of.
_fork_lock = threading.RLock()
_open_descriptions: weakref.WeakSet[Description] = weakref.WeakSet()
# The lock is not held over close(2), which may take long. What is being closed is remembered with its file instead: a
# child that was forked then has it still open, or has another file under its number, or nothing.
_being_closed: dict[int, tuple[int, os.stat_result]] = {}


class Description:
    """One open file description of a region's file: the locks taken through it live exactly as long as it is open.

    Not inherited: a program started from here gets none (O_CLOEXEC), and in a forked child every
    description is closed at once, or a dead rank would look alive for as long as the child runs.

    Attributes:
        fd: The descriptor; -1 once closed.
        made: Whether this open made the file.
    """

    fd: int = -1

    def __init__(self, path: str, flags: int, mode: int = 0o600, *, access: int = os.O_RDWR) -> None:
        """Open `path`; see open(2). Raises OSError as the kernel says.

        With `access=os.O_RDONLY` it can look at the table, but hold nothing exclusively.
        """
        self.made: bool = bool(flags & os.O_EXCL)
        self._watch = -1
        self._unwatching: list[Callable[[], None]] = []
        with _fork_lock:
            self.fd = os.open(path, flags | access | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            _open_descriptions.add(self)

    @property
    def closed(self) -> bool:
        """Whether it was closed, here or by a fork."""
        return self.fd < 0

    @property
    def is_slow_to_close(self) -> bool:
        """Whether `close` may block for more than microseconds."""
        return self._watch >= 0 or bool(self._unwatching) or self.status().st_blocks > 0

    def close(self) -> None:
        """Close it and with it drop all its locks; twice is fine.

        Blocks for about 0.1 s per GiB where it is the last reference to a deleted file with small pages; and until
        what watched it is closed.
        """
        with _fork_lock:
            fd, self.fd = self.fd, -1
            if fd < 0:
                return
            self.unwatch()
            _being_closed[id(self)] = fd, os.fstat(fd)
        try:
            os.close(fd)
        finally:
            del _being_closed[id(self)]
            for wait in self._unwatching:
                wait()

    def __del__(self) -> None:
        self.close()

    def status(self) -> os.stat_result:
        """Return the file's status, whatever became of its name."""
        return os.fstat(self.fd)

    def mark(self, bit: int) -> None:
        """Set one of the bits that outlive us."""
        os.fchmod(self.fd, stat.S_IRUSR | stat.S_IWUSR | bit)

    def ring(self) -> None:
        """Raise an event for those who `watch`, though nothing but the file's times changes.

        Not by setting the mode it has: somebody may set a bit between our look and our deed, and it would be lost.
        Where it may not be (a sandbox, a file made immutable) nothing is lost: those who wait look all the same.
        """
        with contextlib.suppress(OSError):
            os.utime(self.fd)

    def watch(self) -> int | None:
        """Return an inotify descriptor that becomes readable when something happens to the file, until `unwatch`.

        None where there is none to be had: a user's instances are limited, or /proc is missing. See inotify(7).
        """
        with _fork_lock:
            try:
                self._watch = _libc.inotify_init()
                _libc.inotify_add_watch(self._watch, f"/proc/self/fd/{self.fd}")
            except OSError:
                self.unwatch()
                return None
            return self._watch

    def unwatch(self, run: Callable[[Callable[[], None]], Callable[[], None]] | None = None) -> None:
        """Close what `watch` returned; twice is fine.

        The kernel waits for a grace period of its own before close(2) returns (fs/notify/mark.c:
        fsnotify_wait_marks_destroyed): 0.1 ms, or where processors are busy 20 ms.

        Args:
            run: Called to do it aside; returns what waits for its end, as `close` then does.
        """
        watch, self._watch = self._watch, -1
        if watch < 0:
            return
        if run is None:
            os.close(watch)
        else:
            self._unwatching.append(run(lambda: os.close(watch)))

    def is_at(self, path: str) -> bool:
        """Whether `path` still names this file: to be asked before it is unlinked."""
        try:
            there = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, self.status())

    def unlink(self, path: str) -> bool:
        """Remove `path` if it still names this file, and say whether it did.

        Only for the holder of the exclusive GATE or of RELEASE: nobody else may remove a name, so none can
        come between the look and the deed.
        """
        if not self.is_at(path):
            return False
        with contextlib.suppress(FileNotFoundError):  # deleted from outside this very moment
            os.unlink(path)
        return True

    def try_exclusive(self, what: Range) -> bool:
        """Lock `what` against everyone, from shared too; False where somebody holds it."""
        return self._try_lock(fcntl.F_WRLCK, what)

    def try_shared(self, what: Range) -> bool:
        """Lock `what` against exclusive holders, from exclusive too (then it never fails, and leaves no gap)."""
        return self._try_lock(fcntl.F_RDLCK, what)

    def unlock(self, what: Range) -> None:
        """Let go of `what`."""
        self._try_lock(fcntl.F_UNLCK, what)

    def find_held(self, what: Range) -> int | None:
        """Return the index within `what` of a byte that somebody else holds in any way.

        None where nobody holds any. Of several, which one is the kernel's choice: it looks by holder, not by place.
        """
        kind, start = self._ask(what)
        return None if kind == fcntl.F_UNLCK else max(0, start - what.start)

    def find_other(self, what: Range, index: int) -> int | None:
        """Return the index within `what` of a byte other than `index` that somebody else holds; None: there is none."""
        for first, stop in ((0, index), (index + 1, what.length)):
            found = self.find_held(Range(what.start + first, stop - first)) if first < stop else None
            if found is not None:
                return first + found
        return None

    def how_held(self, what: Range) -> Literal["shared", "exclusive"] | None:
        """Return how somebody else holds the single byte `what`; None where nobody does.

        For onlookers, who must not even try a lock. A shared GATE held for a moment only would make the last one out
        fail to get it exclusively, and go without removing the name.
        """
        kind, _ = self._ask(what)
        return {fcntl.F_RDLCK: "shared", fcntl.F_WRLCK: "exclusive"}.get(kind)  # type: ignore[return-value]  # literals

    def _ask(self, what: Range) -> tuple[int, int]:
        """Return the kind of a lock that would be in the way of an exclusive one, and its start; it takes none."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, what.start, what.length, 0)
        kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, question))
        return kind, start

    def _try_lock(self, kind: int, what: Range) -> bool:
        request = _FLOCK.pack(kind, os.SEEK_SET, what.start, what.length, 0)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno == errno.EINVAL:
                raise UnsupportedPlatformError(reason="the kernel has no open-file-description locks") from error
            raise
        return True


def _close_all_in_child() -> None:
    for description in list(_open_descriptions):
        description.close()
    for fd, status in _being_closed.values():
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), status):
                os.close(fd)
    _being_closed.clear()
    _fork_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_all_in_child
    )
