"""The guard: before each chunk is populated, is there still memory for it? The error comes instead of the OOM kill.

The preflight looks once; others take memory while hundreds of GiB are being populated, and limits move (a pod can be
resized in place). Threads populate at the same time, so what they have in flight counts too. And giving back takes a
while, in which others go on taking: where they are seen to, the guard stops that much earlier, or the OOM killer would
come after all, and take the largest process, which is ours.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator

from . import _cgroup, _host
from ._cgroup import LevelWatch, MemoryFigures, MemoryLevel
from ._files import resident
from ._preflight import (
    Finding,
    host_figures,
    judge_memory,
    memory_error,
    memory_required,
    node_figures,
    takes_memory,
)
from ._request import Request

# Seconds between two looks at what seldom changes, or is seldom the tighter limit: /proc/meminfo, which sums over all
# processors, the memory nodes that were asked for, and levels that have no limit.
_INTERVAL = 0.02

# Where all levels have so many bytes to spare, the next look may wait for so many seconds: nobody takes them in that
# time.
_PLENTY = 1 << 30
_CALM_SECONDS = 0.005

# Where a level has less to spare than this, and than half of it all, others may take it before we look again.
_LITTLE = 4 << 30

# Over how many seconds the taking of others is watched, from how many on it tells a rate, and how often it is noted.
_WINDOW = 0.1
_SHORTEST = 0.008
_SPACING = 0.002
# What a group's usage may rise by without anybody taking: the kernel charges in batches per processor, and page tables,
# and our own heap grows.
_NOISE = 2 << 20

# Seconds that giving back takes at the most: to notice and to start, and then per byte, of small pages.
_BACK_SECONDS = 0.05
_BACK_RATE = 10 << 30


class Guard:
    """Admits chunks for as long as every memory level has room for them.

    Attributes:
        crowded: Whether a level once had little to spare beside the chunk asked about.
    """

    def __init__(self, request: Request, fd: int, levels: tuple[MemoryLevel, ...] | None = None) -> None:
        """Open what is to be watched, `fd` is the region's file; `close` lets go of it."""
        self._request = request
        self._fd = fd
        # The other ranks populate at the same time, and what they have in flight is in no figure: each is taken to have
        # as much as we.
        self._ranks = request.local_world_size or 1
        self._watches = [LevelWatch(level) for level in (_cgroup.own_memory_levels() if levels is None else levels)]
        self._limited = self._watches
        self._takings = {watch: _Taking() for watch in self._watches}
        self._settled = threading.Condition()
        self._in_flight = 0
        self._due = self._calm_until = 0.0
        self._host: list[MemoryFigures] = []
        self._host_swap = 0
        self.crowded = False

    def close(self) -> None:
        """Let go of what was watched; twice is fine."""
        for watch in self._watches:
            watch.close()

    @contextlib.contextmanager
    def admitted(self, length: int, smallest: int) -> Iterator[int]:
        """Around the populating of the next chunk: yields how many bytes it may have, once there is room for them.

        Args:
            length: Bytes wanted; where memory is getting short it is less.
            smallest: Bytes that make sense; `length` is a multiple of it.

        Raises:
            InsufficientMemoryError: There is no room for `smallest`, nothing else is in flight, and reclaim would
                not help.
        """
        with self._settled:
            length = self._admit(length, smallest)
            self._in_flight += length
        try:
            yield length
        finally:
            with self._settled:
                self._in_flight -= length
                self._settled.notify_all()

    def _admit(self, length: int, smallest: int) -> int:
        while (finding := self._find_short(length)) is not None:
            if length > smallest:
                length = max(smallest, length // 2 // smallest * smallest)
            elif self._in_flight:
                # What others have in flight may be in the usage already: a no is certain only when they are done.
                self._settled.wait()
                self._due = 0.0
            else:
                raise memory_error(self._request, finding)
        return length

    def confirm(self) -> None:
        """Look once more, within `admitted`, where the kernel refused a huge page: is it for want of memory?

        Raises:
            InsufficientMemoryError: Touching what is in flight as small pages would end in the OOM killer.
        """
        with self._settled:
            finding = self._find_short(0)
        if finding is not None:
            raise memory_error(self._request, finding)

    def _find_short(self, length: int) -> Finding | None:
        now = time.monotonic()
        required = memory_required((length + self._in_flight) * self._ranks)
        if now < self._calm_until and required < _PLENTY // 2:
            return None
        if now >= self._due:
            self._look_around(now)
        finding = judge_memory(required, self._host)
        if finding is not None and finding.verdict == "short":
            return finding
        spare = min((self._note(figures.headroom - required, figures.limit) for figures in self._host), default=_PLENTY)
        region = resident(os.fstat(self._fd))
        for watch in self._limited:
            limit, usage = watch.read_limit(), watch.read_usage()
            if limit is None or usage is None:
                continue
            needed = required + self._margin(watch, usage - region, region, now)
            spare = min(spare, self._note(limit - usage - needed, limit))
            if limit - usage < needed:  # only now the longer look: memory.stat, what the kernel would give up
                finding = judge_memory(needed, _cgroup.read_figures((watch.level,), self._host_swap))
                if finding is not None and finding.verdict == "short":
                    return finding
        self._calm_until = now + _CALM_SECONDS if spare >= _PLENTY else 0.0
        return None

    def _note(self, spare: int, limit: int) -> int:
        """Return what a level has to spare, and note whether that is little."""
        self.crowded = self.crowded or spare < min(limit // 2, _LITTLE)
        return spare

    def _margin(self, watch: LevelWatch, others: int, region: int, now: float) -> int:
        """Return the bytes that others will take from a level while we give ours back, going by what they do now.

        The region's pages are charged as they are made, by whatever rank: the rest of the usage is others'.
        """
        return int(self._takings[watch].see(now, others) * (_BACK_SECONDS + region / _BACK_RATE))

    def _look_around(self, now: float) -> None:
        """Now and then: see which levels have a limit at all, for one may be set meanwhile, and read the host."""
        self._due = now + _INTERVAL
        self._limited = [watch for watch in self._watches if watch.read_limit() is not None]
        memory = _host.read_memory()
        self._host = [host_figures(memory)] if memory is not None else []
        if isinstance(self._request.numa, tuple):
            self._host += node_figures(self._request.numa)
        self._host_swap = memory.swap_free if memory is not None else 0


class _Taking:
    """How fast others take memory from one level."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, now: float, others: int) -> float:
        """Note what others have; return the most bytes per second that they took over any time until now, or 0.0.

        Not the mean: who has just begun to take would look slow for as long as the window is.
        """
        while self._seen and now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        rates = [(others - before - _NOISE) / (now - then) for then, before in self._seen if now - then >= _SHORTEST]
        if not self._seen or now - self._seen[-1][0] >= _SPACING:
            self._seen.append((now, others))
        return max(0.0, *rates) if rates else 0.0


def guard_for(request: Request, fd: int, page: int) -> Guard | None:
    """Return a guard where the request wants one and it has something to watch."""
    return Guard(request, fd) if request.memory_policy == "guard" and takes_memory(page) else None
