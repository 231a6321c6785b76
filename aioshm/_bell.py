"""Waiting until something happens to a file: inotify wakes the loop at once, and slow looks stay as the net.

What others do to it rings by itself: setting a bit, sizing and unlinking the file raise an event on its inode, and so
does the closing of a description, its holder's death included. Locks raise none, so whoever changes one that others
wait for rings (`Description.ring`). Where inotify is not to be had (a user's instances are limited, /proc may be
missing) looks come at the pace that waiting without it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from types import TracebackType

from ._backoff import LONGEST, SHORTEST, backoff
from ._locks import Description
from ._threads import run_aside

# Seconds between two looks where whatever happens rings.
LONGEST_WITH_BELL = 0.5

# Whose time is up may still have to wait for another's decision, and must not look without a pause meanwhile. uvloop
# counts whole milliseconds.
_SHORTEST_AT_MOST = 0.001


class Bell:
    """Wakes one waiter of the running loop; a context manager around its looks and the waits between them."""

    def __init__(self, description: Description, *, rest: float = SHORTEST) -> None:
        """Prepare; nothing is watched.

        Args:
            description: The file, through a description of our own.
            rest: Seconds between two looks at the least, however often it rings: many waiters' looks add up.
        """
        self._description = description
        self._rest = rest
        self._longest = LONGEST
        self._pauses = backoff()
        self._fd: int | None = None
        self._rang = False
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()  # kept: none runs where a coroutine is closed after its loop

    def __enter__(self) -> Bell:
        fd = self._description.watch()
        if fd is not None:
            try:
                self._loop.add_reader(fd, self._ring, fd)
            except (OSError, NotImplementedError):  # epoll's watches are limited too; a loop may know no readers
                self._description.unwatch()
            else:
                self._fd, self._longest = fd, LONGEST_WITH_BELL
        self._pauses = backoff(self._longest)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._loop.remove_reader(fd)
            # Neither the loop nor who was waited for has to wait for that: it took longer than all the rest of a join.
            self._description.unwatch(lambda close: run_aside(close, name="unwatch"))

    async def wait(self, at_most: float | None = None) -> None:
        """Return when it rang, or when it is time to look all the same: after 0.5 ms at first, later after 0.5 s.

        Once rung, the pauses begin short again: that a description was closed is told before its locks are gone (the
        kernel's fs/file_table.c, __fput), and that a bit was set before the gate is opened.

        Args:
            at_most: Seconds after which it returns in any case, and be it after 1 ms.

        Cancellation:
            Felt at once.
        """
        longest = math.inf if at_most is None else max(at_most, _SHORTEST_AT_MOST)
        earliest = self._loop.time() + min(self._rest, longest)
        timer = self._loop.call_later(min(max(self._rest, next(self._pauses)), longest), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        if self._rang:
            self._pauses = backoff(self._longest)
            if self._loop.time() < earliest:
                await asyncio.sleep(earliest - self._loop.time())
        self._rang = False
        self._wake.clear()

    def _ring(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 1 << 16)  # that something happened is all that counts
        self._rang = True
        self._wake.set()
