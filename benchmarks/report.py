"""Writes what was measured into docs/benchmarks.md, between its markers, and makes the plots: never by hand.

    python benchmarks/report.py              # again, from benchmarks/results

A marker is `<!-- begin WHAT -->`, up to `<!-- end WHAT -->`: `machine`, `numbers` (the table of what is to be reached),
or `table NAME` for the table of one benchmark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMES = "\N{MULTIPLICATION SIGN}"


class Results:
    """The JSON files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, dict[str, Any]] = {
            path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
        }

    def ratio(self, benchmark: str, name: str) -> float | None:
        return self._read(benchmark, "ratios", name)

    def figure(self, benchmark: str, name: str) -> float | None:
        return self._read(benchmark, "figures", name)

    def parameter(self, benchmark: str, name: str) -> Any:
        return self.found.get(benchmark, {}).get("parameters", {}).get(name, "?")

    def _read(self, benchmark: str, kind: str, name: str) -> float | None:
        """Return None where the benchmark was not run; a name that it does not have is an error of ours."""
        return float(self.found[benchmark][kind][name]) if benchmark in self.found else None


@dataclass(frozen=True)
class Number:
    """One number to reach: which figure or ratio it is, and whether more is better."""

    what: str
    benchmark: str
    kind: str  # "ratios" or "figures"
    name: str
    bound: float
    unit: str

    @property
    def is_least(self) -> bool:
        return self.unit == TIMES

    def wanted(self) -> str:
        return f"{self.bound:g} {TIMES}" if self.is_least else f"under {self._text(self.bound, exact=True)}"

    def got(self, results: Results) -> str:
        value = results.ratio(self.benchmark, self.name) if self.kind == "ratios" else None
        value = results.figure(self.benchmark, self.name) if self.kind == "figures" else value
        if value is None:
            return "not measured"
        text = f"{value:.3g} {TIMES}" if self.is_least else self._text(value)
        reached = value >= self.bound if self.is_least else value < self.bound
        return text if reached else f"**{text}**"

    def _text(self, value: float, *, exact: bool = False) -> str:
        digits = "g" if exact else ".1f" if self.unit != "s" else ".3f"
        scaled = value * {"ms": 1e3, "s": 1, "%": 100}[self.unit]
        return f"{scaled:{digits}} {self.unit}"


def numbers(results: Results) -> list[Number]:
    """Return the numbers to reach, in the order of the table."""
    stall, teardown, cancel = (results.parameter(name, "MiB") for name in ("stall", "teardown", "cancel"))
    populate, ready, join = (results.parameter(name, "MiB") for name in ("populate", "ready", "join"))
    waited = results.parameter("wait", "seconds")
    ratio = "ratios"
    figure = "figures"
    return [
        Number(
            f"rate, one process, defaults, {populate} MiB, against one-threaded 4 KiB `mmap.madvise`",
            *("populate", ratio, "rate, aioshm over mmap.madvise", 3.5, TIMES),
        ),
        Number(
            "rate against memset of mapped memory, 1 thread",
            *("rate", ratio, "rate, aioshm over memset, threads: 1", 0.75, TIMES),
        ),
        Number(
            "rate against memset of mapped memory, 2 threads",
            *("rate", ratio, "rate, aioshm over memset, threads: 2", 0.62, TIMES),
        ),
        Number(
            f"time to ready, 4 ranks, {ready} MiB, against 4 processes populating their quarter at 4 KiB",
            *("ready", ratio, "ready, 4 ranks, mmap.madvise over aioshm", 3, TIMES),
        ),
        Number(
            f"joiner's map of {join} MiB against a 4 KiB joiner's populate",
            *("join", ratio, "map, 4 KiB over aioshm", 100, TIMES),
        ),
        Number(
            f"longest loop stall during open, use and close of {stall} MiB: the naive thread's against ours",
            *("stall", ratio, "longest stall, naive over aioshm", 100, TIMES),
        ),
        Number("loop stall of the same, p99", "stall", figure, "p99, aioshm, seconds", 0.006, "ms"),
        Number(
            f"teardown of {teardown} MiB against 4 KiB pages", "teardown", ratio, "close, 4 KiB over aioshm", 20, TIMES
        ),
        Number("joiner latency after ready, p50", "wait", figure, "latency p50, joiner, seconds", 0.002, "ms"),
        Number("joiner latency after ready, p99", "wait", figure, "latency p99, joiner, seconds", 0.015, "ms"),
        Number(
            f"CPU of a joiner while waiting {waited:g} s" if waited != "?" else "CPU of a joiner while waiting",
            *("wait", figure, "CPU while waiting, joiner, seconds", 0.1, "s"),
        ),
        Number(
            f"cancellation at any moment of an open of {cancel} MiB, until it is felt and giving back begins, longest",
            *("cancel", figure, "felt, longest, seconds", 0.02, "ms"),
        ),
        Number(
            "all of eight ranks have the capacity error",
            *("capacity", figure, "last of eight, ranks of a cohort, seconds", 0.1, "ms"),
        ),
        Number("opening and closing 1 MiB", "small", figure, "open and close, median, seconds", 0.003, "ms"),
        Number("guard, progress and reports together, of an open", "guard", figure, "seconds, share of all", 0.03, "%"),
    ]


def numbers_table(results: Results) -> str:
    head = ["| what | at least | got | from |", "| --- | ---: | ---: | --- |"]
    rows = [f"| {one.what} | {one.wanted()} | {one.got(results)} | `{one.benchmark}` |" for one in numbers(results)]
    return "\n".join(head + rows)


def machine_line(results: Results) -> str:
    """Say on what it was measured; each machine once, should there be several."""
    told: list[str] = []
    for facts in results.found.values():
        machine = facts["machine"]
        line = (
            f"{machine['processor']}, {machine['cpus']} processors, {machine['memory_mib'] / 1024:.0f} GiB, "
            f"{machine['architecture']}, Linux {machine['kernel']}, shmem_enabled={machine['shmem_enabled']}, "
            f"Python {machine['python']}"
        )
        told += [line] if line not in told else []
    loads = [facts["machine"]["load_before"] for facts in results.found.values()]
    if not loads:
        return "Not measured yet."
    return f"{'; '.join(told)}. The load of the machine before each benchmark: {min(loads):.1f} to {max(loads):.1f}."


def benchmark_table(results: Results, name: str) -> str:
    if name not in results.found:
        return "Not measured yet."
    facts = results.found[name]
    parameters = ", ".join(f"{key} {value}" for key, value in facts["parameters"].items())
    ratios = [f"* {what}: {value:.3g}" for what, value in facts["ratios"].items()]
    lines = [f"{facts['benchmark']}; {parameters}; median (smallest to largest):", "", *facts["table"]]
    return "\n".join(lines + (["", *ratios] if ratios else []))


def fill(text: str, results: Results) -> str:
    """Replace what stands between the markers."""
    writers: dict[str, Callable[[], str]] = {
        "machine": lambda: machine_line(results),
        "numbers": lambda: numbers_table(results),
    }

    def write(found: re.Match[str]) -> str:
        what = found[1]
        _, is_table, name = what.partition("table ")
        body = benchmark_table(results, name) if is_table else writers[what]()
        return f"<!-- begin {what} -->\n\n{body}\n\n<!-- end {what} -->"

    return re.sub(r"<!-- begin ([\w ]+) -->.*?<!-- end \1 -->", write, text, flags=re.DOTALL)


def write_report(folder: Path, page: Path | None, images: Path) -> str:
    """Fill the page, make the plots, and return the table of numbers."""
    results = Results(folder)
    if page is not None:
        page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    try:
        from plots import make_plots
    except ImportError as error:  # matplotlib
        print(f"no plots: {error}\n")
    else:
        make_plots(results.found, images)
    return numbers_table(results)


if __name__ == "__main__":
    docs = ROOT / "docs"
    print(write_report(ROOT / "benchmarks" / "results", docs / "benchmarks.md", docs / "images"))
