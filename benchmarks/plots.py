"""The plots of docs/benchmarks.md, as PNG and SVG, from what the benchmarks wrote; the same JSON, the same bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, LIGHT = "#1f2328", "#6e7781", "#d8dee4"
OURS, NAIVE, THREAD, KERNEL, LIMIT = "#0969da", "#cf222e", "#bc4c00", "#8250df", "#57606a"

FLOOR = 0.3  # ms: less is no stall

STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "figure.facecolor": "white",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 9,
    "svg.hashsalt": "aioshm",
    "svg.fonttype": "path",
}


def make_plots(found: dict[str, dict[str, Any]], images: Path) -> None:
    """Make those plots for which there are results."""
    images.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in (("stall", draw_stall), ("rate", draw_rate), ("ready", draw_ready), ("peers", draw_peers)):
            if name in found:
                figure = draw(found[name])
                save(figure, images / f"bench-{name}")
                plt.close(figure)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    svg = path.with_suffix(".svg")
    svg.write_text(re.sub(r"[ \t]+$", "", svg.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")


def draw_stall(facts: dict[str, Any]) -> Figure:
    """One row per way, with the same axes: how long the loop had been standing still, over time."""
    traces: dict[str, Any] = facts["traces"]
    colours = {"nothing": LIMIT, "mmap.madvise in a thread": NAIVE, "aioshm": OURS}
    figure, rows = plt.subplots(
        len(traces), 1, figsize=(8, 1.45 * len(traces) + 0.9), sharex=True, sharey=True, layout="constrained"
    )
    end = max(when for trace in traces.values() for when, _ in trace["stalls"])
    top = max(late for trace in traces.values() for _, late in trace["stalls"])
    for axes, (name, trace) in zip(rows, traces.items(), strict=True):
        colour = colours.get(name, THREAD)
        # One polygon for all: some thousand single ones would make a large SVG.
        corners = [
            corner
            for when, late in trace["stalls"]
            for corner in ((when - late, FLOOR), (when - late, late), (when, late), (when, FLOOR))
        ]
        axes.fill(*zip(*corners, strict=True), color=colour, linewidth=0.8)
        longest = max(late for _, late in trace["stalls"])
        what = "nothing opened" if name == "nothing" else name
        axes.set_title(f"{what}: longest stall {_ms(longest)}", color=colour)
        _mark_phases(axes, trace["phases"], trace["stalls"][-1][0], end)
        axes.set_yscale("log")
        axes.set_ylim(FLOOR, top * 8)  # room for the names of the phases
        axes.set_yticks([1, 10, 100, 1000], ["1 ms", "10 ms", "100 ms", "1 s"])
        axes.minorticks_off()
    rows[-1].set_xlabel(f"ms since the open of {facts['parameters']['MiB']} MiB began")
    rows[-1].set_xlim(0, end)
    figure.supylabel("the loop stood still for", fontsize=9.5)
    return figure


def _mark_phases(axes: Axes, phases: dict[str, float], last: float, end: float) -> None:
    """Draw where open, use and close begin, and name those that are wide enough for a name."""
    begins = [*phases.values(), last]
    for index, (name, begin) in enumerate(phases.items()):
        axes.axvline(begin, color=GREY, linewidth=0.7, linestyle=(0, (2, 2)))
        if (begins[index + 1] - begin) / end > 0.05:
            axes.annotate(
                *(name, (begin, 1)), xycoords=("data", "axes fraction"), xytext=(3, -9), textcoords="offset points",
                fontsize=8, color=GREY,
            )  # fmt: skip


def draw_rate(facts: dict[str, Any]) -> Figure:
    """Left over size, with as many threads as there are processors; right over threads, at the largest size."""
    traces: dict[str, dict[str, list[list[float]]]] = facts["traces"]
    colours = {"memset": LIMIT, "huge fault": KERNEL, "4 KiB": NAIVE, "aioshm": OURS}
    names = {"memset": "memset of mapped memory", "huge fault": "huge page fault", "4 KiB": "4 KiB pages"}
    threads = sorted(map(int, traces["aioshm"]))
    most = str(threads[-1])
    sizes = [size for size, _ in traces["aioshm"][most]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained", width_ratios=(3, 2))
    ends: list[tuple[float, str, str]] = []
    for way, by_threads in traces.items():
        style: dict[str, Any] = {"color": colours[way], "marker": "o", "markersize": 4, "linewidth": 1.8}
        left.plot(*zip(*by_threads[most], strict=True), **style)
        over_threads = [by_threads[str(count)][-1][1] for count in threads]
        right.plot(threads, over_threads, **style)
        ends.append((over_threads[-1], names.get(way, way), colours[way]))
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [_size(size) for size in sizes])
    left.minorticks_off()
    left.set_ylim(bottom=0)
    left.set_xlabel("size")
    left.set_ylabel("GiB/s")
    left.set_title(f"over size, {most} threads")
    right.set_xticks(threads)
    right.set_xlabel("threads")
    right.set_xlim(threads[0] - 0.08 * threads[-1], threads[-1] * 1.04)
    right.set_title(f"over threads, {_size(sizes[-1])}")
    _label_ends(right, threads[-1], ends)
    return figure


def draw_ready(facts: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    ends = []
    names = {"mmap.madvise": "mmap.madvise, each its part"}
    ranks = [rank for rank, *_ in facts["traces"]["aioshm"]]
    for way, colour in (("mmap.madvise", NAIVE), ("aioshm", OURS)):
        _, medians, lows, highs = zip(*facts["traces"][way], strict=True)
        axes.plot(ranks, [value * 1e3 for value in medians], color=colour, marker="o", markersize=4, linewidth=1.8)
        axes.vlines(ranks, [low * 1e3 for low in lows], [high * 1e3 for high in highs], color=colour, linewidth=1)
        ends.append((medians[-1] * 1e3, names.get(way, way), colour))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rank processes")
    axes.set_ylabel("ms until the last is ready")
    axes.set_title(f"{_size(facts['parameters']['MiB'])} in all; median, smallest to largest")
    _label_ends(axes, ranks[-1], ends)
    return figure


def draw_peers(facts: dict[str, Any]) -> Figure:
    rates = sorted(facts["traces"].items(), key=lambda item: item[1])
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(rates) + 0.9), layout="constrained")
    colours = [OURS if name.startswith("aioshm") else GREY for name, _ in rates]
    bars = axes.barh([name for name, _ in rates], [rate for _, rate in rates], color=colours, height=0.66)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"GiB/s until all of {_size(facts['parameters']['MiB'])} is there")
    axes.margins(x=0.08)
    return figure


def _label_ends(axes: Axes, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name beside its end, moved apart where lines end close together."""
    low, high = axes.get_ylim()
    apart = (high - low) * 0.065
    place = -float("inf")
    for y, name, colour in sorted(ends):
        place = max(y, place + apart)
        axes.annotate(
            *(name, (x, place)), xytext=(8, 0), textcoords="offset points", va="center", color=colour,
            annotation_clip=False,
        )  # fmt: skip


def _size(mib: float) -> str:
    return f"{mib:g} MiB" if mib < 1024 else f"{mib / 1024:g} GiB"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"
