"""Processes of a benchmark: let go at once and timed together, or one that runs what it is sent; always reaped."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
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
        # What an interrupt raises within Python's hooks around a fork is printed there and forgotten: it waits until
        # all are started. They inherit that; `_begin` ends it for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
        _join(processes)
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


def _join(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended; one that failed is not waited out, for the others may be waiting for it."""
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        for sentinel in connection.wait(list(waiting)):
            process = waiting.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode and process.exitcode > 0:  # less than 0: by a signal, as a benchmark may have meant it
                raise RuntimeError(f"process {process.pid} ended with exit status {process.exitcode}")


def child(work: Callable[..., object], *arguments: Any, context: Any = fork) -> BaseProcess:
    """Return a process, not started yet, that runs `work(*arguments)`."""
    process: BaseProcess = context.Process(target=_begin, args=(work, *arguments), daemon=True)
    return process


def _begin(work: Callable[..., object], *arguments: Any) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        work(*arguments)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _interrupt(process: BaseProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)


def race(world: int, work: Callable[[int], Any]) -> list[tuple[float, float, Any]]:
    """Let `world` processes run `work(rank)` at once; return begin, end and result of each, by rank."""
    go, results = fork.Barrier(world), fork.SimpleQueue()

    def be(rank: int) -> None:
        go.wait()
        started = time.perf_counter()
        result = work(rank)
        results.put((rank, started, time.perf_counter(), result))

    processes = [child(be, rank) for rank in range(world)]
    with running(processes):
        pass
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
    """Yield the pipe to another process, with page tables of its own, that runs what is sent: `(way, *arguments)`."""
    context = multiprocessing.get_context("spawn")  # fork would copy page tables of ours
    ours, theirs = context.Pipe()
    process = child(_serve, theirs, context=context)
    with running([process]):
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()


def _serve(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            way, *arguments = pipe.recv()
            pipe.send(way(*arguments))
