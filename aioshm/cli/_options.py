"""What several commands have in common: options, and the sentences where they cannot begin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console

from aioshm._errors import UnsupportedPlatformError
from aioshm._libc import SUPPORTED
from aioshm._request import check_directory

from ._show import say

Command = TypeVar("Command", bound=Callable[..., Any])


def _parse_directory(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        return check_directory(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def directory_option(what: str) -> Callable[[Command], Command]:
    """Return the option `--directory`: an absolute path, /dev/shm where nobody says."""
    return click.option(
        "--directory",
        type=click.Path(),
        callback=_parse_directory,
        default="/dev/shm",
        show_default=True,
        help=what,
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def refuse_where_unsupported(context: click.Context) -> None:
    """End the command with a sentence where aioshm does not work."""
    if not SUPPORTED:
        fail(context, str(UnsupportedPlatformError(reason=sys.platform)))


def fail(context: click.Context, text: str) -> None:
    """End the command with a sentence on stderr, and status 1."""
    say(Console(highlight=False, stderr=True), text, "red")
    context.exit(1)
