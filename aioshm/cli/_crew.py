"""The rank processes of the demo, from the parent's side: started, told when to take the next step, always reaped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any, Literal

Step = Literal["start", "open", "write", "check", "close"]
Facts = dict[str, Any]

# Seconds that a rank gets to leave by itself, which takes it milliseconds; then it is killed.
_GRACE = 10.0

# An error comes with its traceback in one line.
_LONGEST_LINE = 1 << 20


class RankError(Exception):
    """A rank raised an error or died.

    Attributes:
        rank: Which.
        trace: Where the error came from, if it was not one that aioshm raises on purpose.
    """

    def __init__(self, rank: int, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.trace = trace


class Crew:
    """The ranks of one demo; leaving its `with` block ends and reaps every one of them, whatever happened.

    A rank is not a child of multiprocessing: its end of a pipe tells it when the parent is gone, however that went, and
    a process group of its own keeps a Ctrl-C at the terminal away from it, so that the parent ends it in order.
    """

    def __init__(self, on_news: Callable[[int, Step, Facts], None]) -> None:
        """Prepare; `on_news` is called with rank, step and facts for every line that a rank says."""
        self._on_news = on_news
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reap()

    def start(self, jobs: Sequence[Facts]) -> None:
        """Start one process for each of `jobs`."""
        for rank, job in enumerate(jobs):
            process = _start_process()
            self._ranks.append(_Rank(rank, process))
            self._ranks[-1].say(json.dumps({**job, "rank": rank}))

    async def take(self, step: Step) -> list[Facts]:
        """Let every rank take `step`, and return what each said of it once all are done: the barrier.

        Raises:
            RankError: A rank failed; the others are somewhere in the step.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(rank.take(step, self._on_news)) for rank in self._ranks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def hang_up(self) -> None:
        """Stop listening: to be called before the loop is closed."""
        for rank in self._ranks:
            rank.hang_up()

    def _reap(self) -> None:
        deadline = time.monotonic() + _GRACE
        try:
            for rank in self._ranks:
                rank.dismiss()
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C comes here at once
            for rank in self._ranks:
                rank.process.kill()
            for rank in self._ranks:
                rank.process.wait()


class _Rank:
    """One process and the lines it says."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self._lines: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None
        self._noise = ""

    def say(self, line: str) -> None:
        stdin = _open_end(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it is dead: the end of what it says tells
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    async def take(self, step: Step, on_news: Callable[[int, Step, Facts], None]) -> Facts:
        lines = await self._connected()
        if step != "start":
            self.say(step)
        while line := await lines.readline():
            if not line.startswith(b"{"):
                self._noise += line.decode(errors="replace")
                continue
            facts: Facts = json.loads(line)
            on_news(self.number, step, facts)
            if "error" in facts:
                message = facts["message"] if not facts["trace"] else f"{facts['error']}: {facts['message']}"
                raise RankError(self.number, message, facts["trace"])
            if "finished" in facts:
                return facts
        words = self._last_words(step)
        on_news(self.number, step, {"error": words})
        raise RankError(self.number, words, self._noise)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def dismiss(self) -> None:
        """Let it leave: the end of its stdin tells it to."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    async def _connected(self) -> asyncio.StreamReader:
        if self._lines is None:
            lines = self._lines = asyncio.StreamReader(limit=_LONGEST_LINE)
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(lines), _open_end(self.process.stdout)
            )
        return self._lines

    def _last_words(self, step: Step) -> str:
        try:
            status = self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return f"Rank {self.number} (pid {self.process.pid}) closed its output at step {step!r} without a word."
        end = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
        return f"Rank {self.number} (pid {self.process.pid}) {end} at step {step!r}."


def _start_process() -> subprocess.Popen[bytes]:
    """Start a rank on our own module path: what is imported there must be what is imported here."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from aioshm.cli._rank import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def _open_end(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the process was started without pipes")
    return pipe
