"""The region that vLLM's KV offload workers and scheduler share, with the interface they use, on top of aioshm.

    python examples/shared_offload_region.py --workers 2 --chunks 512 --layers 4

Run so, this process is the scheduler and starts the workers; each fills its slot layer by layer, and the scheduler
reads all of it through one memoryview. Needs torch. Ends with status 1 if a byte is not what it should be, or if
anything is left.

    worker 0, chunk 0 | worker 1, chunk 0 | … | padding      row 0: kv_bytes_per_chunk
    worker 0, chunk 1 | worker 1, chunk 1 | … | padding      row 1

No barrier is passed: the ranks are a cohort. Entering returns when all of them have mapped the region and all of it is
populated, with the name gone already; if one cannot come or dies before, all the others get the error.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import aioshm

if TYPE_CHECKING:
    import torch

Slots = Literal["direct", "canonical", "replicated"]


class SharedOffloadRegion:
    """One rank's part of a region of `num_chunks` rows, each with one slot per worker.

    Enter it with `async with` where a loop runs. Where none does (a worker that is set up by a plain constructor, in a
    process or a thread of its own) call `open` instead, and `cleanup` at the end. Views that somebody still holds then
    stay valid; their memory goes with the last of them.

    Args:
        engine_id: What the ranks of one engine replica have in common, and no other replica has.
        num_chunks: Rows.
        rank: This worker's slot, from 0; None in the scheduler, which has none.
        kv_bytes_per_chunk: Bytes from one row to the next; what the slots do not need of them is padding.
        cpu_page_size: Bytes of one slot.
        num_workers: How many workers there are on this host. A row's bytes do not tell: they are padded.
        scheduler: Whether a scheduler maps the region too. It is one of those that are waited for: a stranger that came
            later would find no name.
        slots: What `get_view` cuts up. `"direct"`: this worker's slot. `"canonical"`: the whole row, in the same pieces
            for all workers. `"replicated"`: the only slot there is, which all workers have in common.
        timeout: Seconds for all ranks to come.
    """

    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        *,
        num_workers: int,
        scheduler: bool = False,
        slots: Slots = "direct",
        timeout: float | None = 30.0,
    ) -> None:
        if rank is None and not scheduler:
            raise ValueError("rank None is the scheduler's: say scheduler=True, in every rank")
        if rank is not None and not 0 <= rank < num_workers:
            raise ValueError(f"rank must be 0 to {num_workers - 1} or None, not {rank}")
        if slots not in {"direct", "canonical", "replicated"}:
            raise ValueError(f"slots must be 'direct', 'canonical' or 'replicated', not {slots!r}")
        self.layout = aioshm.BlockLayout(
            num_chunks,
            cpu_page_size,
            local_world_size=1 if slots == "replicated" else num_workers,
            order="row-interleaved",
            alignment=kv_bytes_per_chunk,
        )
        if self.layout.row_bytes != kv_bytes_per_chunk:
            needed = sum(self.layout.bytes_per_block)
            raise ValueError(f"slots take {needed} bytes of each row, and kv_bytes_per_chunk is {kv_bytes_per_chunk}")
        self.num_chunks = num_chunks
        self.rank = rank
        self.total_size_bytes = self.layout.size
        self._slots = slots
        self._opening = aioshm.open_region(
            f"offload-{engine_id}",
            self.layout.size,
            local_rank=num_workers if rank is None else rank,  # the scheduler is the last of them
            local_world_size=num_workers + scheduler,
            allocation_name="CPU KV offload region",
            hint="Fewer or smaller chunks take less.",
            timeout=timeout,
        )
        self._region: aioshm.Region | None = None
        self._stack = AsyncExitStack()
        self._runner: asyncio.Runner | None = None
        self._cursor: aioshm.BlockCursor | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            region = await stack.enter_async_context(self._opening)
            if self._slots == "canonical":
                self._cursor = self.layout.canonical_cursor(region)
            elif self.rank is not None:
                self._cursor = self.layout.cursor(region, 0 if self._slots == "replicated" else self.rank)
            self._region = region
            stack.callback(self._forget)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def open(self) -> Self:
        """Enter without `async with`, for callers that have no running loop; blocks until the region is ready.

        The loop that it takes is its own, and in the main thread Ctrl-C cancels the wait. In a program that has a loop,
        `await asyncio.to_thread(make_worker)` keeps that one free.
        """
        runner = asyncio.Runner()
        try:
            runner.run(self.__aenter__())
        except BaseException:
            runner.close()
            raise
        self._runner = runner
        return self

    def cleanup(self) -> None:
        """Leave what `open` entered; twice is fine."""
        runner, self._runner = self._runner, None
        if runner is None:
            if self._region is not None:
                raise RuntimeError("this region was entered with `async with`, and closes at the end of the block")
            return
        with runner:
            runner.run(self._stack.aclose())

    @property
    def base_tensor(self) -> torch.Tensor:
        """The whole region, `(total_size_bytes,)` of int8."""
        import torch

        return self._entered().tensor(dtype=torch.int8)

    def get_view(self, tensor_page_size: int) -> torch.Tensor:
        """Return the next `tensor_page_size` bytes of each slot, or row, as `(num_chunks, tensor_page_size)` of int8.

        One call per tensor of the KV cache, in the same order in every worker. From one chunk to the next are
        `kv_bytes_per_chunk`. ValueError where the slot has not so much left: then nothing was dealt out.
        """
        import torch

        self._entered()
        if self._cursor is None:
            raise RuntimeError("the scheduler has no slot")
        return self._cursor.next_view(tensor_page_size, torch.int8)

    def get_memoryview(self) -> memoryview:
        """Return everything, `(num_chunks, kv_bytes_per_chunk)` of unsigned bytes, for the tiers below host memory."""
        return self.layout.rows(self._entered())

    def _entered(self) -> aioshm.Region:
        if self._region is None:
            raise RuntimeError("the offload region is not open")
        return self._region

    def _forget(self) -> None:
        self._region = self._cursor = None


def value(rank: int, layer: int, chunk: int) -> int:
    return (rank * 31 + layer * 7 + chunk) % 127 + 1


def facts(arguments: argparse.Namespace, rank: int | None) -> SharedOffloadRegion:
    slot = arguments.layers * arguments.page
    row = -(-arguments.workers * slot // mmap.PAGESIZE) * mmap.PAGESIZE
    return SharedOffloadRegion(
        arguments.name,
        arguments.chunks,
        rank,
        row,
        slot,
        num_workers=arguments.workers,
        scheduler=True,
        timeout=90.0,  # on a busy machine many processes that import torch at once take their time
    )


def work(arguments: argparse.Namespace) -> int:
    """Be a worker: no loop, a plain constructor, a loop over the layers. Done when stdin ends."""
    import torch

    region = facts(arguments, arguments.rank).open()
    try:
        for layer in range(arguments.layers):
            view = region.get_view(arguments.page)
            chunks = [value(arguments.rank, layer, chunk) for chunk in range(region.num_chunks)]
            view.copy_(torch.tensor(chunks, dtype=torch.int8)[:, None].expand_as(view))
            del view
        print("filled", flush=True)
        sys.stdin.read()
    finally:
        region.cleanup()
    return 0


def count_right(arguments: argparse.Namespace, region: SharedOffloadRegion) -> int:
    """Count the layers' pages in which every byte is what its worker wrote; the view goes when this returns."""
    row, slot = region.layout.row_bytes, arguments.layers * arguments.page
    flat = region.get_memoryview().cast("B")  # a memoryview of two dimensions cannot be sliced
    right = 0
    for chunk in range(arguments.chunks):
        for rank in range(arguments.workers):
            for layer in range(arguments.layers):
                start = chunk * row + rank * slot + layer * arguments.page
                page = flat[start : start + arguments.page]
                right += page == bytes([value(rank, layer, chunk)]) * arguments.page
    return right


async def schedule(arguments: argparse.Namespace) -> bool:
    """Be the scheduler: start the workers, meet them in the cohort, read what they wrote."""
    workers: list[asyncio.subprocess.Process] = []
    options = [f"--{name}={getattr(arguments, name)}" for name in ("workers", "chunks", "layers", "page", "name")]
    try:
        for rank in range(arguments.workers):
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, __file__, f"--rank={rank}", *options)
            workers.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        async with facts(arguments, None) as region:
            for worker in workers:
                if worker.stdout is None or await worker.stdout.readline() != b"filled\n":
                    return False
            pages = arguments.chunks * arguments.workers * arguments.layers
            right = count_right(arguments, region)
            print(f"{region.total_size_bytes} bytes, {arguments.chunks} chunks: {right} of {pages} pages right")
        for worker in workers:
            await worker.communicate(b"")  # closes its stdin: now it may go
        ends = [worker.returncode for worker in workers]
        print(f"workers ended with {ends}")
        return right == pages and not any(ends)
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--chunks", type=int, default=512, help="rows (default: 512)")
    parser.add_argument("--layers", type=int, default=4, help="views per worker (default: 4)")
    parser.add_argument("--page", type=int, default=3000, metavar="BYTES", help="per layer and chunk (default: 3000)")
    parser.add_argument("--name", default=f"example-{os.getpid()}", help="the engine's id")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.rank is not None:
        return work(arguments)
    right = asyncio.run(schedule(arguments))
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*-offload-{arguments.name}")]
    print(f"left behind: {left or 'nothing'}")
    return 0 if right and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
