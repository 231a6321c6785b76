"""Decides how a range is populated, and touches nothing: how large the next chunk is, in how many threads."""

from __future__ import annotations

from ._host import usable_cpus
from ._libc import HUGE_PAGE
from ._request import Request

# A chunk should take about this long: a cancellation waits for at most one, and so does whoever needs the mmap lock.
CHUNK_SECONDS = 0.004
SMALLEST_CHUNK = HUGE_PAGE
FIRST_CHUNK = 2 * HUGE_PAGE
# Memory can turn slow from one chunk to the next (a virtual machine's host has to find it: 20 ms per 2 MiB, seen), and
# a larger one gains nothing: the kernel's cost per huge page is the same. Mapping what is there is a thousand times
# faster.
LARGEST_CHUNK = 4 * HUGE_PAGE
LARGEST_MAPPED_CHUNK = 32 * HUGE_PAGE

# Zeroing pages is bound by memory bandwidth, which a socket's first few cores use up.
_MOST_THREADS = 16


def next_chunk(length: int, seconds: float, largest: int) -> int:
    """Return the next chunk's size after one of `length` bytes took `seconds`: whole huge pages, no sudden growth."""
    wanted = int(length * CHUNK_SECONDS / seconds) if seconds > 0 else length * 2
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
