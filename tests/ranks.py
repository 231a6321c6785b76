"""Real processes that open regions: started by the test, told what to do line by line, always reaped.

A rank runs `rank_main.py`: it reads one JSON command per line from stdin and answers each with one JSON line on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAIN = Path(__file__).with_name("rank_main.py")


class RankError(AssertionError):
    """A rank answered with an error, or died instead of answering."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(json.dumps(answer))
        self.answer = answer


class Rank:
    """One process. `ask` waits for the answer; `send` and `answer` do the two halves."""

    def __init__(
        self,
        name: str,
        *,
        preexec: Callable[[], None] | None = None,
        wrapper: tuple[str, ...] = (),
        user: int | None = None,
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, str(_MAIN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            preexec_fn=preexec,  # noqa: PLW1509 - it writes one small file, and holds no lock
            user=user,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, do: str, **arguments: Any) -> None:
        """Tell it what to do; see `rank_main` for what there is."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = 30.0) -> dict[str, Any]:
        """Return its next line, whatever it says; RankError where it died instead, TimeoutError where it is silent."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError(f"rank {self.pid} said nothing for {timeout} s")
        line = self.process.stdout.readline()
        if not line:
            raise RankError({"died": self.process.wait(10)})
        result: dict[str, Any] = json.loads(line)
        return result

    def ask(self, do: str, timeout: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Send and return the answer; RankError where it is an error."""
        self.send(do, **arguments)
        answer = self.answer(timeout)
        if "error" in answer:
            raise RankError(answer)
        return answer

    def open(self, size: int, timeout: float = 30.0, **options: Any) -> dict[str, Any]:
        """Open the region and return its report as a dict, with `created`, `inode`, `seconds`."""
        return self.ask("open", timeout, name=self.name, size=size, options=options)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wait_stopped(self) -> None:
        """Wait until it has stopped, by a signal of its own or from outside; RankError where it died instead."""
        state = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if state is None or state.si_code != os.CLD_STOPPED:
            raise RankError({"died": self.process.wait(10)})
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # seen: the next wait is for the next stop

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Let it finish by closing its stdin, and return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(30)


class RankCrew:
    """Starts ranks for one test, and reaps them all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ranks: list[Rank] = []

    def start(self, name: str | None = None, **options: Any) -> Rank:
        """Start one rank for the test's region (or another `name`); options as Rank's."""
        rank = Rank(name or self._name, **options)
        self._ranks.append(rank)
        return rank

    def start_many(self, count: int, **options: Any) -> list[Rank]:
        """Start several, and return when all of them are up."""
        ranks = [self.start(**options) for _ in range(count)]
        for rank in ranks:
            rank.ask("hello")
        return ranks

    def reap(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()  # SIGKILL ends a stopped process too
            rank.process.wait(10)
            for pipe in (rank.process.stdin, rank.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what is in the buffer has nobody to read it
                        pipe.close()
