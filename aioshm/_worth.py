"""Decides whether huge pages are worth their time: where memory is fragmented, each may take a compaction.

A slow page alone says nothing: a virtual machine's fresh memory is slow in either size. So both sizes are tried in
turns, and their medians are compared; of processor time, for compaction is work, and on a busy machine anything waits.
Huge ones may be slower, for they pay later as well: whoever joins maps them a hundred times faster, and they are given
back seventy times faster.
"""

from __future__ import annotations

import statistics
import threading
from typing import Literal

from ._host import read_stalls
from ._libc import HUGE_PAGE

Way = Literal["huge", "small"]

# Seconds of processor time for a huge page, and how many chunks in a row that are slower call for a trial.
_SLOW = 0.004
_SLOW_IN_A_ROW = 3
# How many chunks of either size a trial takes: five of them would have to be held up by something else.
_SAMPLES = 9
_TOO_SLOW = 3.0


class Worth:
    """What the chunks that were populated tell about either size of page; shared by threads.

    Attributes:
        verdict: Why huge pages are not worth it, in words; None for as long as they are.
    """

    def __init__(self) -> None:
        self.verdict: str | None = None
        self._limit = _SLOW
        self._slow = 0
        self._samples: dict[Way, list[float]] | None = None
        self._stalls: int | None = None
        self._chosen = 0
        self._lock = threading.Lock()

    def choose(self) -> Way:
        """Return how the next chunk is to be populated: small only for a trial, or when the verdict is that."""
        if self.verdict is not None:
            return "small"
        if self._samples is None:
            return "huge"
        with self._lock:
            self._chosen += 1
            return "small" if self._chosen % 2 else "huge"

    def note(self, way: Way, length: int, seconds: float) -> None:
        """Note how many seconds of processor time a chunk of `length` bytes took."""
        per_page = seconds * HUGE_PAGE / length
        with self._lock:
            if self._samples is not None:
                self._samples[way].append(per_page)
                if min(map(len, self._samples.values())) >= _SAMPLES:
                    self._judge(self._samples)
            elif way == "huge":
                self._note_huge(per_page)

    def _note_huge(self, seconds: float) -> None:
        """Note a huge page outside a trial, and begin one where several in a row were slow, and the kernel held up."""
        self._slow = self._slow + 1 if seconds > self._limit else 0
        if self._slow == 1:
            self._has_stalled(0)
        elif self._slow >= _SLOW_IN_A_ROW:
            self._slow = 0
            if self._has_stalled(1):
                self._samples = {"huge": [], "small": []}

    def _judge(self, samples: dict[Way, list[float]]) -> None:
        huge, small = (statistics.median(samples[way]) for way in ("huge", "small"))
        if huge > _TOO_SLOW * small and self._has_stalled(_SAMPLES // 2):
            self.verdict = (
                f"huge pages took {huge / small:.1f} times as long as small ones: memory is fragmented "
                f"({huge * 1e3:.1f} ms for 2 MiB against {small * 1e3:.1f} ms, medians of {_SAMPLES} samples)"
            )
        # What is slow is known better now; and who is tried in vain is tried a few times more, not for ever.
        self._limit = max(2 * self._limit, _TOO_SLOW * small)
        self._samples, self._slow = None, 0

    def _has_stalled(self, least: int) -> bool:
        """Whether the kernel had to make room so often since this was asked last, or does not tell.

        Otherwise pages are slow for another reason, and small ones soon would be: those come from what is left of the
        memory that the host of a virtual machine has found already.
        """
        before, self._stalls = self._stalls, read_stalls()
        return before is None or self._stalls is None or self._stalls - before >= least
