"""The guard: before each chunk is populated, is there still memory for it? The error comes instead of the OOM kill.

The preflight looks once; others take memory while hundreds of GiB are being populated, and limits move (a pod can be
resized in place). Threads populate at the same time, so what they have in flight counts too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from . import _cgroup, _host
from ._cgroup import MemoryFigures, MemoryLevel
from ._preflight import Finding, host_figures, judge_memory, memory_error, memory_required
from ._request import Request

# /proc/meminfo sums over all processors, which costs more than a chunk should; the host is seldom the tighter limit.
_HOST_INTERVAL = 0.02


class Guard:
    """Admits chunks for as long as every memory level has room for them."""

    def __init__(self, request: Request, levels: tuple[MemoryLevel, ...] | None = None) -> None:
        self._request = request
        # The other ranks populate at the same time, and what they have in flight is in no figure: taken for as much as
        # ours.
        self._ranks = request.local_world_size or 1
        self._levels = _cgroup.own_memory_levels() if levels is None else levels
        self._settled = threading.Condition()
        self._in_flight = 0
        self._host_due = 0.0
        self._host_swap = 0

    def fit(self, length: int, smallest: int) -> int:
        """Return how many bytes to go for next: `length`, or less where memory is getting short."""
        with self._settled:
            while length > smallest and self._find_short(length) is not None:
                length //= 2
        return max(length, smallest)

    @contextlib.contextmanager
    def admitted(self, length: int) -> Iterator[None]:
        """Around the populating of `length` bytes: returns when there is room for them.

        Raises:
            InsufficientMemoryError: There is none, nothing else is in flight, and reclaim would not help.
        """
        with self._settled:
            while (finding := self._find_short(length)) is not None:
                # What others have in flight may be in the usage already, so a no is certain only when they are done.
                if not self._in_flight:
                    raise memory_error(self._request, finding)
                self._settled.wait()
                self._host_due = 0.0
            self._in_flight += length
        try:
            yield
        finally:
            with self._settled:
                self._in_flight -= length
                self._settled.notify_all()

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
        required = memory_required((length + self._in_flight) * self._ranks)
        close = [level for level in self._levels if not self._has_headroom(level, required)]
        host = self._read_host()
        finding = judge_memory(required, _cgroup.read_figures(tuple(close), self._host_swap) + host)
        return finding if finding is not None and finding.verdict == "short" else None

    def _has_headroom(self, level: MemoryLevel, required: int) -> bool:
        """The cheap look, two small files; memory.stat is read only where it says no."""
        limit = level.read_limit()
        if limit is None:
            return True
        usage = level.read_usage()
        return usage is None or usage + required <= limit

    def _read_host(self) -> list[MemoryFigures]:
        now = time.monotonic()
        if now < self._host_due:
            return []
        self._host_due = now + _HOST_INTERVAL
        memory = _host.read_memory()
        if memory is None:
            return []
        self._host_swap = memory.swap_free
        return [host_figures(memory)]
