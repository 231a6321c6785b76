"""What the demo looks like: bars that move on a terminal, plain lines in a pipe, and a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from ._crew import Facts, Step
from ._sizes import in_words, seconds_in_words
from ._verdict import Finding

_DOING: dict[Step, str] = {
    "start": "starting",
    "open": "waiting",
    "write": "writing",
    "check": "checking",
    "close": "closing",
}


class OutputClosedError(Exception):
    """Nobody reads what we print any more, as after `| head`."""


class View(Protocol):
    """Shows how the ranks get on."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def begin(self, step: Step) -> None: ...
    def news(self, rank: int, step: Step, facts: Facts) -> None: ...


def make_view(console: Console, processes: int) -> View:
    """Return the view that suits the console."""
    return _Bars(console, processes) if console.is_interactive else _Lines(console)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence as it is; on a terminal it is wrapped, elsewhere it stays in one line.

    Raises:
        OutputClosedError: It cannot be printed.
    """
    show(console, Text(text, style), soft_wrap=not console.is_interactive)


def show(console: Console, content: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print what rich can draw.

    Raises:
        OutputClosedError: It cannot be printed.
    """
    try:
        console.print(content, soft_wrap=soft_wrap)
    except (BrokenPipeError, SystemExit):  # rich makes the one of the other, which would tear through tasks and loop
        raise OutputClosedError from None


def show_finding(console: Console, finding: Finding) -> None:
    """Print one sentence of the verdict, with a mark before it."""
    plain = console.options.ascii_only
    mark, style = {
        True: ("ok" if plain else "✓", "green"),
        False: ("NO" if plain else "✗", "bold red"),
        None: ("--" if plain else "•", "cyan"),
    }[finding.held]
    if not console.is_interactive:
        say(console, f"{mark} {finding.text}")
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")  # a path longer than a line is told whole
    grid.add_row(Text(mark, style), Text(finding.text, "" if finding.held is not False else style))
    show(console, grid)


def show_table(console: Console, table: Table) -> None:
    """Print the table between empty lines. Where no window is narrow it is never cut."""
    console.print()
    console.print(table, width=console.width if console.is_interactive else max(console.width, 80), crop=False)
    console.print()


def make_table(opened: Sequence[Facts], closed: Sequence[Facts], width: int) -> Table:
    """Return the summary: a row per rank."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1 if width >= 90 else 0))
    # At the narrow padding it is 76 wide at the most.
    for header in ("rank", "role", "waited", "populated", "rate", "huge pages", "threads", "stall"):
        table.add_column(header, justify="left" if header in ("role", "huge pages") else "right", no_wrap=True)
    for rank, (facts, end) in enumerate(zip(opened, closed, strict=True)):
        report = facts["report"]
        seconds = report["populate_seconds"]
        table.add_row(
            str(rank),
            report["role"],
            seconds_in_words(report["wait_seconds"]),
            seconds_in_words(seconds),
            f"{in_words(int(report['populated'] / seconds))}/s" if seconds > 0 else "",
            _huge_in_words(report),
            str(report["threads"]),
            seconds_in_words(end["stall"]["seconds"]),
            style="bold" if facts["created"] else "",
        )
    return table


def _huge_in_words(report: dict[str, Any]) -> str:
    if report["huge"] is None:
        return "as the creator's"
    return f"{report['huge'] / report['populated']:.0%}" if report["populated"] else "none"


class _Bars:
    """A bar per rank, begun anew for every step."""

    def __init__(self, console: Console, processes: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[doing]}"),
            BarColumn(bar_width=max(10, min(60, console.width - 48))),
            TextColumn("{task.fields[amount]}"),
            console=console,
        )
        self._tasks: list[TaskID] = []
        for rank in range(processes):
            self._tasks.append(
                self._progress.add_task(f"rank {rank}", total=None, doing=_padded("starting"), amount="")
            )

    def __enter__(self) -> View:
        self._console.print()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, step: Step) -> None:
        for task in self._tasks:
            self._progress.reset(task, total=None, doing=_padded(_DOING[step]), amount="")

    def news(self, rank: int, step: Step, facts: Facts) -> None:
        task = self._tasks[rank]
        if "warning" in facts:
            say(self._console, f"rank {rank}: {facts['warning']}", "yellow")
        elif "error" in facts:
            self._progress.update(task, total=1, completed=0, doing=f"[red]{_padded('failed')}[/]", amount="")
        elif "done" in facts:
            doing = "populating" if step == "open" else _DOING[step]
            amount = f"{in_words(facts['done'])} of {in_words(facts['total'])}"
            self._progress.update(
                task, total=facts["total"], completed=facts["done"], doing=_padded(doing), amount=amount
            )
        else:
            done = {"start": "ready", "open": "joined", "write": "wrote", "check": "checked", "close": "left"}[step]
            if facts.get("created"):
                done = "created"
            total = self._progress.tasks[task].total or 1
            self._progress.update(task, total=total, completed=total, doing=f"[green]{_padded(done)}[/]")


class _Lines:
    """A line whenever a rank is done with something."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def begin(self, step: Step) -> None:
        pass

    def news(self, rank: int, step: Step, facts: Facts) -> None:
        if "warning" in facts:
            say(self._console, f"rank {rank}: {facts['warning']}")
        elif "finished" in facts and (text := self._in_words(step, facts)):
            say(self._console, f"rank {rank} {text}")

    def _in_words(self, step: Step, facts: Facts) -> str | None:
        if step == "open":
            report = facts["report"]
            verb = "created" if facts["created"] else "joined"
            return f"{verb} the region in {seconds_in_words(report['total_seconds'])}"
        return {
            "start": f"is ready, pid {facts.get('pid')}",
            "write": "wrote its share",
            "check": "checked the other shares",
            "close": "left",
        }[step]


def _padded(doing: str) -> str:
    return doing.ljust(len("populating"))
