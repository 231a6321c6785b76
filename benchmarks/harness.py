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
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
MADV_POPULATE_WRITE = 23  # linux/mman.h; the mmap module has no name for it

Figures = dict[str, float]
Contender = Callable[[], Figures]

_LOAD_BEFORE = os.getloadavg()[0]


@dataclass(frozen=True)
class Column:
    """One measured figure: its key in what contenders return, its heading, and how it is printed."""

    key: str
    heading: str
    scale: float = 1.0
    digits: int = 2


@dataclass
class Outcome:
    """What one benchmark measured: every value of every figure of every contender, round by round.

    `ratios` and `figures` are what the documentation quotes, by name; `traces` are curves for the plots.
    """

    benchmark: str
    parameters: dict[str, Any]
    columns: Sequence[Column]
    values: dict[str, dict[str, list[float]]]
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    traces: dict[str, Any] = field(default_factory=dict)

    def median(self, contender: str, key: str) -> float:
        return statistics.median(self.values[contender][key])

    def spread(self, contender: str, key: str) -> tuple[float, float, float]:
        """Return the median, the smallest and the largest value."""
        values = self.values[contender][key]
        return statistics.median(values), min(values), max(values)

    def compare(self, name: str, above: str, below: str, key: str) -> float:
        """Note the median of `above` over that of `below` as the ratio `name`."""
        denominator = self.median(below, key)
        self.ratios[name] = self.median(above, key) / denominator if denominator > 0 else math.inf
        return self.ratios[name]

    def quote(self, name: str, contender: str, key: str, share: float = 0.5) -> float:
        """Note a quantile of all rounds as the figure `name`: 0.5 is the median, 1.0 the largest."""
        self.figures[name] = quantile(self.values[contender][key], share)
        return self.figures[name]

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
            "figures": self.figures,
            "traces": self.traces,
            "table": self.table().splitlines(),
        }
        return _one_line_per_list(json.dumps(_rounded(facts), indent=1)) + "\n"


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, *, prime: int | Mapping[str, int] = 0
) -> dict[str, dict[str, list[float]]]:
    """Run every contender once per round, and one round more, which is discarded.

    Args:
        contenders: What to run, by name.
        rounds: How many of them count.
        prime: Bytes that a turn will need, touched before each; by contender, where they differ.

    Returns:
        All values, by contender and figure.
    """
    values: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            touch_and_free(prime if isinstance(prime, int) else prime[name])
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
    """Beats on the loop every millisecond while its block runs, and keeps when each beat came and how late it was.

    Each beat maps, writes and unmaps memory, as the allocator of a busy server does. A loop that only sleeps would not
    see whoever holds the process's mmap lock; one that allocates has to wait for it.
    """

    INTERVAL = 0.001
    ALLOCATION = b"\xa5" * MIB

    def __init__(self) -> None:
        self.beats: list[tuple[float, float]] = []  # when it came, seconds it was late
        self._phases: list[tuple[str, float]] = []
        self._started = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0.01)  # it is measured at its pace, not while it starts
        self.beats.clear()
        self._started = time.perf_counter()
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
            self.beats.append((now, now - last - self.INTERVAL))
            last = now

    def enter(self, phase: str) -> None:
        """Say what begins now; a stall counts to the phase that its middle is in."""
        self._phases.append((phase, time.perf_counter()))

    def figures(self) -> Figures:
        """Return the longest stall, in all and by phase, the 99th percentile, and how many beats there were."""
        stalls = [late for _, late in self.beats]
        found = {"longest": max(stalls), "p99": quantile(stalls, 0.99), "beats": float(len(stalls))}
        for index, (phase, begin) in enumerate(self._phases):
            end = self._phases[index + 1][1] if index + 1 < len(self._phases) else math.inf
            within = [late for when, late in self.beats if begin <= when - late / 2 < end]
            found[f"longest {phase}"] = max(within, default=0.0)
        return found

    def trace(self, step: float = 0.005) -> dict[str, Any]:
        """Return the curve for a plot, in milliseconds: the phases' begins, and the longest stall of each `step`."""
        longest: dict[int, tuple[float, float]] = {}
        for when, late in self.beats:
            slot = int((when - self._started) / step)
            longest[slot] = max(longest.get(slot, (0.0, 0.0)), (late, when - self._started))
        return {
            "phases": {phase: round((when - self._started) * 1e3, 3) for phase, when in self._phases},
            "stalls": [[round(when * 1e3, 3), round(late * 1e3, 3)] for late, when in longest.values()],
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed; of an even number the median as usual."""
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[math.ceil(len(values) * share) - 1]


@contextlib.contextmanager
def unnamed_file(size: int, directory: str) -> Iterator[int]:
    """Yield the descriptor of an empty file of `size` bytes in shared memory that never had a name to leave behind."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def region_name(what: str) -> str:
    return f"bench-{what}-{os.getpid()}"


def room(directory: str) -> int:
    """Return the bytes that a benchmark may take at once: what is free in `directory` and on the host, less a tenth."""
    figures = os.statvfs(directory)
    text = Path("/proc/meminfo").read_text()
    available = int(text.split("MemAvailable:")[1].split()[0]) << 10
    return min(figures.f_bavail * figures.f_frsize, available) * 9 // 10


def fitting(sizes: Sequence[int], directory: str) -> list[int]:
    """Leave out the sizes in MiB that do not fit, with a line that says so."""
    free = room(directory) // MIB
    for size in sizes:
        if size > free:
            print(f"left out: {size} MiB, for {free} MiB are free\n")
    return [size for size in sizes if size <= free]


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def machine() -> dict[str, Any]:
    """Return what a reader must know to place the figures."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "processor": _first(r"model name\s*: (.*)", "/proc/cpuinfo"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
        "shmem_enabled": _first(r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load_before": _LOAD_BEFORE,
    }


def parse_arguments(description: str | None, *, mib: int | None, rounds: int, **more: Any) -> argparse.Namespace:
    """Read the options that all benchmarks have; `mib` None: there is no size to choose.

    `more`: a benchmark's own options, whose defaults say what they are: a number, or a list of such.
    """
    parser = argparse.ArgumentParser(description=description)
    if mib is not None:
        parser.add_argument("--mib", type=int, default=mib, help="size of the region in MiB (default %(default)s)")
        parser.add_argument("--directory", default="/dev/shm", help="a tmpfs to work in (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds that count (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all values there, too")
    for name, default in more.items():
        is_list = isinstance(default, list)
        kind = type(default[0] if is_list else default)
        parser.add_argument(
            f"--{name}", type=kind, default=default, nargs="+" if is_list else None, help="(default %(default)s)"
        )
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
    for name, figure in outcome.figures.items():
        print(f"* {name}: {figure:.4g}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outcome.to_json(), encoding="utf-8")


def _cell(values: list[float], column: Column) -> str:
    if not values:
        return ""
    middle, low, high = (value * column.scale for value in (statistics.median(values), min(values), max(values)))
    if low == high:
        return f"{middle:.{column.digits}f}"
    return f"{middle:.{column.digits}f} ({low:.{column.digits}f} to {high:.{column.digits}f})"


def _first(pattern: str, path: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _rounded(facts: Any) -> Any:
    """Six digits say all that was measured, and keep the files small."""
    if isinstance(facts, float):
        return float(f"{facts:.6g}")
    if isinstance(facts, dict):
        return {key: _rounded(value) for key, value in facts.items()}
    return [_rounded(value) for value in facts] if isinstance(facts, list) else facts


def _one_line_per_list(text: str) -> str:
    """Put lists of numbers, and of pairs of them, on one line each."""
    return re.sub(r"\[[-\d.,e+\s\[\]]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
