"""A region's file: how it is named, and what tells it from other files of that name."""

from __future__ import annotations

import errno
import os
import shlex
import stat

# What open(2) says of what stands where a region's file should, in words.
UNOPENABLE = {
    errno.ELOOP: "it is a symbolic link",
    errno.EISDIR: "it is a directory",
    errno.ENXIO: "it is a socket or a device without a driver",
    errno.EACCES: "it may not be opened: it belongs to another user, or its mode forbids it",
    errno.EPERM: "it may not be opened",
}


def region_path(directory: str, user: int, name: str) -> str:
    """Return the file of a region. The user's id is part of it, so that two users never collide."""
    return os.path.join(directory, f"aioshm-{user}-{name}")


def find_fault(status: os.stat_result, user: int) -> str | None:
    """Return why a file cannot be one of this user's regions, or None."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid != user:
        return f"it belongs to uid {status.st_uid}, not to uid {user}"
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"its mode {stat.filemode(status.st_mode)} lets others in"
    return None


def resident(status: os.stat_result) -> int:
    """Return the bytes of memory that a file takes: st_blocks counts 512 bytes, whatever the page (inode(7))."""
    return status.st_blocks * 512


def sweep_command(directory: str) -> str:
    """Return the command that removes leftovers there, as it is typed."""
    return "aioshm gc" if directory == "/dev/shm" else f"aioshm gc --directory {shlex.quote(directory)}"
