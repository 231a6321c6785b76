"""The regions of a directory as an onlooker sees them, and removing those that dead processes left there.

Looking takes no lock (`Description.how_held` says why). Removing is done by the rules of those inside: under the
exclusive GATE, which nobody gets while anybody is alive in there; and whoever has it removes the name, for a leaver
that was refused it relies on that.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ._files import find_fault, region_path, resident
from ._locks import GATE, READY_BIT, Description
from ._request import check_name

_FILE_NAME = re.compile(r"aioshm-(0|[1-9][0-9]{0,9})-(.+)", re.DOTALL)
State = Literal["forming", "live", "leftover", "foreign", "unknown"]

# What stands in place of a region must not make us wait, or be changed by a look.
_HARMLESSLY = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


@dataclass(frozen=True)
class Found:
    """What stands under one region's name.

    Attributes:
        path: Its file.
        name: The region's name.
        user: The id of the user whose region it is, by the file's name.
        device: Where the file is: `st_dev`,
        inode: and its number there.
        size: Bytes.
        resident: Bytes of memory (or swap) that it takes.
        state: `"forming"` (somebody is inside, and it is not ready), `"live"`, `"leftover"` (nobody is inside),
            `"foreign"` (no region at all), or `"unknown"` (another user's, which this one may not open).
        reason: Why it is foreign or unknown; else None.
    """

    path: str
    name: str
    user: int
    device: int
    inode: int
    size: int
    resident: int
    state: State
    reason: str | None = None

    @property
    def ours(self) -> bool:
        """Whether it is a region of this user."""
        return self.state != "foreign" and self.user == os.geteuid()


def find_regions(directory: str) -> list[Found]:
    """Return what stands in `directory` under a region's name, in order; nothing is changed, no lock is taken.

    Raises:
        OSError: The directory cannot be read.
    """
    found = []
    for file_name in sorted(os.listdir(directory)):
        owner = find_owner(file_name)
        if owner is not None:
            user, name = owner
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                found.append(_look(region_path(directory, user, name), name, user))
    return found


def find_owner(file_name: str) -> tuple[int, str] | None:
    """Return the user's id and the region's name that a file name says; None where no region's file is called so."""
    found = _FILE_NAME.fullmatch(file_name)
    try:
        return (int(found[1]), check_name(found[2])) if found else None
    except ValueError:
        return None


def leftover_bytes(directory: str) -> int:
    """Return the bytes that this user's dead processes left in `directory`; 0 where it cannot be read."""
    try:
        found = find_regions(directory)
    except OSError:
        return 0
    return sum(each.resident for each in found if each.state == "leftover" and each.ours)


def remove_leftover(path: str) -> int | None:
    """Remove a region that nobody is inside of, and return the bytes it took.

    Freeing takes about 0.1 s per GiB of small pages: where a loop runs, call it in a worker thread. Whoever opens the
    region meanwhile waits, and makes it anew.

    Returns:
        The bytes; None where there is nothing to remove: it is alive, gone, foreign, or another user's.

    Raises:
        OSError: It is a leftover, and the kernel does not let us remove it.
    """
    description = _open_ours(path)
    if description is None:
        return None
    with contextlib.closing(description):
        # Not asked first and locked then: the lock is the question. Refused, it has disturbed nobody; granted, nobody
        # is inside, and nobody comes in until it is closed. An empty file may be a stub that somebody made this moment
        # and has yet to lock: it finds the file deleted, and starts over.
        if not description.try_exclusive(GATE) or not description.is_at(path):
            return None
        freed = resident(description.status())
        if not freed:
            return 0 if description.unlink(path) else None
        with _stand_in(path) as replaced:
            if not replaced and not description.unlink(path):
                return None
            description.close()
    return freed


@contextlib.contextmanager
def _stand_in(path: str) -> Iterator[bool]:
    """Put an empty file, whose gate is ours, in the place of a leftover while that is being freed; then remove it.

    As soon as a name is gone somebody makes it anew, looks for room, and must not find it still taken. Renaming leaves
    no moment without a name. Yields whether it could be done: without a free inode, or where another sweeper takes the
    new file for a leftover, it cannot. What a kill leaves of it is an empty file, which the next to come takes over.
    """
    directory, _, _ = path.rpartition("/")
    temporary = region_path(directory, os.geteuid(), f"gc.{os.getpid()}.{secrets.token_hex(8)}")
    description: Description | None = None
    replaced = False
    try:
        with contextlib.suppress(OSError):
            description = Description(temporary, os.O_CREAT | os.O_EXCL)
            if description.try_exclusive(GATE):
                os.rename(temporary, path)
                replaced = True
        yield replaced
    finally:
        if description is not None:
            description.unlink(path if replaced else temporary)
            description.close()


def _look(path: str, name: str, user: int) -> Found:
    """Look at one file. It is opened only where it is a region by its status, and only to read."""
    status = os.stat(path, follow_symlinks=False)
    fault = find_fault(status, user)
    if fault is not None:
        return _found(path, name, user, status, "foreign", fault)
    try:
        description = Description(path, _HARMLESSLY, access=os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError as error:  # another user's; or replaced this very moment
        return _found(path, name, user, status, "unknown", (error.strerror or str(error)).lower())
    with contextlib.closing(description):
        status = description.status()
        fault = find_fault(status, user)
        if fault is not None:
            return _found(path, name, user, status, "foreign", fault)
        # The table first: a region that is finished in between is then forming, and none is taken for dead.
        held = description.how_held(GATE)
        status = description.status()
        if status.st_nlink == 0:
            raise FileNotFoundError(path)
    state: State = "leftover"
    if held is not None:
        ready = held == "shared" and status.st_mode & READY_BIT
        state = "live" if ready else "forming"
    return _found(path, name, user, status, state)


def _found(path: str, name: str, user: int, status: os.stat_result, state: State, reason: str | None = None) -> Found:
    return Found(
        path=path,
        name=name,
        user=user,
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        resident=resident(status),
        state=state,
        reason=reason,
    )


def _open_ours(path: str) -> Description | None:
    """Open a region of this user, by its name and its status; None where it is none."""
    owner = find_owner(os.path.basename(path))
    if owner is None or owner[0] != os.geteuid():
        return None
    try:
        if find_fault(os.stat(path, follow_symlinks=False), os.geteuid()) is not None:
            return None
        description = Description(path, _HARMLESSLY)
    except FileNotFoundError:
        return None
    if find_fault(description.status(), os.geteuid()) is None:
        return description
    description.close()
    return None
