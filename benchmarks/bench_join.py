"""How long a process takes to join a region that is ready: aioshm beside mapping 4 KiB pages of the same memory.

The joiner is a process of its own, as a rank is, with page tables of its own, and stays for all rounds. It times the
whole of `open_region`; the other way opens the file, maps it and populates the mapping with `mmap.madvise`.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from harness import (
    MADV_POPULATE_WRITE,
    MIB,
    Column,
    Figures,
    Outcome,
    parse_arguments,
    publish,
    region_name,
    take_turns,
    unnamed_file,
)

import aioshm


def join_naively(path: str, size: int) -> Figures:
    started = time.perf_counter()
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, size) as memory:
            memory.madvise(MADV_POPULATE_WRITE)
            return {"join": time.perf_counter() - started}
    finally:
        os.close(fd)


def join_aioshm(name: str, directory: str, size: int) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(name, size, directory=directory) as region:
            seconds = time.perf_counter() - started
        assert not region.created
        return {"join": seconds, "map": region.report.populate_seconds}

    return asyncio.run(main())


def joiner(pipe: Connection) -> None:
    """The joiner process: runs what it is sent until the other end closes."""
    with contextlib.suppress(EOFError):
        while True:
            way, *arguments = pipe.recv()
            pipe.send(way(*arguments))


@contextlib.contextmanager
def joiner_process() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")  # fork would copy page tables of ours
    ours, theirs = context.Pipe()
    process = context.Process(target=joiner, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def small_pages(pipe: Connection, size: int, directory: str) -> Figures:
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE)
        pipe.send((join_naively, f"/proc/{os.getpid()}/fd/{fd}", size))
        return pipe.recv()


def with_aioshm(pipe: Connection, size: int, directory: str) -> Figures:
    async def main() -> Figures:
        name = region_name("join")
        async with aioshm.open_region(name, size, directory=directory):
            pipe.send((join_aioshm, name, directory, size))
            return await asyncio.to_thread(pipe.recv)

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=7)
    size, directory = arguments.mib * MIB, arguments.directory
    with joiner_process() as pipe:
        contenders = {
            "4 KiB, mmap.madvise": lambda: small_pages(pipe, size, directory),
            "aioshm": lambda: with_aioshm(pipe, size, directory),
        }
        values = take_turns(contenders, arguments.rounds, prime=size)
    outcome = Outcome(
        "Join",
        {"MiB": arguments.mib, "rounds": arguments.rounds},
        [Column("join", "whole join, ms", 1e3), Column("map", "of it mapping, ms", 1e3)],
        values,
    )
    outcome.compare("join, 4 KiB over aioshm", "4 KiB, mmap.madvise", "aioshm", "join")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
