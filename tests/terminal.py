"""A command on a terminal of a given size, and in an environment that leaves its looks to the kind of its output."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path


def environment(place: Path | None = None, **more: str) -> dict[str, str]:
    """Return an environment in which nothing but the kind of the output decides how it looks; `place` is importable."""
    looks = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {key: value for key, value in os.environ.items() if key not in looks}
    if place is not None:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(place), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONIOENCODING": "utf-8", **more}


def draw(command: Sequence[str], *, columns: int, rows: int = 30) -> tuple[int, str]:
    """Run `command` on a terminal, and return its exit status and all that it drew, control sequences included."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (rows, columns))
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment(TERM="xterm-256color"))
    os.close(its)
    pieces = []
    try:
        while piece := os.read(ours, 1 << 16):
            pieces.append(piece)
    except OSError:  # EIO: the other end is closed
        pass
    finally:
        os.close(ours)
    return process.wait(60), b"".join(pieces).decode()


def without_controls(drawn: str) -> str:
    """Return what was drawn without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
