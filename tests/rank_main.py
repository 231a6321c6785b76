"""A rank process of the tests: one JSON command per line in, one JSON answer per line out. Ends at end of input.

Commands: hello, open, close, write, read, memory, exit. An error is answered, not died of.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import rank_hooks
from rank_memory import MemoryCommands

import aioshm
from aioshm import _locks


class Commands(MemoryCommands):
    """What a rank can be told. Each method is a command; its keywords are the command's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = AsyncExitStack()
        self.region: aioshm.Region | None = None
        self.stages: dict[str, Any] = {}

    async def hello(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    async def open(self, name: str, size: int, options: dict[str, Any]) -> dict[str, Any]:
        """Open the region and keep it open."""
        started = time.monotonic()
        region = await self.stack.enter_async_context(aioshm.open_region(name, size, **options))
        self.region = region
        status = os.fstat(region._tenancy.seat.description.fd)
        return {
            "created": region.created,
            "inode": status.st_ino,
            "seconds": time.monotonic() - started,
            "report": dataclasses.asdict(region.report),
        }

    async def close(self) -> dict[str, Any]:
        await self.stack.aclose()
        self.region = None
        return {}

    async def write(self, offset: int, text: str) -> dict[str, Any]:
        assert self.region is not None
        data = text.encode()
        self.region.buffer[offset : offset + len(data)] = data
        return {}

    async def read(self, offset: int, length: int) -> dict[str, Any]:
        assert self.region is not None
        return {"text": bytes(self.region.buffer[offset : offset + length]).decode("latin-1")}

    async def rounds(self, name: str, size: int, count: int, index: int, options: dict[str, Any]) -> dict[str, Any]:
        """Open, write a byte, look at it and close, `count` times as fast as it goes."""
        created = 0
        for _ in range(count):
            async with aioshm.open_region(name, size, **options) as region:
                created += region.created
                region.buffer[index] = index + 1
                await asyncio.sleep(0)
                assert region.buffer[index] == index + 1
        return {"created": created}

    async def cohort_rounds(self, name: str, size: int, count: int, rank: int, world: int) -> dict[str, Any]:
        """Be one rank of a cohort, `count` times; write our share's first byte, and see everyone else's."""
        rounds = []
        share = size // world
        for number in range(count):
            async with aioshm.open_region(name, size, local_rank=rank, local_world_size=world, timeout=60) as region:
                status = os.fstat(region._tenancy.seat.description.fd)
                named = os.path.exists(region.path) and os.path.samestat(os.stat(region.path), status)
                view = region.buffer
                view[rank * share] = 1 + (number + rank) % 255
                while (seen := [view[other * share] for other in range(world)]).count(0):  # noqa: ASYNC110 - other processes write
                    await asyncio.sleep(0)
                assert seen == [1 + (number + other) % 255 for other in range(world)]
                del view
            rounds.append({"created": region.created, "inode": status.st_ino, "named": named})
        return {"rounds": rounds}

    async def hook(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of `rank_hooks`."""
        answer: dict[str, Any] = await getattr(rank_hooks, call)(**arguments)
        return answer

    async def memory(self) -> dict[str, Any]:
        """What this process still has of any region."""
        with open("/proc/self/maps") as maps:
            mapped = [line.strip() for line in maps if "/aioshm-" in line]
        return {"mapped": mapped, "descriptions": len([d for d in _locks._open_descriptions if not d.closed])}


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    commands = Commands()
    async with commands.stack:
        while line := await reader.readline():
            command = json.loads(line)
            try:
                answer = await getattr(commands, command.pop("do"))(**command)
            except Exception as error:  # noqa: BLE001 - told to the test, whatever it is
                facts = {
                    key: value for key, value in vars(error).items() if isinstance(value, (str, int, float, type(None)))
                }
                answer = {"error": type(error).__name__, "message": str(error), "facts": facts}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if os.environ.get("AIOSHM_TEST_LOOP") == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    else:
        asyncio.run(main())
