"""What a rank can be told about capacity: take memory, fill a cache, stop at a point of an open, show what it holds."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from memory_maps import bytes_by_node

import aioshm
from aioshm import _preflight
from aioshm._locks import Description
from aioshm._populate import Populate
from aioshm._rendezvous import Seat
from aioshm._tenancy import Tenancy
from aioshm._threads import StopFlag


@contextlib.contextmanager
def stopped_when_populated(pid: int | None) -> Iterator[None]:
    """Stop a process in the very thread that populates the last chunk: then it is no longer a matter of populating."""
    map_again = Populate._map_again

    def stop_and_map(populate: Populate, stop: StopFlag) -> None:
        if pid is not None and populate.done == populate.total:
            os.kill(pid, signal.SIGSTOP)
        map_again(populate, stop)

    Populate._map_again = stop_and_map  # type: ignore[method-assign]  # in this process only
    try:
        yield
    finally:
        Populate._map_again = map_again  # type: ignore[method-assign]  # as it was


class MemoryCommands:
    """A part of `rank_main.Commands`, which has `open` and the region."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.records: list[list[str]] = []

    async def warm_up(self) -> dict[str, Any]:
        """Open and close a region once, so that whatever is loaded at the first use is there."""
        async with aioshm.open_region(f"warm-up-{os.getpid()}", 4096):
            pass
        return {}

    async def become(self, user: int) -> dict[str, Any]:
        """Go on as another user. Not from the start: the interpreter may stand where only root may read."""
        await self.warm_up()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        return {"euid": os.geteuid()}

    async def try_open(
        self, name: str, size: int, options: dict[str, Any], then_stop: int | None = None
    ) -> dict[str, Any]:
        """Open; say what came of it, and how many seconds it took. Stop process `then_stop` when it is populated."""
        started = time.monotonic()
        try:
            with stopped_when_populated(then_stop):
                await self.open(name, size, options)  # type: ignore[attr-defined]  # Commands has it
        except Exception as error:  # noqa: BLE001 - for the test to judge
            seconds = time.monotonic() - started
            return {
                "outcome": type(error).__name__,
                "message": str(error),
                "facts": dict(vars(error)),
                "seconds": seconds,
            }
        return {"outcome": "open", "seconds": time.monotonic() - started}

    async def preflight(self, size: int, options: dict[str, Any]) -> dict[str, Any]:
        """Ask whether it would fit."""
        return {"report": (await aioshm.preflight(size, **options)).to_dict()}

    async def populate(self, offset: int, length: int) -> dict[str, Any]:
        """Populate a part of the region that is open."""
        await self.region.populate(offset, length)  # type: ignore[attr-defined]  # Commands has it
        return {}

    async def nodes(self) -> dict[str, Any]:
        """Which memory nodes the region's pages lie on."""
        return {"nodes": bytes_by_node(self.region)}  # type: ignore[attr-defined]  # Commands has it

    async def holdings(self) -> dict[str, Any]:
        """What this process has open, runs and maps, to be compared with what it had before."""
        with open("/proc/self/maps") as maps:
            mapped = [line.strip() for line in maps if "/aioshm-" in line]
        descriptors = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                descriptors.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:  # the one that lists
                continue
        threads = sorted(thread.name for thread in threading.enumerate())
        return {"mapped": mapped, "descriptors": sorted(descriptors), "threads": threads}

    async def stop_at(self, point: str, count: int = 1) -> dict[str, Any]:
        """Stop this process (SIGSTOP) once, when it gets to `point` (see `_POINTS`) for the `count`-th time."""
        # To this thread: a signal to the process may be taken by another one, while this one runs on.
        _act_at(point, count, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP))
        return {}

    async def fail_at(self, point: str, count: int = 1) -> dict[str, Any]:
        """Have an OSError raised once, likewise."""

        def fail() -> None:
            raise OSError(errno.EIO, "made by the test")

        _act_at(point, count, fail)
        return {}

    async def take(self, size: int) -> dict[str, Any]:
        """Take this much memory, page by page."""
        self.taken.append(b"\1" * size)
        return {}

    async def cache(self, path: str, size: int) -> dict[str, Any]:
        """Write a file and wait for the disk: its pages stay as cache that the kernel may drop."""
        with open(path, "wb") as file:
            file.writelines(b"\1" * (1 << 20) for _ in range(size >> 20))
            file.flush()
            os.fsync(file.fileno())
        return {}

    async def listen(self) -> dict[str, Any]:
        """From now on keep what aioshm logs."""
        records = self.records

        class Keeper(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                records.append([record.levelname, record.getMessage()])

        logger = logging.getLogger("aioshm")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(Keeper())
        return {}

    async def logged(self) -> dict[str, Any]:
        """What was logged since."""
        records, self.records[:] = list(self.records), []
        return {"records": records}


_POINTS: dict[str, tuple[Any, str]] = {
    "check": (_preflight, "check"),  # about to look whether it fits
    "checked": (_preflight, "check"),  # it does: the only point that is after the call
    "chunk": (Populate, "_take"),  # about to take the next chunk
    "admitted": (Populate, "_populate"),  # the guard let a chunk in, and nothing of it is touched
    "populated": (Populate, "_map_again"),  # all is populated, if there is but one thread, and perhaps not mapped
    "finish": (Seat, "finish"),  # all is populated, and nobody was let in
    "free": (Tenancy, "_release"),  # about to give memory back
    "close": (Description, "close"),  # of one that is open
}


def _act_at(point: str, count: int, act: Callable[[], None]) -> None:
    home, name = _POINTS[point]
    original = getattr(home, name)
    passes = iter(range(1, count + 1))
    lock = threading.Lock()

    def pass_by() -> None:
        with lock:
            now = next(passes, None) == count
        if now:
            act()

    def wrapper(*arguments: Any) -> Any:
        if point not in ("checked", "close") or (point == "close" and not arguments[0].closed):
            pass_by()
        result = original(*arguments)
        if point == "checked":
            pass_by()
        return result

    setattr(home, name, wrapper)
