"""The other ways to have shared memory that is there, from Python: the same bytes, every page of them resident.

Each is timed from nothing to the last page, and in giving back. Ways that leave the pages to the first touch are
touched once per 4 KiB page, by a strided store of NumPy or torch. Packages that are missing are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from harness import (
    GIB,
    MADV_POPULATE_WRITE,
    MIB,
    Column,
    Figures,
    Outcome,
    parse_arguments,
    publish,
    region_name,
    take_turns,
    unnamed_file,
    version,
)

import aioshm

PAGE = mmap.PAGESIZE

Way = Callable[[int, str], AbstractContextManager[object]]  # within its block the memory is there


@contextlib.contextmanager
def madvise(size: int, directory: str) -> Iterator[None]:
    """One thread of 4 KiB pages, as vLLM populates its CPU cache."""
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size) as memory:
        memory.madvise(MADV_POPULATE_WRITE)
        yield


@contextlib.contextmanager
def map_populate(size: int, directory: str) -> Iterator[None]:
    with unnamed_file(size, directory) as fd, mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE):
        yield


@contextlib.contextmanager
def standard_library(size: int, directory: str) -> Iterator[None]:
    memory = shared_memory.SharedMemory(create=True, size=size)
    try:
        memory.unlink()  # at once, so that no death of ours leaves it
        touch_array(memory.buf)
        yield
    finally:
        memory.close()


@contextlib.contextmanager
def posix_ipc(size: int, directory: str) -> Iterator[None]:
    library: Any = importlib.import_module("posix_ipc")
    memory = library.SharedMemory(f"/{region_name('peers')}", library.O_CREX, size=size)
    memory.unlink()
    try:
        with mmap.mmap(memory.fd, size) as mapping:
            touch_array(mapping)
            yield
    finally:
        memory.close_fd()


@contextlib.contextmanager
def shared_array(size: int, directory: str) -> Iterator[None]:
    import numpy

    library: Any = importlib.import_module("SharedArray")
    name = f"shm://{region_name('peers')}"
    array = library.create(name, size, dtype=numpy.uint8)
    library.delete(name)
    array[::PAGE] = 0
    yield
    del array


@contextlib.contextmanager
def torch_from_file(size: int, directory: str) -> Iterator[None]:
    import torch

    path = Path(directory, region_name("peers"))
    try:
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    finally:
        path.unlink(missing_ok=True)
    touch_tensor(storage)
    yield
    del storage


@contextlib.contextmanager
def torch_share_memory(size: int, directory: str) -> Iterator[None]:
    """Copies what the storage holds, which nobody has written yet, and so touches every page of the copy."""
    import torch

    storage: Any = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
    storage.share_memory_()
    touch_tensor(storage)
    yield
    del storage


def touch_array(memory: Any) -> None:
    import numpy

    numpy.frombuffer(memory, dtype=numpy.uint8)[::PAGE] = 0


def touch_tensor(storage: Any) -> None:
    import torch

    torch.empty(0, dtype=torch.uint8).set_(storage)[::PAGE] = 0


WAYS: dict[str, tuple[str, Way]] = {
    "mmap.madvise, as vLLM": ("", madvise),
    "mmap with MAP_POPULATE": ("", map_populate),
    "multiprocessing.shared_memory, first touch": ("numpy", standard_library),
    "posix_ipc, first touch": ("posix_ipc", posix_ipc),
    "SharedArray, first touch": ("SharedArray", shared_array),
    "torch from_file(shared=True), first touch": ("torch", torch_from_file),
    "torch share_memory_(), first touch": ("torch", torch_share_memory),
}


def timed(way: Way, size: int, directory: str) -> Figures:
    started = time.perf_counter()
    with way(size, directory):
        ready = time.perf_counter()
    return {"rate": size / (ready - started), "ready": ready - started, "close": time.perf_counter() - ready}


def with_aioshm(size: int, directory: str, threads: int | None) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(region_name("peers"), size, directory=directory, threads=threads):
            ready = time.perf_counter()
        return {"rate": size / (ready - started), "ready": ready - started, "close": time.perf_counter() - ready}

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=1024, rounds=5)
    size, directory = arguments.mib * MIB, arguments.directory
    contenders: dict[str, Callable[[], Figures]] = {}
    versions: dict[str, str] = {}
    for name, (package, way) in WAYS.items():
        if package:
            versions[package] = version(package)
        try:
            importlib.import_module(package or "mmap")
        except ImportError as error:
            print(f"left out: {name}, for {error}\n")
            continue
        contenders[name] = lambda way=way: timed(way, size, directory)  # type: ignore[misc]
    contenders["aioshm, 1 thread"] = lambda: with_aioshm(size, directory, 1)
    contenders["aioshm, defaults"] = lambda: with_aioshm(size, directory, None)
    outcome = Outcome(
        "Peers",
        {"MiB": arguments.mib, "rounds": arguments.rounds, **versions},
        [Column("rate", "GiB/s", 1 / GIB), Column("ready", "ready, ms", 1e3, 0), Column("close", "close, ms", 1e3)],
        take_turns(contenders, arguments.rounds, prime=size),
    )
    for name in outcome.values:
        if not name.startswith("aioshm"):
            outcome.compare(f"rate, aioshm over {name}", "aioshm, defaults", name, "rate")
    outcome.traces = {name: outcome.median(name, "rate") / GIB for name in outcome.values}
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
