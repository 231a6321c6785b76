"""What one process holds of a region, its seat and its mapping, and the one way to give both back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ._libc import PAGE
from ._locks import Description
from ._mapping import Mapping, round_up, unmap
from ._populate import Populate
from ._rendezvous import Seat
from ._roster import Roster
from ._threads import run_regardless

_STEP = 16 << 20


class Tenancy:
    """A seat and, once there is one, a mapping: acquired one after the other, given back as one.

    Attributes:
        seat: Our place inside.
        mapping: Where its file is mapped; None until then.
        roster: Our cohort, once our rank in it is claimed; None without one.
        removed: Whether we were the last and removed the name.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.mapping: Mapping | None = None
        self.roster: Roster | None = None
        self.removed: bool = False
        self._running: set[Populate] = set()

    @property
    def held(self) -> bool:
        """Whether there still is anything to give back; a fork lets go of it in the child."""
        return not self.seat.description.closed

    @contextlib.contextmanager
    def populating(self, work: Populate) -> Iterator[None]:
        """Around a populate that others may end by giving back: it is stopped before anything is unmapped."""
        self._running.add(work)
        try:
            yield
        finally:
            self._running.discard(work)

    async def give_back(self) -> None:
        """Leave, unmap and close. Twice is fine.

        The name goes first: from then on not even SIGKILL leaves anything. Only a region that was never finished
        is emptied before that, while the gate is still ours: as soon as the name is gone, one of those who wait
        makes it anew, and must find the memory free.

        Cancellation:
            Felt when it is all done.
        """
        if not self.held:
            return
        try:
            if not self.seat.forming:
                self._leave()
        finally:
            await run_regardless(self._release, name="release")

    def give_back_now(self) -> None:
        """Do the same on the spot: for where nothing can be awaited any more."""
        if self.held:
            try:
                if not self.seat.forming:
                    self._leave()
            finally:
                self._release()

    def _leave(self) -> None:
        if self.roster is not None:
            self.roster.break_up()
        self.removed = self.seat.leave()

    def _release(self) -> None:
        for populate in list(self._running):
            populate.abandon()
        addresses, page = (self.mapping.release(), self.mapping.page) if self.mapping is not None else (range(0), PAGE)
        try:
            if self.seat.forming and not self._is_viewed():
                _empty(self.seat.description)
            unmap(addresses, page)
        finally:
            try:
                if self.seat.forming:
                    self._leave()
            finally:
                self.seat.description.close()

    def _is_viewed(self) -> bool:
        return self.mapping is not None and self.mapping.still_mapped


def _empty(description: Description) -> None:
    """Free a file's pages, from its end and step by step: where memory is short, somebody waits for the first of them.

    Before they are unmapped: that alone frees nothing, and takes as long.
    """
    status = description.status()
    # In whole pages (inode(7), st_blksize), or hugetlbfs refuses; not for ever, where a huge file was never populated.
    step = round_up(max(_STEP, status.st_size >> 16), status.st_blksize)
    for end in range(status.st_size - step, 0, -step):
        os.ftruncate(description.fd, end)
    os.ftruncate(description.fd, 0)
