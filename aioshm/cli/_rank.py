"""One process of the demo: it does what its parent says, step by step, while a heartbeat watches its event loop.

The first line of its stdin is its job, every further one the next step; each line of its stdout is a JSON object that
says how far it is. When stdin ends it leaves, wherever it stands: so a parent that was killed leaves nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import traceback
from typing import Any

from aioshm._errors import AioshmError
from aioshm._open import open_region

from ._heartbeat import Heartbeat
from ._shares import Pattern, find_wrong_byte, share_of, write_share

_INTERVAL = 0.05  # seconds


def main() -> None:
    """Serve until the parent has what it wants, or is gone."""
    logging.getLogger("aioshm").addHandler(_Warnings(logging.WARNING))
    with contextlib.suppress(asyncio.CancelledError):  # stdin ended
        asyncio.run(_main())


async def _main() -> None:
    orders = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    parent = _Parent(orders)
    try:
        await _serve(parent, **json.loads(await parent.next_order()))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        # The parent shows the message of an error that was raised on purpose, and of others where they came from.
        trace = "" if isinstance(error, AioshmError) else traceback.format_exc()
        _tell(error=type(error).__name__, message=str(error), trace=trace)
    finally:
        parent.close()
        pipe.close()


async def _serve(parent: _Parent, *, name: str, size: int, directory: str, rank: int, processes: int) -> None:
    shares = [share_of(other, processes, size) for other in range(processes)]
    patterns = [Pattern(other) for other in range(processes)]
    await parent.next_step(pid=os.getpid())
    async with (
        Heartbeat("opening") as heartbeat,
        open_region(
            name,
            size,
            directory=directory,
            allocation_name="the demo",
            hint="Choose less with --size, or another --directory.",
            on_progress=lambda progress: _tell(done=progress.done, total=progress.total),
        ) as region,
    ):
        inode = _mapped_inode(region.path)
        await parent.next_step(created=region.created, inode=inode, report=dataclasses.asdict(region.report))
        with region.buffer as view:
            heartbeat.during = "writing its share"
            await write_share(view, shares[rank], patterns[rank], _Meter(len(shares[rank])))
            await parent.next_step()
            heartbeat.during = "checking the others' shares"
            meter = _Meter(size - len(shares[rank]))
            wrong = {
                other: offset
                for other in range(processes)
                if other != rank
                and (offset := await find_wrong_byte(view, shares[other], patterns[other], meter)) is not None
            }
            await parent.next_step(wrong=wrong)
        heartbeat.during = "closing"
    held = heartbeat.longest_held
    await parent.next_step(
        stall=dataclasses.asdict(heartbeat.longest),
        held=None if held is None else dataclasses.asdict(held),
        beats=heartbeat.beats,
    )


class _Parent:
    """The other end of stdin and stdout. When it goes away, the task that made this is cancelled."""

    def __init__(self, orders: asyncio.StreamReader) -> None:
        self._orders: asyncio.Queue[bytes] = asyncio.Queue()
        task = asyncio.current_task()
        self._listener = asyncio.create_task(self._listen(orders, task)) if task else None

    async def next_step(self, **facts: Any) -> None:
        """Say that the step is done and what came of it, and wait for the word to go on."""
        _tell(finished=True, **facts)
        await self.next_order()

    async def next_order(self) -> bytes:
        return await self._orders.get()

    def close(self) -> None:
        if self._listener:
            self._listener.cancel()

    async def _listen(self, orders: asyncio.StreamReader, task: asyncio.Task[Any]) -> None:
        while line := await orders.readline():
            self._orders.put_nowait(line)
        task.cancel()


class _Meter:
    """Adds up what was done, and says so a few times a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._due = 0.0

    def __call__(self, length: int) -> None:
        self._done += length
        if (now := time.monotonic()) >= self._due or self._done == self._total:
            self._due = now + _INTERVAL
            _tell(done=self._done, total=self._total)


class _Warnings(logging.Handler):
    """What aioshm logs as a warning is for the one who watches the demo."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell(warning=record.getMessage())


def _tell(**facts: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more: stdin has ended too, and that ends us
        os.write(1, json.dumps(facts).encode() + b"\n")  # in one call: threads log too


def _mapped_inode(path: str) -> str | None:
    """Return device and inode of the file mapped here from `path`, whatever the name stands for now; None: none is."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if fields[5:] == [path]:
                return f"{fields[3]} {fields[4]}"
    return None
