"""Fragments one memory node of the emulated machine until its input ends: `python fragments.py NODE BYTES`.

It takes the node's memory in huge pages but for a few, gives every second quarter of a MiB back, and shares the rest
with forked children. No huge page is free then, and the kernel can make one by moving what is in its way, page by page
and in the page tables of every child: work that succeeds, and takes long. `BYTES` are what is left to fragment; more
that is free goes into the node's pool of huge pages, which takes no time. Says "ready" when it is so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import sys
from pathlib import Path

PAGE, HUGE_PAGE = 4096, 2 << 20
PIECE = 64 * PAGE
SHARERS = 90
# Huge pages that stay free: taking the last ones would let the kernel compact in vain, and it then gives up for a while
# (mm/compaction.c, defer_compaction and the blocks' skip bits).
SPARED = 16
MADV_COLD = 20
MADV_POPULATE_WRITE = 23
PR_SET_PDEATHSIG = 1


def main() -> None:
    node, size = int(sys.argv[1]), int(sys.argv[2])
    os.sched_setaffinity(0, {node})  # each node has one processor, and memory comes from its own node first
    pool = Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages")
    before = pool.read_text()
    children: list[int] = []
    try:
        pool.write_text(str(int(before) + free_huge_pages(node) - size // HUGE_PAGE))
        with take_all_but(SPARED, node) as memory:
            cut_up(memory)
            os.sched_setaffinity(0, {1 - node})  # what the children's page tables take is not the node's
            for _ in range(SHARERS):
                children.append(fork_child())  # noqa: PERF401 - one that cannot be made leaves those before it known
            print("ready", flush=True)
            sys.stdin.read()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        pool.write_text(before)


def free_huge_pages(node: int) -> int:
    """Count them in /proc/buddyinfo: one of the tenth order holds two. The DMA zone is kept for others."""
    found = 0
    for line in Path("/proc/buddyinfo").read_text().splitlines():
        place = re.match(rf"Node {node}, zone +(?!DMA )\w+ +([\d ]+)", line)
        if place:
            orders = [int(count) for count in place[1].split()]
            found += orders[9] + 2 * orders[10]
    return found


def take_all_but(spared: int, node: int) -> mmap.mmap:
    count = free_huge_pages(node) - spared
    memory = mmap.mmap(-1, count * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # or khugepaged would put it together again
    return memory


def cut_up(memory: mmap.mmap) -> None:
    first = -address(memory) % HUGE_PAGE
    for start in range(first, len(memory) - HUGE_PAGE + 1, HUGE_PAGE):
        memory.madvise(MADV_COLD, start, PAGE)  # a part of it: that splits the huge page itself, not its mapping alone
        for piece in range(start, start + HUGE_PAGE, 2 * PIECE):
            memory.madvise(mmap.MADV_DONTNEED, piece, PIECE)


def address(memory: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(memory)
    try:
        return ctypes.addressof(view)
    finally:
        del view


def fork_child() -> int:
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pause()
        os._exit(0)
    return child


if __name__ == "__main__":
    main()
