"""A heartbeat on an event loop: how long was the loop held up at the worst, in the middle of what, and why.

A loop is late because something ran on it, or kept the interpreter lock, or because its thread had no processor: all
were busy with other work. The kernel knows how long that was, and without it the figure says something of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from types import TracebackType

INTERVAL = 0.001  # seconds


@dataclass(frozen=True)
class Stall:
    """One beat that came late.

    Attributes:
        seconds: How late.
        during: What the loop was being used for when the beat was due.
    """

    seconds: float
    during: str


class Heartbeat:
    """Beats every millisecond inside its `async with` block; a beat that comes late is a stall.

    Attributes:
        during: What the loop is being used for now; set by its user.
        longest: The latest beat.
        longest_held: The latest one when the time is left out in which the loop's thread was ready to run and no
            processor was free; None where the kernel does not say.
        beats: How many beats there were.
    """

    def __init__(self, during: str) -> None:
        self.during = during
        self.longest = Stall(0.0, during)
        self.longest_held: Stall | None = None
        self.beats = 0
        self._ending = False

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending = True  # not cancelled: the beat that is due now may be the late one
        await self._task

    async def _beat(self) -> None:
        with _RunQueue() as queue:
            queued = queue.read()
            while not self._ending:
                during, due = self.during, time.perf_counter() + INTERVAL
                await asyncio.sleep(INTERVAL)
                late = time.perf_counter() - due
                queued_before, queued = queued, queue.read()
                self.beats += 1
                if late > self.longest.seconds:
                    self.longest = Stall(late, during)
                if queued is not None and queued_before is not None:
                    held = max(0.0, late - (queued - queued_before))
                    if self.longest_held is None or held > self.longest_held.seconds:
                        self.longest_held = Stall(held, during)


class _RunQueue:
    """How long this thread has waited for a processor: the second figure of schedstat, see the kernel's sched-stats."""

    def __init__(self) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> _RunQueue:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def read(self) -> float | None:
        """Return the seconds, or None where the kernel does not say."""
        if self._fd is None:
            return None
        return int(os.pread(self._fd, 128, 0).split()[1]) / 1e9
