"""A sweeper of the tests: a process that removes a leftover, stopped before a chosen one of its calls.

    python sweeper.py PATH POINT

It prints what it is about to do and stops itself (SIGSTOP) before its POINTth call that others could notice, or before
its call of that name in `os`; at the end it prints what it removed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import rank_hooks
from ranks import RankError

from aioshm import _leftovers


class Sweeper:
    """One such process, in the hands of a test."""

    def __init__(self, path: Path, point: str) -> None:
        command = [sys.executable, __file__, str(path), point]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        state = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert self.process.stdout is not None
        assert state is not None
        self.at = self.process.stdout.readline().strip()
        self.stopped = state.si_code == os.CLD_STOPPED

    def end(self) -> str:
        """Let it go on, and return what it says of the removal."""
        self.process.send_signal(signal.SIGCONT)
        out, _ = self.process.communicate(timeout=30)
        if self.process.returncode:
            raise RankError({"died": self.process.returncode})
        return out.strip() or self.at

    def reap(self) -> None:
        """End it; twice is fine."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


def _stop(at: str) -> None:
    print(at, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop_at_name(name: str) -> None:
    real = getattr(os, name)

    def stopping(*arguments: Any) -> Any:
        _stop(name)
        return real(*arguments)

    setattr(os, name, stopping)


def main(path: str, point: str) -> None:
    rank_hooks._VISIBLE_CALLS.add("rename")
    if point.isdecimal():
        with rank_hooks._StopAtCall(int(point), _stop):
            removed = _leftovers.remove_leftover(path)
    else:
        _stop_at_name(point)
        removed = _leftovers.remove_leftover(path)
    print(removed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
