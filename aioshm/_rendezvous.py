"""Who makes the region, who joins it, and who removes it. O_EXCL names the file, a lock names the creator.

Every decision is one synchronous look at the file and the lock table (`_locks`); between two looks a waiter sleeps. The
creator is whoever holds the exclusive GATE on an empty file, whoever made it: a stub whose maker died between open and
lock is taken over at once. A gate that nobody holds over a file with a size proves a leftover of the dead.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from enum import Enum, auto
from typing import Literal

from ._bell import Bell
from ._errors import (
    InsufficientSpaceError,
    JoinTimeoutError,
    RegionAccessError,
    RegionMismatchError,
    RegionRemovedError,
    UnsuitableDirectoryError,
    UnsupportedPlatformError,
)
from ._files import UNOPENABLE, find_fault
from ._locks import BROKEN_BIT, GATE, READY_BIT, SHORTFALL, WORLD, Description
from ._log import log
from ._request import Need, Request
from ._threads import run_regardless


class _Look(Enum):
    """What one look at the file found."""

    CREATOR = auto()
    JOINER = auto()
    DELETED = auto()  # the name is gone or no longer this file's: start over
    LEFTOVER = auto()  # removed it; start over
    FORMING = auto()  # somebody alive is at work on it
    UNSETTLED = auto()  # somebody is inside, yet it was never finished

    @property
    def is_inside(self) -> bool:
        """Whether the gate is ours now, exclusively or shared."""
        return self in (_Look.CREATOR, _Look.JOINER)

    @property
    def is_pending(self) -> bool:
        """Whether to look again later."""
        return self in (_Look.FORMING, _Look.UNSETTLED)


class Seat:
    """A place inside a region: the description that holds our locks, and what we came in as.

    Attributes:
        description: The open file.
        path: Its name.
        role: `"creator"` holds the GATE exclusively on an empty file until `finish` or `let_in`; `"joiner"` shared.
        recycled: Whether a leftover was removed on the way in.
        displaced: Whether a file with memory stood there before: it may not be free yet, for whoever else had it open.
        waited: Seconds it took to get in.
    """

    def __init__(
        self,
        description: Description,
        path: str,
        role: Literal["creator", "joiner"],
        *,
        recycled: bool = False,
        displaced: bool = False,
        waited: float = 0.0,
    ) -> None:
        self.description = description
        self.path = path
        self.role = role
        self.recycled = recycled
        self.displaced = displaced
        self.waited = waited
        self.forming: bool = role == "creator"

    def let_in(self) -> None:
        """Let the other ranks in, to a file that has its size: make the gate shared, which leaves no gap."""
        self.description.try_shared(GATE)
        self.forming = False
        self.description.ring()

    def finish(self) -> None:
        """Without a cohort: set the ready bit, then let the others in.

        Raises:
            RegionRemovedError: The name was deleted from outside meanwhile, so nobody could ever come.
        """
        if not self.description.is_at(self.path):
            raise RegionRemovedError(path=self.path)
        self.description.mark(READY_BIT)
        self.let_in()

    def leave(self) -> bool:
        """Go out, remove the name if we are the last, and say whether we did. The description stays open.

        Two leavers must not block each other: each tries for the exclusive gate, drops its shared one, and tries
        again; whoever gets it sees that nobody is left. A second call finds nothing to do.
        """
        description = self.description
        if description.closed:  # closed by a fork: the parent is the one inside
            return False
        if not description.try_exclusive(GATE):
            description.unlock(GATE)
            if not description.try_exclusive(GATE):
                return False
        return description.unlink(self.path)


async def enter(request: Request, file_size: int) -> Seat:
    """Get into the region, as its creator or as a joiner.

    Args:
        request: What was asked for.
        file_size: Bytes that the file of a finished region must have.

    Returns:
        The seat. The caller must `leave` it and close its description, whatever happens next.

    Raises:
        JoinTimeoutError: It was neither finished nor given up within the time-out, and nobody was at work on it.
        RegionMismatchError: It lives, with another size.
        RegionAccessError: Something that is not ours stands at the path.
        UnsuitableDirectoryError: No file can be made there.
        InsufficientSpaceError: Not even an empty file can be made there.

    Cancellation:
        Felt at once; nothing is held afterwards.
    """
    # What was removed on the way is closed, and so freed, only with the next file in hand. Freeing takes time, and
    # whoever made the next one meanwhile would find no room for it.
    removed: list[Description] = []
    try:
        return await _enter(request, file_size, removed)
    finally:
        await _close_all(removed)  # after success there is none, and so nothing is awaited with the seat in hand


async def _enter(request: Request, file_size: int, removed: list[Description]) -> Seat:
    started = time.monotonic()
    patience = _Patience(request)
    recycled = displaced = False
    while True:
        description = _open(request)
        if description is None:
            await asyncio.sleep(0)  # no pause: whoever removed the name is done with it
            continue
        try:
            look = await _settle(description, request, file_size, removed, patience)
        except BaseException:
            await close(description)
            raise
        if look.is_inside:
            return Seat(
                description,
                request.path,
                "creator" if look is _Look.CREATOR else "joiner",
                recycled=recycled,
                displaced=displaced,
                waited=time.monotonic() - started,
            )
        displaced = displaced or description.status().st_size > 0
        if look is _Look.LEFTOVER:
            recycled = True
            log.info("%s: removed %s, left by a process that died", request.allocation_name, request.path)
            removed.append(description)
        else:
            await close(description)


async def _settle(
    description: Description, request: Request, file_size: int, removed: list[Description], patience: _Patience
) -> _Look:
    """Look until it is decided what we are in this file; close what was removed on the way as soon as it is in hand."""
    try:
        look = _look(description, request, file_size)
        try:
            await _close_all(removed)
        except BaseException:  # cancelled, maybe with the gate in hand: leaving removes the name, closing would not
            if look.is_inside:
                Seat(description, request.path, "joiner").leave()
            raise
        if look.is_pending:
            with Bell(description) as bell:
                while look.is_pending:
                    await bell.wait(patience.left(at_work=look is _Look.FORMING))
                    look = _look(description, request, file_size)
    except UnsupportedPlatformError:
        # A stub that nobody can lock is nobody's: most likely we made it, just now.
        if not description.status().st_size:
            description.unlink(request.path)
        raise
    if look is _Look.CREATOR and not description.made:
        log.info("%s: took over %s, which its maker had left empty", request.allocation_name, request.path)
    return look


async def _close_all(descriptions: list[Description]) -> None:
    while descriptions:
        await close(descriptions.pop())


async def close(description: Description) -> None:
    """Close the description, in a worker thread where that may take long."""
    if description.closed:
        return
    if description.is_slow_to_close:
        await run_regardless(description.close, name="close")
    else:
        description.close()


class _Patience:
    """The time-out. It runs only while nobody alive is at work, for slowness is not punished."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._idle_since: float | None = None

    def left(self, *, at_work: bool) -> float | None:
        """Return the seconds that are left; raises JoinTimeoutError where nobody was at work for too long."""
        if at_work or self._request.timeout is None:
            self._idle_since = None
            return None
        now = time.monotonic()
        self._idle_since = self._idle_since or now  # since we know of it: the last look may be long ago
        waited = now - self._idle_since
        if waited > self._request.timeout:
            raise JoinTimeoutError(name=self._request.name, path=self._request.path, waited=waited)
        return self._request.timeout - waited


def _open(request: Request) -> Description | None:
    """Make the file, or open the one that is there; None where it went in between."""
    path = request.path
    try:
        return Description(path, os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        pass
    except OSError as error:
        raise translate(error, request) from error
    try:
        description = Description(path, 0)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = UNOPENABLE.get(error.errno or 0)
        if reason is None:
            raise
        raise RegionAccessError(path=path, reason=reason) from error
    reason = find_fault(description.status(), os.geteuid())
    if reason is not None:
        description.close()
        raise RegionAccessError(path=path, reason=reason)
    return description


_UNSUITABLE = {
    errno.ENOENT: "it does not exist",
    errno.ENOTDIR: "it is not a directory",
    errno.EACCES: "this process may not create files in it",
    errno.EPERM: "this process may not create files in it",
    errno.EROFS: "it is mounted read-only",
}


def translate(error: OSError, need: Need) -> Exception:
    """Return what an errno of creating the file means; the unknown stays as it is."""
    reason = _UNSUITABLE.get(error.errno or 0)
    if reason is not None:
        return UnsuitableDirectoryError(directory=need.directory, reason=reason)
    if error.errno == errno.ENOSPC:  # not even a name: the mount's nr_inodes is used up, or its last page
        return InsufficientSpaceError(
            allocation_name=need.allocation_name,
            directory=need.directory,
            required=need.size,
            available=0,
            hint=need.hint,
        )
    return error


def _look(description: Description, request: Request, file_size: int) -> _Look:
    """Look once, and act on it. After CREATOR and JOINER the gate is ours; after any other, only closing is left."""
    if description.try_exclusive(GATE):
        status = description.status()
        if status.st_nlink == 0:
            return _Look.DELETED
        if status.st_size == 0:
            _hold_terms(description, request, file_size)
            return _Look.CREATOR
        return _Look.LEFTOVER if description.unlink(request.path) else _Look.DELETED
    if not description.try_shared(GATE):
        return _Look.FORMING
    try:
        # Read under the gate: only here does a bit that is not set mean that nobody is about to set it.
        status = description.status()
        if status.st_nlink == 0:
            return _Look.DELETED
        _check_world(description, request)
        # Without a cohort only a finished region may be joined. With one it must be sized and not yet released.
        # Otherwise its creator died between our two tries, or its name is about to go. And only who is inside holds a
        # WORLD: where nobody does, the gate was held by one who died on the way in, and others like us; then this is a
        # leftover.
        marks = status.st_mode & (READY_BIT | BROKEN_BIT)
        is_whole = marks == (0 if request.is_cohort else READY_BIT) and status.st_size > 0
        if not is_whole or description.find_held(WORLD) is None:
            description.unlock(GATE)
            return _Look.UNSETTLED
        _check_size(description, request, file_size, status.st_size)
        _hold_terms(description, request, file_size)
    except BaseException:
        Seat(description, request.path, "joiner").leave()  # those inside may have gone, and left the name to us
        raise
    return _Look.JOINER


def _hold_terms(description: Description, request: Request, file_size: int) -> None:
    """Hold what all inside agree on: the local world size, and how many bytes less than the file the region has."""
    _check_world(description, request)
    description.try_shared(WORLD.at(request.local_world_size))
    description.try_shared(SHORTFALL.at(file_size - request.size))


def _check_world(description: Description, request: Request) -> None:
    """See that nobody inside holds another local world size."""
    world = request.local_world_size
    found = description.find_other(WORLD, world)
    if found is not None:
        raise RegionMismatchError(name=request.name, field="local_world_size", expected=world, found=found)


def _check_size(description: Description, request: Request, file_size: int, found_size: int) -> None:
    """See that those inside asked for as many bytes, for a file that has `found_size`."""
    shortfall = file_size - request.size
    theirs = description.find_other(SHORTFALL, shortfall)
    size = found_size - (shortfall if theirs is None else theirs)
    if size != request.size:
        raise RegionMismatchError(name=request.name, field="size", expected=request.size, found=size)
