"""`aioshm doctor`: one screen that says whether a region would fit here, what limits it, and what to change."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from dataclasses import asdict

import click
from rich.console import Console

from ._diagnosis import diagnose
from ._examination import Examination, examine
from ._options import directory_option, fail, json_option, refuse_where_unsupported
from ._sheet import show_sheet
from ._show import OutputClosedError, say, show_finding
from ._sizes import in_words, parse_size

_INTERRUPTED = 128 + signal.SIGINT


@click.command()
@click.option("--size", type=parse_size, metavar="SIZE", help="Bytes of the region, like 64GiB.")
@directory_option("Where it would be: a tmpfs or hugetlbfs mount.")
@json_option
@click.pass_context
def doctor(context: click.Context, size: int | None, directory: str, as_json: bool) -> None:
    """Say whether a region would fit here, what limits it, and what to change.

    To see whether the kernel gives huge pages, and how fast, a part of what is free is populated for a moment: a
    quarter and 1 GiB at the most. The exit status is 0 only if a region of that size (without --size: any) would fit.
    """
    refuse_where_unsupported(context)
    console = Console(highlight=False)
    try:
        with console.status("Trying ...") if console.is_interactive and not as_json else nullcontext():
            found = examine(size, directory)
        if as_json:
            click.echo(json.dumps(_to_dict(found), indent=2))
        else:
            show_doctor(console, found)
        status = 0 if found.report.fits else 1
    except OutputClosedError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is in the buffer must not fail once more at exit
        status = 1
    except OSError as error:
        fail(context, f"{directory} cannot be examined: {error.strerror or error}.")
        return
    except KeyboardInterrupt:
        say(Console(highlight=False, stderr=True), "Interrupted.", "yellow")
        status = _INTERRUPTED
    context.exit(status)


def show_doctor(console: Console, found: Examination) -> None:
    """Print the facts and the verdict."""
    where = found.report.directory.path
    say(console, f"aioshm doctor: {where if found.size is None else f'{in_words(found.size)} in {where}'}", "bold")
    say(console, "")
    show_sheet(console, found)
    say(console, "")
    for finding in diagnose(found):
        show_finding(console, finding)


def _to_dict(found: Examination) -> dict[str, object]:
    findings = [asdict(finding) for finding in diagnose(found)]
    return {**found.to_dict(), "fits": found.report.fits, "findings": findings}
