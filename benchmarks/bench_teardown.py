"""Giving back: from the call that closes until the memory is free, and how long the loop stands still meanwhile.

`4 KiB` unmaps and closes a file without a name that `mmap.madvise` populated, in a thread as far as it can be.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time

from harness import (
    MADV_POPULATE_WRITE,
    MIB,
    Column,
    Figures,
    Heartbeat,
    Outcome,
    fitting,
    parse_arguments,
    publish,
    region_name,
    take_turns,
)

import aioshm


def small_pages(size: int, directory: str) -> Figures:
    async def main() -> Figures:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
            memory.madvise(MADV_POPULATE_WRITE)
        except BaseException:
            os.close(fd)
            raise

        def close() -> None:
            memory.close()
            os.close(fd)

        async with Heartbeat() as heart:
            started = time.perf_counter()
            await asyncio.to_thread(close)
            seconds = time.perf_counter() - started
        return {"close": seconds, "longest": heart.figures()["longest"]}

    return asyncio.run(main())


def with_aioshm(size: int, directory: str) -> Figures:
    async def main() -> Figures:
        async with (
            aioshm.open_region(region_name("teardown"), size, directory=directory) as region,
            Heartbeat() as heart,
        ):
            started = time.perf_counter()
            await region.aclose()
            seconds = time.perf_counter() - started
        return {"close": seconds, "longest": heart.figures()["longest"]}

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=2048, rounds=7)
    (mib,) = fitting([arguments.mib], arguments.directory) or [1024]
    size, directory = mib * MIB, arguments.directory
    outcome = Outcome(
        "Teardown",
        {"MiB": mib, "rounds": arguments.rounds},
        [Column("close", "close, ms", 1e3), Column("longest", "longest stall, ms", 1e3)],
        take_turns(
            {"4 KiB": lambda: small_pages(size, directory), "aioshm": lambda: with_aioshm(size, directory)},
            arguments.rounds,
            prime=size,
        ),
    )
    outcome.compare("close, 4 KiB over aioshm", "4 KiB", "aioshm", "close")
    outcome.compare("longest stall, 4 KiB over aioshm", "4 KiB", "aioshm", "longest")
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
