"""Decides how a range is populated, and touches nothing: sizes of chunks, numbers of threads, and when those rest."""

from __future__ import annotations

from ._host import usable_cpus
from ._libc import HUGE_PAGE
from ._request import Request

# A chunk should take about this long: a cancellation waits for at most one, and so does whoever needs the mmap lock.
# That is processor time. On a busy machine most of the time goes into waiting, some of it once per call (MADV_COLLAPSE
# waits for a worker of the kernel on every processor), and smaller chunks would wait more often; so it may take longer.
CHUNK_SECONDS = 0.002
LONGEST_SECONDS = 0.008
SMALLEST_CHUNK = HUGE_PAGE
FIRST_CHUNK = 2 * HUGE_PAGE
# Memory can turn slow from one chunk to the next (a virtual machine's host has to find it: 20 ms per 2 MiB, seen), and
# a larger one gains nothing: the kernel's cost per huge page is the same. Mapping what is there is a thousand times
# faster.
LARGEST_CHUNK = 4 * HUGE_PAGE
LARGEST_MAPPED_CHUNK = 32 * HUGE_PAGE

# A populating thread's slice of the scheduler: longer than the default (0.7 to 3 ms, by the number of processors), so
# that the event loop, when it wakes up, goes first. Not much longer: who is not just waking up has to wait for it.
SLICE_SECONDS = 0.004

# Of a CPU quota, what populating may use: where it is used up, all of the group stands still until the next period, the
# event loop too.
_OF_QUOTA = 0.85
# Seconds. Shorter rests are saved up, for a timer costs some 0.1 ms; who was kept from working works no faster later.
_SHORTEST_REST = 0.001
_LONGEST_CREDIT = 0.01

# Zeroing pages is bound by memory bandwidth, which a socket's first few cores use up.
_MOST_THREADS = 16


def next_chunk(length: int, busy: float, elapsed: float, largest: int) -> int:
    """Return the next chunk's size after one of `length` bytes: whole huge pages, no sudden growth.

    Args:
        length: Its bytes.
        busy: Seconds of processor time that it took.
        elapsed: Seconds that it took altogether.
        largest: Bytes that the next may have.
    """
    share = max(busy / CHUNK_SECONDS, elapsed / LONGEST_SECONDS)
    wanted = int(length / share) if share > 0.5 else length * 2
    wanted = min(max(wanted, SMALLEST_CHUNK), 2 * max(length, SMALLEST_CHUNK), largest)
    return wanted // HUGE_PAGE * HUGE_PAGE


def thread_count(request: Request, total: int, quota: float | None) -> int:
    """Return how many threads pay: not more than may run at once, ranks together, nor than there is work for.

    Args:
        request: Says how many ranks there are, and perhaps how many threads.
        total: Bytes to populate.
        quota: Processors' worth of time that the control groups allow, or None for no limit.
    """
    pieces = -(-total // LARGEST_MAPPED_CHUNK)
    if pieces == 1 or request.threads:
        return min(request.threads or 1, pieces)
    ranks = request.local_world_size or 1
    return min(pieces, _MOST_THREADS, max(1, usable_cpus(quota) // ranks))


def duty(quota: float | None, *, cpus: int, ranks: int, threads: int) -> float:
    """Return which share of its time a thread may be busy, so that all ranks together leave some of the quota.

    Args:
        quota: As for `thread_count`.
        cpus: Processors that the ranks can keep busy together: as many do not use up a quota that is no smaller.
        ranks: How many populate at the same time; they are taken to be under the same quota.
        threads: How many of them there are in each rank.
    """
    if quota is None or quota >= cpus:
        return 1.0
    return min(1.0, _OF_QUOTA * quota / (ranks * threads))


class Rests:
    """When one thread rests, and how long, to be busy for no more than a share of its time."""

    def __init__(self, share: float, now: float, busy: float) -> None:
        """Begin.

        Args:
            share: Of its time, what it may be busy.
            now: Seconds on a clock that never stands still.
            busy: Seconds of processor time that the thread has had.
        """
        self._share = share
        self._now = now
        self._busy = busy

    def due(self, now: float, busy: float) -> float:
        """Return for how many seconds it should rest from `now` on, or 0.0; it is taken to do so."""
        ahead = (busy - self._busy) / self._share - (now - self._now)
        if -_LONGEST_CREDIT < ahead < _SHORTEST_REST:
            return 0.0
        rest = max(0.0, ahead)
        self._now, self._busy = now + rest, busy
        return rest
