"""What `aioshm doctor` looks like: a row per fact, a bar for each limit; in a pipe plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aioshm._errors import InsufficientMemoryError, InsufficientSpaceError, UnsuitableDirectoryError
from aioshm._picture import MemoryLevelReport

from ._diagnosis import tell_time
from ._examination import Examination
from ._show import say, show
from ._sizes import in_words

Mark = Literal["ok", "tight", "bad", "fact"]
Cell = Literal["used", "reclaimable", "region", "free"]

_WIDTH = 20
# As they look, where only ASCII goes, and in which colour.
_MARKS: dict[Mark, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "tight": ("!", "! ", "yellow"),
    "bad": ("✗", "NO", "bold red"),
    "fact": ("•", "--", "cyan"),
}
_CELLS: dict[Cell, tuple[str, str, str]] = {
    "used": ("█", "#", "blue"),
    "reclaimable": ("▒", "=", "cyan"),
    "region": ("▓", "+", "green"),
    "free": ("░", ".", "bright_black"),
}
_LEGEND: dict[Cell, str] = {
    "used": "in use",
    "reclaimable": "of it reclaimable",
    "region": "the region",
    "free": "free",
}
_WAYS = {
    "collapse": ", made by MADV_COLLAPSE",
    "mount": ", given by the mount at first touch",
    "hugetlbfs": "",  # the pool is told beside it
}


@dataclass(frozen=True)
class Bar:
    """A limit and what it is taken by, in bytes.

    Attributes:
        limit: All of it.
        used: In use, what could be reclaimed among it.
        reclaimable: Of that, what can be moved out.
        required: What the region would take; 0 where no size was asked about.
    """

    limit: int
    used: int
    reclaimable: int
    required: int

    def cells(self, width: int = _WIDTH) -> dict[Cell, int]:
        """Return how many cells there are of each kind, in the order in which they stand; `width` altogether."""
        limit = max(1, self.limit)
        stays = min(limit, self.used - self.reclaimable)
        region = min(self.required, limit - stays)
        # Where the region has no room beside it, the kernel moves something out.
        moves = min(self.reclaimable, limit - stays - region)
        ends: dict[Cell, int] = {
            "used": stays,
            "reclaimable": stays + moves,
            "region": stays + moves + region,
            "free": limit,
        }
        drawn, cells = 0, {}
        for kind, end in ends.items():
            cells[kind] = round(end * width / limit) - drawn
            drawn += cells[kind]
        return cells


@dataclass(frozen=True)
class Row:
    """One fact.

    Attributes:
        label: What it is about.
        mark: Whether it is as it must be: `"ok"`, `"tight"` (after reclaim), `"bad"`, or a mere `"fact"`.
        text: The fact.
        bar: How it looks, or None.
        amount: The figures beside the bar.
    """

    label: str
    mark: Mark
    text: str
    bar: Bar | None = None
    amount: str = ""


def make_rows(found: Examination) -> Iterator[Row]:
    """Yield the facts, those first that decide whether it fits."""
    yield _directory(found)
    asked = found.size is not None
    yield from (_level(level, found.report.memory_required if asked else 0) for level in found.report.memory)
    if found.swap_free is not None:
        yield Row("swap", "fact", f"{in_words(found.swap_free)} free" if found.swap_free else "none")
    yield _huge_pages(found)
    if found.nodes:
        each = ", ".join(f"{node.number}: {in_words(node.free)} of {in_words(node.total)} free" for node in found.nodes)
        yield Row("NUMA", "fact", f"{len(found.nodes)} node{'s' if len(found.nodes) > 1 else ''} ({each})")
    quota = "no CPU quota" if found.quota is None else f"a CPU quota of {found.quota:g}"
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    yield Row("processors", "fact", f"{found.cpus} in the affinity mask, {quota}: populates with {threads}")
    memlock = "unlimited" if found.memlock is None else in_words(found.memlock)
    yield Row("memlock", "fact", f"{memlock} (RLIMIT_MEMLOCK: bounds mlock and RDMA, not a region)")
    taken = f"{len(found.leftovers)}, taking {in_words(found.leftover_bytes)}" if found.leftovers else "none"
    yield Row("leftovers", "tight" if found.leftovers else "ok", f"{taken} in {found.report.directory.path}")
    yield Row("speed", "fact", tell_time(found) or f"not measured: {found.untried}")


def _directory(found: Examination) -> Row:
    where = found.report.directory
    short = any(
        isinstance(each, InsufficientSpaceError | UnsuitableDirectoryError)
        or (isinstance(each, InsufficientMemoryError) and each.huge_page is not None)
        for each in found.report.problems
    )
    mark: Mark = "bad" if short else "ok"
    if where.kind is None:
        return Row("directory", mark, f"{where.path}: cannot be looked at")
    kind = "not in memory" if where.kind == "other" else where.kind
    huge = found.report.huge_pages.mount_option
    text = f"{where.path}: {kind}" + (f", huge={huge}" if huge else "")
    if where.mount_point not in (None, where.path):
        text += f", mounted at {where.mount_point}"
    if where.kind == "other":
        return Row("directory", mark, text)
    if where.total is None:
        limit = "no limit of its own" if where.free is None else f"{in_words(where.free)} in the pool"
        return Row("directory", mark, f"{text}, {limit}")
    free = where.free or 0
    bar = Bar(where.total, where.total - free, 0, found.report.allocated if found.size is not None else 0)
    return Row("directory", mark, text, bar, f"{in_words(free)} of {in_words(where.total)} free")


def _level(level: MemoryLevelReport, required: int) -> Row:
    if level.limit is None or level.available is None:
        return Row("memory", "ok", f"{level.level}: no limit, {in_words(level.usage)} in use")
    marks: dict[str, Mark] = {"fits": "ok", "reclaim": "tight", "short": "bad"}
    amount = f"{in_words(level.available)} of {in_words(level.limit)} free"
    if level.reclaimable:
        amount += f", {in_words(level.reclaimable)} by reclaim"
    bar = Bar(level.limit, level.usage, min(level.reclaimable, level.usage), required)
    return Row("memory", marks[level.verdict], level.level, bar, amount)


def _huge_pages(found: Examination) -> Row:
    trial, facts = found.huge_pages, found.report.huge_pages
    setting = f" (shmem_enabled={facts.shmem_enabled})" if facts.shmem_enabled and facts.pool_free is None else ""
    page = in_words(facts.page)
    pool = ""
    if facts.pool_free is not None:
        pool = f"; pool: {in_words(facts.pool_free)} free, {in_words(facts.pool_reserved or 0)} reserved"
        pool += f", {in_words(facts.pool_surplus or 0)} surplus"
    if trial is None:
        return Row("huge pages", "fact", f"not tried: {found.untried}{setting}{pool}")
    if trial.way is None:
        return Row("huge pages", "tight", f"none: {trial.reason}{setting}")
    return Row("huge pages", "ok", f"{page} pages work{_WAYS[trial.way]}{setting}{pool}")


def show_sheet(console: Console, found: Examination) -> None:
    """Print all facts, wrapped to a terminal's width; elsewhere each is one line, however long.

    Raises:
        OutputClosedError: Nobody reads it any more.
    """
    rows = list(make_rows(found))
    if not console.is_interactive:
        for row in rows:
            say(console, _plain(row, ascii_only=console.options.ascii_only))
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    label = ""
    for row in rows:
        mark, _, style = _MARKS[row.mark]
        grid.add_row(Text(mark, style), Text(row.label if row.label != label else "", "bold"), _content(row))
        label = row.label
    grid.add_row("", "", Text("  ").join(_draw({kind: 1}).append(f" {name}", "dim") for kind, name in _LEGEND.items()))
    show(console, grid)


def _content(row: Row) -> Text:
    text = Text(row.text)
    if row.bar is None:
        return text
    cells = _draw(row.bar.cells(), region="red" if row.mark == "bad" else "green")
    return text.append("\n").append_text(cells).append(f" {row.amount}")


def _draw(cells: dict[Cell, int], region: str = "green") -> Text:
    styles = {**{kind: style for kind, (_, _, style) in _CELLS.items()}, "region": region}
    return Text().join(Text(_CELLS[kind][0] * count, styles[kind]) for kind, count in cells.items())


def _plain(row: Row, *, ascii_only: bool) -> str:
    mark = _MARKS[row.mark][1 if ascii_only else 0]
    bar = "".join(_CELLS[kind][1] * count for kind, count in row.bar.cells().items()) if row.bar else ""
    return f"{mark} {row.label}: {row.text}" + (f": {row.amount} [{bar}]" if bar else "")
