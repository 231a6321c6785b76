"""`aioshm demo`: the main job, to be seen. Processes race for one region, fill it, check each other, leave nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from aioshm._cgroup import cpu_quota
from aioshm._errors import UnsupportedPlatformError
from aioshm._host import usable_cpus
from aioshm._libc import SUPPORTED
from aioshm._request import check_directory

from ._crew import Crew, RankError
from ._show import OutputClosedError, View, make_table, make_view, say, show_finding, show_table
from ._sizes import find_default_size, in_words, parse_size
from ._verdict import Finding, Usage, judge_directory, judge_race, judge_shares, tell_stall

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


@click.command()
@click.option(
    "--size",
    type=parse_size,
    metavar="SIZE",
    help="Bytes of the region, like 2GiB.  [default: what fits, at most 1GiB]",
)
@click.option(
    "--processes",
    type=click.IntRange(2, 64),
    help="How many race for it.  [default: one per processor, 2 to 4]",
)
@click.option(
    "--directory",
    type=click.Path(),
    default="/dev/shm",
    show_default=True,
    help="A tmpfs or hugetlbfs mount to put it in.",
)
@click.pass_context
def demo(context: click.Context, size: int | None, processes: int | None, directory: str) -> None:
    """Let processes race for one region, fill it, check each other's bytes, and leave nothing.

    The exit status is 0 only if there was exactly one creator, everybody had the same inode mapped, every share
    was found as it was written, and nothing was left in the directory.
    """
    errors = Console(highlight=False, stderr=True)
    if not SUPPORTED:
        say(errors, str(UnsupportedPlatformError(reason=sys.platform)), "red")
        context.exit(1)
    try:
        directory = check_directory(directory)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="--directory") from None
    plan = Plan(
        size=size or find_default_size(directory),
        processes=processes or min(4, max(2, usable_cpus(cpu_quota()))),
        directory=directory,
    )
    try:
        status = _show(plan, Console(highlight=False), errors)
    except OutputClosedError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is in the buffer must not fail once more at exit
        status = 1
    context.exit(status)


@dataclass(frozen=True)
class Plan:
    """What one demo is to do. The name is its own: no other run can meet it."""

    size: int
    processes: int
    directory: str
    name: str = field(default_factory=lambda: f"demo-{os.getpid()}-{secrets.token_hex(4)}")

    def job(self) -> dict[str, Any]:
        """Return what a rank is told."""
        return {"name": self.name, "size": self.size, "directory": self.directory, "processes": self.processes}

    def find_left(self) -> list[str]:
        """Return the names of this demo in the directory."""
        try:
            return sorted(name for name in os.listdir(self.directory) if self.name in name)
        except OSError:
            return []

    def remove_left(self) -> None:
        """Remove them: only killed processes leave any, and all that could use them are gone."""
        for name in self.find_left():
            os.unlink(os.path.join(self.directory, name))

    def read_usage(self) -> int | None:
        """Return the bytes in use in the directory's file system; None where it does not say."""
        try:
            figures = os.statvfs(self.directory)
        except OSError:
            return None
        return (figures.f_blocks - figures.f_bfree) * figures.f_frsize if figures.f_blocks else None


@dataclass(frozen=True)
class Outcome:
    """What the ranks said at the end of each step, and the bytes in use while all of them had the region open."""

    opened: list[dict[str, Any]]
    checked: list[dict[str, Any]]
    closed: list[dict[str, Any]]
    used: int | None


def _show(plan: Plan, console: Console, errors: Console) -> int:
    """Run the demo, show it, and return the exit status."""
    say(
        console,
        f"aioshm demo: {plan.processes} processes race for one region of {in_words(plan.size)} in {plan.directory}",
        "bold",
    )
    before = plan.read_usage()
    outcome: Outcome | None = None
    status = 1
    try:
        with make_view(console, plan.processes) as view, Crew(view.news) as crew:
            outcome = asyncio.run(_race(plan, crew, view))
    except RankError as failure:
        if failure.trace:
            errors.print(failure.trace.rstrip(), markup=False, style="dim")
        say(errors, str(failure), "red")
    except KeyboardInterrupt:
        say(errors, "Interrupted.", "yellow")
        status = _INTERRUPTED
    except asyncio.CancelledError:
        say(errors, "Terminated.", "yellow")
        status = _TERMINATED
    usage = Usage(before, outcome.used if outcome else None, plan.read_usage(), plan.find_left())
    plan.remove_left()
    findings: list[Finding] = []
    if outcome is not None:
        show_table(console, make_table(outcome.opened, outcome.closed, console.width))
        findings = [judge_race(outcome.opened), judge_shares(outcome.checked, plan.size)]
        findings.append(tell_stall(outcome.closed))
    findings.append(judge_directory(plan.directory, usage))
    for finding in findings:
        show_finding(console, finding)
    return 0 if outcome is not None and all(finding.held is not False for finding in findings) else status


async def _race(plan: Plan, crew: Crew, view: View) -> Outcome:
    """Lead the ranks through the demo; all of them are done with a step before the next one begins."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        crew.start([plan.job()] * plan.processes)
        await crew.take("start")
        view.begin("open")
        opened = await crew.take("open")
        used = plan.read_usage()
        view.begin("write")
        await crew.take("write")
        view.begin("check")
        checked = await crew.take("check")
        view.begin("close")
        closed = await crew.take("close")
    finally:
        crew.hang_up()
        loop.remove_signal_handler(signal.SIGTERM)
    return Outcome(opened, checked, closed, used)
