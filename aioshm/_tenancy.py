"""What one process holds of a region, its seat and its mapping, and the one way to give both back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ._mapping import Mapping, unmap
from ._populate import Populate
from ._rendezvous import Seat
from ._roster import Roster
from ._threads import run_through


class Tenancy:
    """A seat and, once there is one, a mapping: acquired one after the other, given back as one.

    Attributes:
        seat: Our place inside.
        mapping: Where its file is mapped; None until then.
        roster: Our cohort, once our rank in it is claimed; None without one.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.mapping: Mapping | None = None
        self.roster: Roster | None = None
        self._running: set[Populate] = set()

    @property
    def held(self) -> bool:
        """Whether there still is anything to give back; a fork lets go of it in the child."""
        return not self.seat.description.closed

    @contextlib.contextmanager
    def populating(self, work: Populate) -> Iterator[None]:
        """Around a populate that others may end by giving the tenancy back: it is stopped before anything is unmapped."""
        self._running.add(work)
        try:
            yield
        finally:
            self._running.discard(work)

    async def give_back(self) -> bool:
        """Leave, unmap and close; say whether the name was removed. Twice is fine.

        The name goes first: from then on not even SIGKILL leaves anything. A region that was never finished is
        emptied while the gate is still ours, so that whoever makes it next finds the memory free.

        Cancellation:
            Felt when it is all done.
        """
        if not self.held:
            return False
        try:
            return self._leave()
        finally:
            await run_through(lambda _: self._release(), name="release")

    def give_back_now(self) -> None:
        """Do the same on the spot: for where nothing can be awaited any more."""
        if self.held:
            try:
                self._leave()
            finally:
                self._release()

    def _leave(self) -> bool:
        if self.roster is not None:
            self.roster.break_up()
        return self.seat.leave()

    def _release(self) -> None:
        for populate in list(self._running):
            populate.abandon()
        try:
            if self.mapping is not None:
                unmap(self.mapping.release())
            if self.seat.forming and not self._is_viewed():
                os.ftruncate(self.seat.description.fd, 0)
        finally:
            self.seat.description.close()

    def _is_viewed(self) -> bool:
        return self.mapping is not None and self.mapping.still_mapped
