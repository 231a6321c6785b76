"""Processes of a benchmark: let go at once and timed together, or one that runs what it is sent; always reaped."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import aioshm

fork = multiprocessing.get_context("fork")  # what is imported here is imported there


@contextlib.contextmanager
def running(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Start the processes, and reap them at the end whatever happens.

    Where the benchmark is interrupted they are given the time to give back what they hold: Ctrl-C reaches them as well,
    a plain SIGINT is handed on.
    """
    try:
        for process in processes:
            process.start()
        yield
        for process in processes:
            process.join()
    except BaseException:
        for ask in (lambda _: None, _interrupt, BaseProcess.kill):
            for process in processes:
                if process.is_alive():
                    ask(process)
            deadline = time.monotonic() + 5
            for process in processes:
                if process.pid is not None:
                    process.join(max(0.0, deadline - time.monotonic()))
        raise


def _interrupt(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)


def race(world: int, work: Callable[[int], Any]) -> list[tuple[float, float, Any]]:
    """Let `world` processes run `work(rank)` at once; return begin, end and result of each, by rank."""
    go, results = fork.Barrier(world), fork.SimpleQueue()

    def be(rank: int) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            go.wait()
            started = time.perf_counter()
            result = work(rank)
            results.put((rank, started, time.perf_counter(), result))

    processes = [fork.Process(target=be, args=(rank,), daemon=True) for rank in range(world)]
    with running(processes):
        pass
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"exit status {[process.exitcode for process in processes]}")
    found = sorted(results.get() for _ in processes)
    return [(start, end, result) for _, start, end, result in found]


def warm_up(directory: str) -> None:
    """Open and close a small region, so that forked processes find loaded what an open loads: see `bench_import`."""

    async def main() -> None:
        async with aioshm.open_region(f"bench-warm-{os.getpid()}", 1 << 20, directory=directory):
            pass

    asyncio.run(main())


@contextlib.contextmanager
def servant() -> Iterator[Connection]:
    """Yield the pipe to another process, with page tables of its own, that runs what it is sent: `(way, *arguments)`."""
    context = multiprocessing.get_context("spawn")  # fork would copy page tables of ours
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with running([process]):
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()


def _serve(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            way, *arguments = pipe.recv()
            pipe.send(way(*arguments))
