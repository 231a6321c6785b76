"""Faults of the kernel on demand: strace attached to a rank lets chosen system calls fail, or kills the rank at one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def traced(pid: int, inject: str, *, path: Path | None = None) -> Iterator[None]:
    """While in it, process `pid` meets the faults that `inject` names (strace(1), -e inject); skips where none may.

    Args:
        pid: A process that this one may trace: its own child.
        inject: Such as "madvise:error=EINVAL:when=3"; calls are counted from here on, for each thread by itself.
        path: Only calls about this file are counted and hit.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    about = ("-P", str(path)) if path is not None else ()
    tracer = subprocess.Popen(
        ["strace", "-f", "-o", "/dev/null", "-p", str(pid), *about, "-e", f"inject={inject}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert tracer.stderr is not None
        said = ""
        while "attached" not in said:
            line = tracer.stderr.readline()
            if not line:
                pytest.skip(f"strace cannot attach here: {said.strip()}")
            said += line
        yield
    finally:
        tracer.terminate()  # it lets go of the process; where that died, it has ended by itself
        tracer.communicate()
