"""The roster of a cohort: which ranks have come, which are ready, which are gone, and the release of all of them.

No role depends on anybody's survival. Whoever sees all ranks ready and gets RELEASE sets the ready bit and then
removes the name: from there SIGKILL of everyone leaks nothing. A rank that leaves before that breaks the cohort up:
under the same lock it sets the broken bit and removes the name, so that a new start finds a new file and not the ruins.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TypeVar

from ._backoff import SHORTEST
from ._bell import Bell
from ._cgroup import own_memory_levels
from ._errors import JoinTimeoutError, PeerLostError, RankInUseError, RegionRemovedError
from ._locks import BROKEN_BIT, CLAIM, PID, PID_BITS, READY, READY_BIT, RELEASE, Description, Range
from ._request import Request

# Seconds of rest between two looks, for each pair of ranks: all their looks then take half a processor at most.
_REST = 3e-6

# Seconds between two looks while this rank is busy itself. A look costs about 1 us per rank.
_WATCH_INTERVAL = 0.02

T = TypeVar("T")


class BrokenUpError(Exception):
    """We came into a cohort that ranks we never saw had broken up already: to be left, and opened anew."""


class _State(Enum):
    """What one look at the cohort found."""

    GATHERING = auto()  # some never came, or are not ready
    COMPLETE = auto()  # all ranks but perhaps ourselves are ready
    RELEASED = auto()  # the ready bit is set


class Roster:
    """One rank's view of its cohort, through the description that holds its own marks."""

    def __init__(self, description: Description, request: Request, started: float) -> None:
        """Args: the file, what was asked for, and since when (monotonic seconds) the ranks are expected."""
        self._description = description
        self._request = request
        self._started = started
        self._others = [rank for rank in range(request.local_world_size) if rank != request.local_rank]
        self._levels = own_memory_levels()
        self._oom_kills = [level.read_oom_kills() for level in self._levels]
        self._pids: dict[int, int | None] = {}
        self._ready: set[int] = set()

    def claim(self) -> None:
        """Take our rank.

        Raises:
            RankInUseError: It is taken by another living rank, which is left alone.
        """
        rank = self._request.local_rank
        if not self._description.try_exclusive(CLAIM.at(rank)):
            raise RankInUseError(name=self._request.name, local_rank=rank, pid=self._find_pid(rank))
        self._description.try_exclusive(PID.at(rank << PID_BITS | os.getpid()))

    async def watched(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work of ours that may take long, and end it at once when the cohort fails meanwhile.

        Returns:
            What `work` returned.

        Raises:
            PeerLostError: A rank that had come is gone; `work` was cancelled, and is done.
            JoinTimeoutError: Likewise: ranks never came.
            RegionRemovedError: Likewise: the name was deleted from outside.
        """
        failure: Exception | None = None
        loop = asyncio.get_running_loop()
        timer: asyncio.Handle | None = None
        try:
            # The time-out never comes by itself: it is the one way to cancel our own work that asyncio tells apart
            # from a cancellation by others.
            async with asyncio.timeout(None) as scope:

                def look() -> None:
                    nonlocal failure, timer
                    try:
                        self._look()
                    except Exception as error:  # noqa: BLE001 - raised below, in place of the time-out
                        failure = error
                        scope.reschedule(loop.time())
                    else:
                        timer = loop.call_later(_WATCH_INTERVAL, look)

                timer = loop.call_soon(look)
                return await work()
        except TimeoutError:
            if failure is None:
                raise
            raise failure from None
        finally:
            if timer is not None:
                timer.cancel()

    async def wait_others_ready(self) -> None:
        """Wait until every other rank is ready: for the creator, before it initializes.

        Raises:
            PeerLostError: A rank that had come is gone.
            JoinTimeoutError: Ranks never came.
            RegionRemovedError: The name was deleted from outside.
        """
        with self._bell() as bell:
            while self._look() is _State.GATHERING:
                await bell.wait(self._arrival_left())

    async def release(self) -> None:
        """Mark ourselves ready, and return when all ranks are and the name is gone.

        Raises:
            PeerLostError: A rank that had come is gone.
            JoinTimeoutError: Ranks never came.
            RegionRemovedError: The name was deleted from outside.
        """
        self._description.try_exclusive(READY.at(self._request.local_rank))
        self._description.ring()  # for a creator that waits with its initialize
        with self._bell() as bell:
            while not self._try_finish(self._look()):
                await bell.wait(self._arrival_left())

    def break_up(self) -> None:
        """Leave a cohort that was not released: remove the name, then let our marks go, so that all see it at once."""
        self._condemn()
        for marks in (READY.at(self._request.local_rank), CLAIM.at(self._request.local_rank)):
            self._description.unlock(marks)

    def _bell(self) -> Bell:
        """Return what wakes us. Every rank looks at every other: what that costs together must stay bounded."""
        return Bell(self._description, rest=max(SHORTEST, _REST * self._request.local_world_size**2))

    def _try_finish(self, state: _State) -> bool:
        description, path = self._description, self._request.path
        if state is _State.RELEASED:
            if description.status().st_nlink == 0:
                return True
            # The bit is set and the name is there: its remover is about to, or died in between. Never without the
            # lock: a successor may already own the name.
            if description.try_exclusive(RELEASE):
                description.unlink(path)
                return True
        elif state is _State.COMPLETE and description.try_exclusive(RELEASE):
            if description.is_at(path) and not description.status().st_mode & BROKEN_BIT:
                description.mark(READY_BIT)
                description.unlink(path)
                return True
            description.unlock(RELEASE)  # a rank broke the cohort up after we looked: look again
        return False

    def _look(self) -> _State:
        """Look once. The peers' locks are read before the bit: who leaves after the release is never called lost."""
        lost = self._read_peers()
        status = self._description.status()
        if status.st_mode & READY_BIT:
            return _State.RELEASED
        missing = tuple(rank for rank in self._others if rank not in self._pids)
        # Missing ranks are the cause, also where peers gave up before us.
        failure = self._find_late(missing) or (self._lost(lost, missing) if lost else None)
        if failure is not None:
            if self._condemn():
                raise failure
            return _State.GATHERING
        if status.st_mode & BROKEN_BIT or status.st_nlink == 0:
            return self._look_at_ruins(missing)
        return _State.COMPLETE if len(self._ready) == len(self._others) else _State.GATHERING

    def _arrival_left(self) -> float | None:
        """Return the seconds that missing ranks have left; None where none is missing, or they have all the time."""
        if self._request.timeout is None or len(self._pids) == len(self._others):
            return None
        return max(0.0, self._started + self._request.timeout - time.monotonic())

    def _condemn(self) -> bool:
        """Break the cohort up, and say whether it is: not where it was released, or somebody decides this very moment.

        Before it is called failed, and under the lock: a dead rank may have been started again while we looked, and
        release it with the marks of ours that are still there.
        """
        description = self._description
        if description.status().st_mode & BROKEN_BIT:
            return True
        if not description.try_exclusive(RELEASE):
            return False
        if description.status().st_mode & READY_BIT:
            return False
        description.mark(BROKEN_BIT)
        description.unlink(self._request.path)
        return True

    def _find_late(self, missing: tuple[int, ...]) -> JoinTimeoutError | None:
        """Return what to raise where ranks are missing and the time is up."""
        waited = time.monotonic() - self._started
        if not missing or self._request.timeout is None or waited <= self._request.timeout:
            return None
        return JoinTimeoutError(
            name=self._request.name,
            path=self._request.path,
            waited=waited,
            missing=missing,
            local_world_size=self._request.local_world_size,
        )

    def _look_at_ruins(self, missing: tuple[int, ...]) -> _State:
        """The name is going or gone: find out whether by a releaser, by a rank that broke up, or by somebody outside.

        Setting the bit and removing the name are two steps, and so are a breaking rank's unlink and its letting go:
        each is read once more, in the order in which they change.
        """
        breaking_up = self._description.find_held(RELEASE) is not None
        lost = self._read_peers()
        mode = self._description.status().st_mode
        if mode & READY_BIT:
            return _State.RELEASED
        if lost:
            raise self._lost(lost, missing)
        if breaking_up:
            return _State.GATHERING
        if mode & BROKEN_BIT:
            raise BrokenUpError
        raise RegionRemovedError(path=self._request.path)

    def _read_peers(self) -> list[int]:
        """Bring the roster up to date, and return the ranks that had come and are gone."""
        lost = []
        for rank in self._others:
            if self._description.find_held(CLAIM.at(rank)) is None:
                if rank in self._pids:
                    lost.append(rank)
                continue
            if self._pids.get(rank) is None:
                self._pids[rank] = self._find_pid(rank)
            if rank not in self._ready and self._description.find_held(READY.at(rank)) is not None:
                self._ready.add(rank)
        return lost

    def _find_pid(self, rank: int) -> int | None:
        return self._description.find_held(Range(PID.start + (rank << PID_BITS), 1 << PID_BITS))

    def _lost(self, lost: list[int], missing: tuple[int, ...]) -> PeerLostError:
        return PeerLostError(
            name=self._request.name,
            lost=tuple(lost),
            pids=tuple(self._pids[rank] for rank in lost),
            missing=missing,
            oom_killed_in=tuple(
                level.path
                for level, before in zip(self._levels, self._oom_kills, strict=True)
                if level.read_oom_kills() > before
            ),
        )
