"""Several processes open one region by its name: one creates it and writes, the others join it and read.

    python examples/many_processes.py --processes 8 --size 256

Which one creates it is settled by the race, and nobody tells anybody: each just opens the name. Within the region they
agree on what the bytes mean: first a board with one byte per process, then a digest, then the message.
Ends with status 1 if any process saw anything else than what was written, or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
from pathlib import Path

import aioshm

ABSENT, READER, WRITER = range(3)
DIGEST, MESSAGE = slice(1024, 1056), slice(4096, 1 << 20)


async def take_part(name: str, size: int, index: int, processes: int) -> bool:
    """Open the region, write or read, and say whether everything was right."""
    async with aioshm.open_region(name, size, allocation_name="example message") as region:
        with region.buffer as buffer:
            if region.created:
                message = os.urandom(MESSAGE.stop - MESSAGE.start)
                buffer[MESSAGE] = message
                buffer[DIGEST] = hashlib.sha256(message).digest()
            # Written last: whoever sees it on the board may read. And nobody leaves before all have come: a process
            # that opened the name after the last one left would create a region of its own.
            buffer[index] = WRITER if region.created else READER
            async with asyncio.timeout(60):  # one may have died
                while ABSENT in buffer[:processes]:  # noqa: ASYNC110 - no event reaches across processes
                    await asyncio.sleep(0.001)
            one_writer = bytes(buffer[:processes]).count(WRITER) == 1
            intact = hashlib.sha256(buffer[MESSAGE]).digest() == buffer[DIGEST]
        report = region.report
        print(
            f"process {index}: {report.role}, ready after {report.total_seconds * 1000:.0f} ms, "
            f"one writer: {one_writer}, message intact: {intact}\n",
            end="",  # the line and its end in one write, or the lines of several processes could mix
            flush=True,
        )
    return one_writer and intact


def run(name: str, size: int, index: int, processes: int) -> None:
    raise SystemExit(0 if asyncio.run(take_part(name, size, index, processes)) else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--processes", type=int, default=4, help="1 to 1024 (default: 4)")
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="MiB of memory (default: 64)")
    parser.add_argument("--name", default=f"many-processes-{os.getpid()}", help="the region's name")
    arguments = parser.parse_args()

    spawn = multiprocessing.get_context("spawn")  # independent programs, as under a launcher; nothing is inherited
    numbers = range(arguments.processes)
    crew = [
        spawn.Process(target=run, args=(arguments.name, arguments.size << 20, index, len(numbers))) for index in numbers
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
    right = sum(process.exitcode == 0 for process in crew)
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*-{arguments.name}")]
    print(f"{right} of {len(crew)} processes right, left behind: {left or 'nothing'}")
    return 0 if right == len(crew) and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
