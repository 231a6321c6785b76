"""What a rank can be told beyond opening: to stop at a chosen call, to fork a child that does, to be a crowd."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import aioshm

_PACKAGE = str(Path(aioshm.__file__).parent)
_PR_SET_PDEATHSIG = 1

# What another process can see the effect of. A kill before one of these equals a kill anywhere since the last.
_VISIBLE_CALLS = {"open", "close", "fcntl", "ftruncate", "fchmod", "unlink"}
# Reading facts of the host is no business of others.
_READERS = ("_cgroup.py", "_host.py")
_VISIBLE_WRAPPERS = {"mmap", "munmap", "try_madvise", "fallocate"}


async def stop_at(where: str, nth: int = 1) -> dict[str, Any]:
    """Stop the whole process before the nth call of `where` (such as "os.ftruncate"), with a line on stdout first."""
    owner, _, attribute = where.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    real = getattr(owner, attribute)
    calls = itertools.count(1)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            print(json.dumps({"stopped": where}), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kwargs)

    setattr(owner, attribute, stopping)
    return {}


async def warm_up() -> dict[str, Any]:
    """Import what the first open would, so that a tracer sees the open alone."""
    async with aioshm.open_region(f"warm-up-{os.getpid()}", 1):
        return {}


async def put(where: str, value: float) -> dict[str, Any]:
    """Give a module's figure (such as "aioshm._pace._OF_QUOTA") another value."""
    owner, _, attribute = where.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    assert hasattr(owner, attribute)
    setattr(owner, attribute, value)
    return {}


async def pretend_nodes() -> dict[str, Any]:
    """Have aioshm believe in a second memory node; return how many there are."""
    from aioshm import _numa

    nodes = _numa.read_node_numbers()
    _numa.read_node_numbers = lambda: (0, 1)
    return {"nodes": len(nodes)}


async def hold(path: str, exclusive: list[list[int]], shared: list[list[int]]) -> dict[str, Any]:
    """Open `path` and lock ranges of it, given as [start, length], until this process ends."""
    from aioshm._locks import Description, Range

    description = Description(path, 0)
    _held.append(description)
    got = [description.try_exclusive(Range(*what)) for what in exclusive]
    return {"got": got + [description.try_shared(Range(*what)) for what in shared]}


_held: list[Any] = []


class Crowd:
    """Several opens of one region as tasks of one loop, taken step by step."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._regions: list[aioshm.Region] = []

    async def open(self, name: str, size: int, first: int, count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Open the region `count` times at once; the members write their marks, numbered from `first`."""

        async def enter(index: int) -> dict[str, Any]:
            region = await self._stack.enter_async_context(aioshm.open_region(name, size, **options))
            self._regions.append(region)
            clean = region.buffer[index] == 0
            region.buffer[index] = index + 1
            inode = os.fstat(region._tenancy.seat.description.fd).st_ino
            return {"created": region.created, "inode": inode, "clean": clean}

        return list(await asyncio.gather(*(enter(first + n) for n in range(count))))

    async def look(self, length: int) -> list[list[int]]:
        """Return the first `length` bytes as each member sees them."""
        return [list(region.buffer[:length]) for region in self._regions]

    async def close(self) -> None:
        """Leave, all at once."""
        regions, self._regions = self._regions, []
        await asyncio.gather(*(region.aclose() for region in regions))
        await self._stack.aclose()


_crowd = Crowd()


async def crowd(step: str, **arguments: Any) -> dict[str, Any]:
    """Take one step of this process's crowd."""
    return {"result": await getattr(_crowd, step)(**arguments)}


class _StopAtCall:
    """A profile function that stops the process before the nth visible call that aioshm makes, in whatever thread."""

    def __init__(self, point: int, stop: Callable[[str], None]) -> None:
        self._point = point
        self._stop = stop
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE) or code.co_filename.endswith(_READERS):
            return
        if event == "c_call" and argument.__name__ in _VISIBLE_CALLS:
            what = f"{argument.__name__} in {code.co_name}"
        elif event == "call" and code.co_name in _VISIBLE_WRAPPERS and code.co_filename.endswith("_libc.py"):
            what = code.co_name
        else:
            return
        with self._lock:
            self._count += 1
            here = self._count == self._point
        if here:
            self._stop(what)


_child = 0


async def fork(name: str, size: int, phase: str, point: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fork a child that enters the region and leaves it, and return once it has stopped before call number `point`.

    Args:
        phase: "enter" or "leave": where the calls are counted.
        point: Which call; beyond the last one the child stops "inside" or "outside".
    """
    global _child  # noqa: PLW0603 - `end_child` is another command
    reading, writing = os.pipe()
    _child = os.fork()
    if not _child:
        _be_child(writing, name, size, phase, point, options)
    os.close(writing)
    state = os.waitid(os.P_PID, _child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert state is not None
    with open(reading) as line:
        return {"at": line.readline().strip() if state.si_code == os.CLD_STOPPED else "died"}


async def end_child() -> dict[str, Any]:
    """Kill the forked child, and return when it is gone."""
    os.kill(_child, signal.SIGKILL)
    os.waitpid(_child, 0)
    return {}


def _be_child(report: int, *arguments: Any) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        asyncio.run(_live(report, *arguments))
    finally:
        os._exit(1)


async def _live(report: int, name: str, size: int, phase: str, point: int, options: dict[str, Any]) -> None:
    def stop(at: str) -> None:
        os.write(report, at.encode() + b"\n")
        os.kill(os.getpid(), signal.SIGSTOP)

    opening = aioshm.open_region(name, size, **options)
    if phase == "enter":
        with _StopAtCall(point, stop):
            await opening.__aenter__()
        stop("inside")
    else:
        region = await opening.__aenter__()
        region.buffer[:8] = b"from one"
        with _StopAtCall(point, stop):
            await region.aclose()
        stop("outside")
