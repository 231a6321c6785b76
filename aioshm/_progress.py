"""Progress of one populate or load, told on the event loop a few times a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from ._log import log

_INTERVAL = 0.1  # seconds


@dataclass(frozen=True)
class Progress:
    """How far the populating of a region, or the loading of a file into it, has come.

    Attributes:
        done: Bytes that this process has populated or loaded so far.
        total: Bytes that it has to.
        elapsed: Seconds since it began.
    """

    done: int
    total: int
    elapsed: float

    @property
    def rate(self) -> float:
        """Bytes per second so far; 0.0 at the very start."""
        return self.done / self.elapsed if self.elapsed > 0 else 0.0


class Ticker:
    """Calls a progress callback every 0.1 s, and once more at the end; a context manager around the work.

    The callback runs on the loop, so it may touch what the loop's other code touches. One that raises is logged and not
    called again: a broken progress bar must not cost anybody a region.
    """

    def __init__(
        self, callback: Callable[[Progress], None] | None, done: Callable[[], int], total: int, *, what: str
    ) -> None:
        self._what = what
        self._callback = callback
        self._done = done
        self._total = total
        self._start = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Ticker:
        self._start = time.monotonic()
        if self._callback is not None:
            self._tick()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if kind is None:
            self._tell()

    def _tick(self) -> None:
        self._tell()
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._tick)

    def _tell(self) -> None:
        if self._callback is None:
            return
        progress = Progress(self._done(), self._total, time.monotonic() - self._start)
        try:
            self._callback(progress)
        except Exception:  # noqa: BLE001 - whatever the user's code raises
            log.exception("%s: on_progress raised and will not be called again", self._what)
            self._callback = None


Progress.__module__ = "aioshm"
