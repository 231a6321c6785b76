"""A hold on what aiofiles reads: each read is counted, and preceded by what a test wants to happen in its thread."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiofiles.threadpool
import pytest

MIB = 1 << 20
SIZE = 6 * MIB  # of the regions
DATA = os.urandom(5 * MIB + 3)  # of the file: several reads


def find_open(path: Path) -> list[str]:
    """Return the descriptors through which this process has the file open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += [fd] if os.readlink(f"/proc/self/fd/{fd}") == str(path) else []
        except FileNotFoundError:  # the one that lists
            continue
    return found


class Reads:
    """The reads of all files that aiofiles opens meanwhile.

    Attributes:
        before: Called with the number of the read, from 1, before it; what it raises is the read's error.
        sizes: What each returned.
        threads: The names of the threads that read.
    """

    def __init__(self) -> None:
        self.before: Callable[[int], object] = lambda number: None
        self.sizes: list[int] = []
        self.threads: set[str] = set()
        self.begun = 0


@contextmanager
def watched_reads() -> Iterator[Reads]:
    reads = Reads()

    class File(io.FileIO):
        def readinto(self, buffer: Any, /) -> int:
            reads.begun += 1
            reads.threads.add(threading.current_thread().name)
            reads.before(reads.begun)
            count = super().readinto(buffer) or 0
            reads.sizes.append(count)
            return count

    def open_file(file: int, mode: str, closefd: bool, **others: Any) -> File:
        return File(file, mode, closefd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiofiles.threadpool, "sync_open", open_file)
        yield reads
