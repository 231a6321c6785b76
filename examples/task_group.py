"""A region is opened at start-up in a TaskGroup, beside other work, and outlives the group: an exit stack owns it.

    python examples/task_group.py           # all goes well: the service runs, then closes the region
    python examples/task_group.py --fail    # a sibling fails: the group cancels the open, and nothing is left

Ends with status 1 if it went otherwise, or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import aioshm


async def load(checkpoint: Path, populating: asyncio.Event) -> bytes:
    """The other start-up work. It ends, well or badly, while the region is being populated."""
    await populating.wait()
    return await asyncio.to_thread(checkpoint.read_bytes)


async def open_cache(arguments: argparse.Namespace, stack: AsyncExitStack, populating: asyncio.Event) -> aioshm.Region:
    def on_progress(progress: aioshm.Progress) -> None:
        populating.set()

    opening = aioshm.open_region(
        arguments.name,
        arguments.size << 20,
        allocation_name="CPU KV cache",
        huge_pages=arguments.huge_pages,
        threads=arguments.threads,
        on_progress=on_progress,
    )
    try:
        return await stack.enter_async_context(opening)
    except asyncio.CancelledError:
        # The cancellation waited: what was taken has been given back by now.
        print(f"start-up: the open was cancelled, left behind: {left_behind(arguments.name)}")
        raise


async def serve(arguments: argparse.Namespace) -> None:
    checkpoint = Path("/nonexistent/checkpoint") if arguments.fail else Path(__file__)
    populating = asyncio.Event()
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(open_cache(arguments, stack, populating))
            loading = group.create_task(load(checkpoint, populating))
        # The group is over, the region is not: it belongs to the stack.
        region, weights = opening.result(), loading.result()
        region.buffer[: len(weights)] = weights
        print(f"serving: {region!r} holds {len(weights)} bytes of the checkpoint")


def left_behind(name: str) -> str:
    return ", ".join(path.name for path in Path("/dev/shm").glob(f"aioshm-*-{name}")) or "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--fail", action="store_true", help="let the other start-up work fail")
    parser.add_argument("--size", type=int, default=512, metavar="MIB", help="MiB of memory (default: 512)")
    parser.add_argument("--name", default=f"task-group-{os.getpid()}", help="the region's name")
    parser.add_argument("--huge-pages", choices=("try", "require", "off"), default="try")
    parser.add_argument("--threads", type=int, help="populate threads (default: what the machine allows)")
    arguments = parser.parse_args()

    failed = False
    try:
        asyncio.run(serve(arguments))
    except* FileNotFoundError as group:  # anything else is not what this shows, and ends the program
        failed = True
        print(f"could not start: {group.exceptions[0]}")
    left = left_behind(arguments.name)
    print(f"at the end: left behind: {left}")
    return 0 if failed == arguments.fail and left == "nothing" else 1


if __name__ == "__main__":
    raise SystemExit(main())
