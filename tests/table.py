"""The lock table seen from outside: wait until somebody holds a mark."""

from __future__ import annotations

import os
import time
from pathlib import Path

from aioshm._locks import Description, Range


def wait_held(path: Path, what: Range) -> None:
    """Return once somebody holds `what` on the file called `path`, which may have to come about first."""
    deadline = time.monotonic() + 30
    while not _is_held(path, what):
        assert time.monotonic() < deadline, f"nobody took {what}"
        os.sched_yield()


def _is_held(path: Path, what: Range) -> bool:
    try:
        description = Description(str(path), 0)
    except FileNotFoundError:
        return False
    try:
        return description.find_held(what) is not None
    finally:
        description.close()
