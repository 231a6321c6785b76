"""One process opens a region, uses it through views, reads what was obtained, and leaves nothing behind.

    python examples/one_process.py --size 64

Ends with status 1 if the region or its memory was not what it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
from pathlib import Path

import aioshm


def use(region: aioshm.Region) -> bool:
    """Write and read; the views go when this returns, and so nothing keeps the memory when the region is closed."""
    buffer = region.buffer
    buffer[:5] = b"hello"
    print(f"buffer: {len(buffer)} bytes, starting with {bytes(buffer[:8])!r}")
    right = bytes(buffer[:8]) == b"hello\0\0\0" and len(buffer) == region.size
    if importlib.util.find_spec("numpy") is None:
        print("array: needs NumPy, pip install 'aioshm[numpy]'")
        return right
    letters = region.array(5)  # of bytes, by default
    letters[:] -= 32
    print(f"array: shape {letters.shape}, the same memory: {bytes(buffer[:5])!r}")
    return right and bytes(buffer[:5]) == b"HELLO"


async def show(name: str, size: int) -> bool:
    async with aioshm.open_region(name, size, allocation_name="example buffer") as region:
        print(f"open: {region!r} at {region.path}")
        right = use(region)
        report = region.report
        huge = "an unknown share" if report.huge_share is None else f"{report.huge_share:.0%}"
        print(f"report: {report.role}, {report.populated >> 20} MiB populated in {report.populate_seconds:.3f} s")
        print(f"report: {report.rate / (1 << 30):.1f} GiB/s in {report.threads} threads, {huge} in huge pages")
        right = right and report.role == "creator" and report.populated >= region.size
    print(f"closed: {region.closed}")
    return right and region.closed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="MiB of memory (default: 64)")
    parser.add_argument("--name", default=f"one-process-{os.getpid()}", help="the region's name")
    arguments = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="log: %(message)s")
    right = asyncio.run(show(arguments.name, arguments.size << 20))
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*-{arguments.name}")]
    print(f"left behind: {left or 'nothing'}")
    return 0 if right and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
