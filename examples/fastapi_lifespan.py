"""A FastAPI server whose health endpoint answers while its region is being populated, and that leaves nothing behind.

    python examples/fastapi_lifespan.py --size 4096
    curl http://127.0.0.1:8000/health

The lifespan starts a task that owns the region for as long as the server lives, and does not wait for it: uvicorn opens
its port at once. Ending that task, at shutdown, cancels the open where it is still running and closes the region where
it is not. `probe_latency.py` measures such a server from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request

import aioshm

BLOCK = 1 << 16
log = logging.getLogger("example")
router = APIRouter()


class KvCache:
    """The region, from the first page to the last request, and what there is to say of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.state = "starting"
        self.percent = 0.0
        self.error: str | None = None
        self.region: aioshm.Region | None = None

    async def hold(self) -> None:
        """Open the region and keep it until cancelled."""
        try:
            async with aioshm.open_region(
                self.options.name,
                self.options.size << 20,
                allocation_name="CPU KV cache",
                hint="Lower --size.",
                huge_pages=self.options.huge_pages,
                threads=self.options.threads,
                on_progress=self.note,
            ) as self.region:
                self.state = "ready"
                await asyncio.Event().wait()
        except Exception as error:  # whatever it is: /health must not say "starting" for ever
            self.state, self.error = "failed", str(error)
            log.exception("no cache")

    def note(self, progress: aioshm.Progress) -> None:
        self.percent = 100 * progress.done / progress.total


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    kv: KvCache = app.state.kv
    holding = asyncio.create_task(kv.hold())
    try:
        yield  # the server answers from here on
    finally:
        holding.cancel()
        await asyncio.wait([holding])  # returns when the memory is given back
        log.info("shut down, was %s", kv.state)


@router.get("/health")
async def health(request: Request) -> dict[str, str | float]:
    """The liveness probe: slow is not dead, so only what failed is an error."""
    kv: KvCache = request.app.state.kv
    if kv.error is not None:
        raise HTTPException(503, kv.error)
    return {"state": kv.state, "percent": round(kv.percent, 1)}


@router.get("/blocks/{index}")
async def block(request: Request, index: int) -> dict[str, int]:
    """Any other endpoint: it needs the region, and says so until that is there."""
    kv: KvCache = request.app.state.kv
    if kv.region is None:
        raise HTTPException(503, f"the cache is {kv.state}")
    if not 0 <= index < kv.region.size // BLOCK:
        raise HTTPException(404, "no such block")
    return {"crc32": zlib.crc32(kv.region.buffer[index * BLOCK :][:BLOCK])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="MiB of memory (default: 1024)")
    parser.add_argument("--name", default="fastapi-example", help="the region's name")
    parser.add_argument("--huge-pages", choices=("try", "require", "off"), default="try")
    parser.add_argument("--threads", type=int, help="populate threads (default: what the machine allows)")
    options = parser.parse_args()

    logging.basicConfig(level=logging.INFO)
    app = FastAPI(lifespan=lifespan)
    app.include_router(router)
    app.state.kv = KvCache(options)
    uvicorn.run(app, host="127.0.0.1", port=options.port, access_log=False)


if __name__ == "__main__":
    main()
