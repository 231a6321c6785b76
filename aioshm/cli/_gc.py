"""`aioshm gc`: removes what dead processes left in a directory, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

import click
from rich.console import Console

from aioshm._leftovers import Found, find_regions, remove_leftover

from ._options import directory_option, fail, json_option, refuse_where_unsupported
from ._processes import File, take_census
from ._show import say
from ._sizes import in_words


@dataclass(frozen=True)
class Outcome:
    """What became of one leftover.

    Attributes:
        name: The region's name.
        path: Its file.
        bytes: What it took.
        outcome: `"removed"`, `"would remove"` (a dry run), `"in use"` (again: it was left alone), `"failed"`, or
            `"another user's"` (left alone).
        reason: Why it failed; else None.
        mapped_by: The processes that have it mapped all the same, though they left the region: its memory is freed
            when they let go of it.
    """

    name: str
    path: str
    bytes: int
    outcome: Literal["removed", "would remove", "in use", "failed", "another user's"]
    reason: str | None = None
    mapped_by: tuple[int, ...] = ()


@click.command()
@directory_option("Where to look.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@click.pass_context
def gc(context: click.Context, directory: str, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers: regions of this user that nobody is inside of, because all who were died.

    Regions in use, those of other users and other files are never touched, and processes that open regions meanwhile
    are not disturbed. The exit status is 1 if a leftover could not be removed.
    """
    refuse_where_unsupported(context)
    try:
        left = [region for region in find_regions(directory) if region.state == "leftover"]
    except OSError as error:
        fail(context, f"{directory} cannot be read: {error.strerror or error}.")
        return
    console = Console(highlight=False)
    # Before anything is removed, for then the names are gone.
    mappers = take_census().mappers if left else {}
    outcomes = []
    for region in left:
        outcome = _sweep(region, dry_run=dry_run)
        still = mappers.get(File(region.device, region.inode), [])
        outcomes.append(dataclasses.replace(outcome, mapped_by=tuple(mapper.pid for mapper in still)))
        if not as_json:
            say(console, _in_words(outcomes[-1]), "red" if outcome.outcome == "failed" else "")
    freed = sum(each.bytes for each in outcomes if each.outcome == "removed" and not each.mapped_by)
    if as_json:
        leftovers = [dataclasses.asdict(each) for each in outcomes]
        click.echo(
            json.dumps({"directory": directory, "dry_run": dry_run, "freed": freed, "leftovers": leftovers}, indent=2)
        )
    else:
        say(console, _sum_up(directory, outcomes, freed))
    context.exit(1 if any(each.outcome == "failed" for each in outcomes) else 0)


def _sweep(region: Found, *, dry_run: bool) -> Outcome:
    outcome = Outcome(region.name, region.path, region.resident, "would remove")
    if not region.ours:
        return dataclasses.replace(outcome, outcome="another user's", reason=f"it belongs to uid {region.user}")
    if dry_run:
        return outcome
    try:
        freed = remove_leftover(region.path)
    except OSError as error:
        return dataclasses.replace(outcome, outcome="failed", reason=(error.strerror or str(error)).lower())
    if freed is None:
        return dataclasses.replace(outcome, outcome="in use")
    return dataclasses.replace(outcome, outcome="removed", bytes=freed)


def _in_words(outcome: Outcome) -> str:
    size = in_words(outcome.bytes)
    if outcome.outcome in ("removed", "would remove"):
        text = f"{'Removed' if outcome.outcome == 'removed' else 'Would remove'} {outcome.path}: {size}"
        if outcome.mapped_by:
            text += f", freed when it is no longer mapped by pid {', '.join(map(str, outcome.mapped_by))}"
        return f"{text}."
    return {
        "in use": f"Left {outcome.path}: it is in use again, or gone.",
        "failed": f"Could not remove {outcome.path} ({size}): {outcome.reason}.",
        "another user's": f"Left {outcome.path} ({size}): {outcome.reason}, who can remove it.",
    }[outcome.outcome]


def _sum_up(directory: str, outcomes: list[Outcome], freed: int) -> str:
    would = [each for each in outcomes if each.outcome == "would remove"]
    if would:
        size = in_words(sum(each.bytes for each in would if not each.mapped_by))
        return f"Would free {size} by removing {_count(len(would))}."
    removed = sum(each.outcome == "removed" for each in outcomes)
    if removed:
        return f"{_count(removed)} removed, {in_words(freed)} freed."
    return f"Nothing to remove in {directory}." if not outcomes else "Nothing removed."


def _count(number: int) -> str:
    return f"{number} leftover{'s' if number != 1 else ''}"
