"""The group of commands. Each command is a module of its own, and one line here."""

from __future__ import annotations

import click

from aioshm import __version__

from ._demo import demo
from ._doctor import doctor
from ._gc import gc
from ._ls import ls


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def group() -> None:
    """Host memory that many processes share, allocated without stopping the event loop."""


group.add_command(demo)
group.add_command(doctor)
group.add_command(gc)
group.add_command(ls)
