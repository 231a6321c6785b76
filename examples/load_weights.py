"""Model weights are loaded once, from a safetensors file into the region; all ranks take zero-copy tensors from it.

    python examples/load_weights.py --ranks 4 model.safetensors

Without a file it makes a small one. The whole file goes into the region, header and all, so that only the creator
reads it. The header is read here, for safetensors' own `load` copies every tensor. After the file's bytes comes a board
on which the ranks tell each other what they see. Ends with status 1 if any of them saw other tensors than the
safetensors package does, if they did not share them, or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import aioshm

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SLOT = 33  # of a rank on the board: a digest, and how far the rank has come
ARRIVED, CHANGED = 1, 2


def take_tensors(region: aioshm.Region) -> dict[str, torch.Tensor]:
    """Return views of the tensors: 8 bytes that say how long the header is, the header as JSON, then the data."""
    with region.buffer as buffer:
        start = 8 + int.from_bytes(buffer[:8], "little")
        header = json.loads(bytes(buffer[8:start]))
    header.pop("__metadata__", None)
    return {
        name: region.tensor(entry["shape"], DTYPES[entry["dtype"]], offset=start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a digest of names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.digest()


async def reach(board: memoryview, rank: int, stage: int, ranks: range) -> None:
    """Say on the board that this rank has come to `stage`, and wait until all `ranks` have."""
    board[rank * SLOT + SLOT - 1] = stage
    async with asyncio.timeout(60):  # one may have died
        while any(board[other * SLOT + SLOT - 1] < stage for other in ranks):  # noqa: ASYNC110 - no event reaches across
            await asyncio.sleep(0.001)


async def use(region: aioshm.Region, rank: int, world: int, expected: bytes) -> bool:
    """Compare with what all others see, then change a tensor in one rank and see that it changes in all."""
    tensors = take_tensors(region)
    first = next(tensor for _, tensor in sorted(tensors.items()) if tensor.numel()).flatten().view(torch.uint8)
    before = first.clone()
    with region.buffer as buffer, buffer[region.size - world * SLOT :] as board:
        board[rank * SLOT : rank * SLOT + 32] = digest(tensors)
        await reach(board, rank, ARRIVED, range(world))
        identical = all(board[other * SLOT : other * SLOT + 32] == expected for other in range(world))
        if rank == world - 1:
            first.bitwise_not_()
        await reach(board, rank, CHANGED, range(world))
    shared = torch.equal(first, ~before)
    print(
        f"rank {rank}: {'created' if region.created else 'joined'}, {len(tensors)} tensors, "
        f"identical: {identical}, shared: {shared}\n",
        end="",  # the line and its end in one write, or the lines of several processes could mix
        flush=True,
    )
    return identical and shared


async def take_part(name: str, path: Path, size: int, rank: int, world: int, expected: bytes) -> bool:
    def show(progress: aioshm.Progress) -> None:
        print(f"rank {rank}: loaded {progress.done} of {progress.total} bytes of {path.name}\n", end="", flush=True)

    async with aioshm.open_region(
        name,
        size + world * SLOT,
        local_rank=rank,
        local_world_size=world,
        allocation_name="model weights",
        timeout=120.0,  # on a busy machine importing torch takes some ranks much longer than others
        initialize=aioshm.load_from(path, on_progress=show),  # awaited by one of them, while the others wait
    ) as region:
        # The tensors go when this returns, and so nothing keeps the memory when the region is closed.
        return await use(region, rank, world, expected)


def run(*arguments: object) -> None:
    raise SystemExit(0 if asyncio.run(take_part(*arguments)) else 1)  # type: ignore[arg-type]  # as `main` passes them


def make_weights(path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "embedding.weight": torch.randn(1000, 512),
        "layers.0.attention.weight": torch.randn(512, 1536).to(torch.bfloat16),
        "layers.0.attention.scale": torch.tensor(0.125, dtype=torch.float16),
        "layers.0.mlp.weight": torch.randint(-128, 128, (2048, 512), dtype=torch.int8),
        "layers.0.mlp.bias": torch.empty(0),
        "positions": torch.arange(4096),
    }
    save_file(tensors, path, metadata={"format": "pt"})


def share(path: Path, name: str, ranks: int) -> int:
    """Start the ranks on one file, and return how many of them were right."""
    expected = digest(load_file(path))
    spawn = multiprocessing.get_context("spawn")  # independent programs, as under a launcher; nothing is inherited
    crew = [
        spawn.Process(target=run, args=(name, path, path.stat().st_size, rank, ranks, expected))
        for rank in range(ranks)
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
    return sum(process.exitcode == 0 for process in crew)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", nargs="?", type=Path, help="a safetensors file (default: a small one is made)")
    parser.add_argument("--ranks", type=int, default=4, help="rank processes, 1 to 1024 (default: 4)")
    parser.add_argument("--name", default=f"load-weights-{os.getpid()}", help="the region's name")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        path = arguments.file or Path(directory, "small.safetensors")
        if arguments.file is None:
            make_weights(path)
        right = share(path, arguments.name, arguments.ranks)
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*-{arguments.name}")]
    print(f"{right} of {arguments.ranks} ranks right, left behind: {left or 'nothing'}")
    return 0 if right == arguments.ranks and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
