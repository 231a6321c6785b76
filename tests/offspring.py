"""Programs that start programs: whatever they leave behind becomes a child of this process, is told, and is reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run_example(program: str, *options: str, timeout: float = 150.0) -> tuple[int, str, list[str]]:
    """Run an example that starts other programs, in seconds at most.

    Returns:
        Its exit status, what it said on stdout and, after that, on stderr, and the command lines of what it had
        started and not ended. All of that is killed.
    """
    with _adopting() as before:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / program), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            # Not to the end of the pipes alone: what it leaves behind would hold them open.
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait(10)
            raise
        finally:
            left = _reap(before)
    return process.returncode, out + err, left


@contextlib.contextmanager
def _adopting() -> Iterator[set[int]]:
    """Make this process the parent of its descendants' orphans meanwhile; yields the children that it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield set(_children())
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _reap(before: set[int], grace: float = 10.0) -> list[str]:
    """Wait for the new children to end, `grace` seconds at most; kill those that do not, and return their commands."""
    left: dict[int, str] = {}
    deadline = time.monotonic() + grace
    while children := set(_children()) - before:
        for pid in children:
            if time.monotonic() > deadline and pid not in left:
                left[pid] = _command(pid)
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # ours, so its number is nobody else's before this
        time.sleep(0.02)  # until the kernel has ended them: nothing tells of many pids at once
    return sorted(left.values())


def _children() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # "pid (comm) state ppid": the command may have spaces and brackets in it.
                if int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    yield int(entry.name)


def _command(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "gone"
