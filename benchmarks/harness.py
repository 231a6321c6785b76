"""What the benchmarks share: contenders in turns, medians and spread, a heartbeat on the loop, a table and JSON.

Absolute figures depend on the machine and on what else runs there, so contenders take turns in one run (A B A B …) and
only ratios of their medians are quoted. The first round is discarded: it pays for imports. A virtual machine gives its
host free memory back within seconds, and the next touch is then up to twenty times slower, whoever it is that
touches; so each turn begins by taking and freeing as much memory as it will need.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
MADV_POPULATE_WRITE = 23  # linux/mman.h; the mmap module has no name for it

Figures = dict[str, float]
Contender = Callable[[], Figures]


@dataclass(frozen=True)
class Column:
    """One measured figure: its key in what contenders return, its heading, and how it is printed."""

    key: str
    heading: str
    scale: float = 1.0
    digits: int = 2


@dataclass
class Outcome:
    """What one benchmark measured: every value of every figure of every contender, round by round."""

    benchmark: str
    parameters: dict[str, Any]
    columns: Sequence[Column]
    values: dict[str, dict[str, list[float]]]
    ratios: dict[str, float] = field(default_factory=dict)

    def median(self, contender: str, key: str) -> float:
        return statistics.median(self.values[contender][key])

    def compare(self, name: str, above: str, below: str, key: str) -> float:
        """Note the median of `above` over that of `below` as the ratio `name`."""
        denominator = self.median(below, key)
        self.ratios[name] = self.median(above, key) / denominator if denominator > 0 else math.inf
        return self.ratios[name]

    def table(self) -> str:
        """Return the medians, and in brackets the smallest and the largest value, as a Markdown table."""
        lines = [
            "| " + " | ".join(["", *(column.heading for column in self.columns)]) + " |",
            "| --- |" + " ---: |" * len(self.columns),
        ]
        for contender, figures in self.values.items():
            cells = [_cell(figures.get(column.key, []), column) for column in self.columns]
            lines.append("| " + " | ".join([contender, *cells]) + " |")
        return "\n".join(lines)

    def to_json(self) -> str:
        contenders = {
            contender: {
                key: {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}
                for key, values in figures.items()
            }
            for contender, figures in self.values.items()
        }
        facts = {
            "benchmark": self.benchmark,
            "machine": machine(),
            "parameters": self.parameters,
            "contenders": contenders,
            "ratios": self.ratios,
        }
        return json.dumps(facts, indent=2) + "\n"


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, *, prime: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Run every contender once per round, and one round more, which is discarded.

    Args:
        contenders: What to run, by name.
        rounds: How many of them count.
        prime: Bytes that a turn will need, touched before each.

    Returns:
        All values, by contender and figure.
    """
    values: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            touch_and_free(prime)
            figures = contender()
            if number:
                for key, value in figures.items():
                    values[name].setdefault(key, []).append(value)
            if sys.stderr.isatty():
                print(f"\r\033[Kround {number} of {rounds}: {name}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return values


def touch_and_free(size: int) -> None:
    """Make the kernel's next free memory of `size` bytes real on the host as well, in whole huge pages."""
    if size:
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(MADV_POPULATE_WRITE)


class Heartbeat:
    """Beats on the loop every millisecond while its block runs, and keeps how late each beat was.

    Each beat maps, writes and unmaps memory, as the allocator of a busy server does. A loop that only sleeps would not
    see whoever holds the process's mmap lock; one that allocates has to wait for it.
    """

    INTERVAL = 0.001
    ALLOCATION = b"\xa5" * MIB

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0.01)  # it is measured at its pace, not while it starts
        self.stalls.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await asyncio.sleep(2 * self.INTERVAL)  # one more beat, late by whatever held it up at the end
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(self.INTERVAL)
            with mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                memory.write(self.ALLOCATION)
            now = time.perf_counter()
            self.stalls.append(now - last - self.INTERVAL)
            last = now

    def figures(self) -> Figures:
        """Return the longest stall, the 99th percentile of all, and how many beats there were."""
        ordered = sorted(self.stalls)
        return {
            "longest": ordered[-1],
            "p99": ordered[math.ceil(len(ordered) * 0.99) - 1],
            "beats": float(len(ordered)),
        }


@contextlib.contextmanager
def unnamed_file(size: int, directory: str) -> Iterator[int]:
    """Yield the descriptor of an empty file of `size` bytes in shared memory that no death of ours can leave behind."""
    fd, path = tempfile.mkstemp(prefix="bench-", dir=directory)
    try:
        os.unlink(path)
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def region_name(what: str) -> str:
    return f"bench-{what}-{os.getpid()}"


def machine() -> dict[str, Any]:
    """Return what a reader must know to place the figures."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
        "load_before": os.getloadavg()[0],
    }


def parse_arguments(description: str | None, *, mib: int | None, rounds: int) -> argparse.Namespace:
    """Read the options that all benchmarks have; `mib` None: there is no size to choose."""
    parser = argparse.ArgumentParser(description=description)
    if mib is not None:
        parser.add_argument("--mib", type=int, default=mib, help="size of the region in MiB (default %(default)s)")
        parser.add_argument("--directory", default="/dev/shm", help="a tmpfs to work in (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds that count (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all values there, too")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def publish(outcome: Outcome, path: Path | None) -> None:
    """Print the table and the ratios; write JSON to `path`."""
    facts = machine()
    print(f"## {outcome.benchmark}\n")
    print(f"Python {facts['python']}, Linux {facts['kernel']}, {facts['cpus']} processors;", end=" ")
    print(
        ", ".join(f"{key} {value}" for key, value in outcome.parameters.items()) + "; median (smallest to largest).\n"
    )
    print(outcome.table() + "\n")
    for name, ratio in outcome.ratios.items():
        print(f"* {name}: {ratio:.2f}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outcome.to_json(), encoding="utf-8")


def _cell(values: list[float], column: Column) -> str:
    if not values:
        return ""
    middle, low, high = (value * column.scale for value in (statistics.median(values), min(values), max(values)))
    return f"{middle:.{column.digits}f} ({low:.{column.digits}f} to {high:.{column.digits}f})"
