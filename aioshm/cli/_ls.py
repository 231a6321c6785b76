"""`aioshm ls`: the regions of a directory, what they take, and who has them mapped."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aioshm._files import sweep_command

from ._options import directory_option, fail, json_option, refuse_where_unsupported
from ._processes import Mapper
from ._regions import Listing, Row, list_regions
from ._show import say
from ._sizes import in_words

_WIDEST = 10_000
_STYLES = {"live": "green", "released": "green", "forming": "cyan", "leftover": "yellow"}


@click.command()
@directory_option("Where the regions are.")
@json_option
@click.pass_context
def ls(context: click.Context, directory: str, as_json: bool) -> None:
    """List regions: size, memory, huge pages, state, and the processes that have them mapped.

    \b
    forming   a process is making it, or waits for the others of its cohort
    live      finished, and in use under its name
    released  in use, and its name is gone: nothing can be left behind
    leftover  nobody is inside; `aioshm gc` removes it
    foreign   something else under a region's name; never touched
    unknown   another user's, which this one may not open
    """  # noqa: D301 - click's mark for lines to be left as they are is a real backspace
    refuse_where_unsupported(context)
    try:
        listing = list_regions(directory)
    except OSError as error:
        fail(context, f"{directory} cannot be read: {error.strerror or error}.")
        return
    if as_json:
        click.echo(json.dumps(_as_json(listing), indent=2))
    else:
        _show(listing, Console(highlight=False))


def _as_json(listing: Listing) -> dict[str, Any]:
    facts = dataclasses.asdict(listing)
    for row in facts["rows"]:
        row["mapped_by"] = [{"pid": mapper["pid"], "command": mapper["command"]} for mapper in row["mapped_by"]]
    return {
        "directory": facts["directory"],
        "regions": facts["rows"],
        "unreadable_processes": facts["unreadable_processes"],
    }


def _show(listing: Listing, console: Console) -> None:
    if not listing.rows:
        say(console, f"No regions in {listing.directory}.")
    elif console.is_interactive:
        console.print(make_table(listing, console.width))
    else:
        console.width = _WIDEST  # where no window is narrow nothing is cut
        with console.capture() as captured:
            console.print(make_table(listing, None))
        for line in captured.get().splitlines():
            say(console, line.rstrip())
    for number, note in enumerate(_make_notes(listing)):
        say(console, note if number else f"\n{note}")


def make_table(listing: Listing, width: int | None) -> Table:
    """Return the table, a row per region with a line per process in the last column; None: as wide as it gets."""
    roomy = width is None or width >= 100
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1 if roomy else 0), expand=width is not None
    )
    names = [_name_in_words(row) for row in listing.rows]
    longest = max(map(len, ["region", *names]))
    table.add_column("region", overflow="fold", width=longest if width is None else min(longest, width // 3))
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("resident", justify="right", no_wrap=True)
    table.add_column("huge", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("mapped by", no_wrap=True, overflow="ellipsis", ratio=None if width is None else 1)
    for row in listing.rows:
        table.add_row(
            _name_in_words(row),
            in_words(row.size),
            "?" if row.resident is None else in_words(row.resident),
            "?" if row.huge_share is None else f"{row.huge_share:.0%}",
            Text(row.state, _STYLES.get(row.state, "red")),
            Text("\n".join(map(_mapper_in_words, row.mapped_by)) or _say_nobody(row)),
        )
    return table


def _name_in_words(row: Row) -> str:
    return row.name if row.user == os.geteuid() else f"{row.name} (uid {row.user})"


def _mapper_in_words(mapper: Mapper) -> str:
    program, _, arguments = mapper.command.partition(" ")
    return f"{mapper.pid} {os.path.basename(program)} {arguments}".rstrip()


def _say_nobody(row: Row) -> str:
    if row.reason is not None:
        return row.reason
    return "" if row.state == "leftover" else "nobody seen here"


def _make_notes(listing: Listing) -> list[str]:
    notes = []
    left = [row for row in listing.rows if row.state == "leftover" and row.user == os.geteuid()]
    if left:
        size = in_words(sum(row.resident or 0 for row in left))
        what, them = ("1 leftover takes", "it") if len(left) == 1 else (f"{len(left)} leftovers take", "them")
        notes.append(f"{what} {size}: `{sweep_command(listing.directory)}` removes {them}.")
    unread = listing.unreadable_processes
    if unread:
        what, them = ("1 process", "it has") if unread == 1 else (f"{unread} processes", "they have")
        notes.append(f"{what} may not be looked at by this user: what {them} mapped is not shown.")
    return notes
