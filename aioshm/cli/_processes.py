"""Who has region files mapped, as /proc tells it: pids and commands, deleted files too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

# proc_pid_maps(5): range, rights, offset, device, inode, path. In smaps figures follow each such line.
_AREA = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +(\S.*?)( \(deleted\))?\n", re.ASCII
)


@dataclass(frozen=True)
class File:
    """A file, whatever became of its name: `st_dev` and `st_ino`."""

    device: int
    inode: int


@dataclass(frozen=True)
class Mapper:
    """A process that has a region's file mapped.

    Attributes:
        pid: Its id.
        command: Its command line, with nothing in it that a terminal would obey.
        path: The file's name as the kernel remembers it.
        deleted: Whether that name is gone.
        end: Bytes of the file up to the end of what is mapped, in whole pages.
    """

    pid: int
    command: str
    path: str
    deleted: bool
    end: int


@dataclass(frozen=True)
class Census:
    """All mappers of region files, by file, and how many processes could not be looked at."""

    mappers: dict[File, list[Mapper]]
    unreadable: int


def take_census() -> Census:
    """Look at every process that this one sees. What ends meanwhile is left out."""
    mappers: dict[File, list[Mapper]] = {}
    unreadable = 0
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            for file, mapper in _read_mappers(pid):
                mappers.setdefault(file, []).append(mapper)
        except PermissionError:
            unreadable += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Census(mappers, unreadable)


def read_huge(pid: int, file: File) -> tuple[int, int] | None:
    """Return how many bytes of a file a process has mapped by huge pages, and in all; None where it cannot be read."""
    huge = present = 0
    inside = False
    try:
        with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                if area := _AREA.fullmatch(line):
                    inside = _file_of(area) == file
                elif inside and line.startswith(("Rss:", "ShmemPmdMapped:")):
                    key, figure, *_ = line.split()
                    if key == "Rss:":
                        present += int(figure) * 1024
                    else:
                        huge += int(figure) * 1024
                elif not line[0].isupper():  # an area without a name
                    inside = False
    except OSError:
        return None
    return huge, present


def read_status(pid: int, file: File) -> os.stat_result | None:
    """Return the status of a file that a process has open, whatever became of its name; None where it has it not."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:  # closed meanwhile
                continue
            if File(status.st_dev, status.st_ino) == file:
                return status
    except OSError:
        pass
    return None


def _read_mappers(pid: int) -> Iterator[tuple[File, Mapper]]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        areas = [area for line in lines if "/aioshm-" in line and (area := _AREA.fullmatch(line))]
    found: dict[File, tuple[str, bool, int]] = {}  # advice splits a mapping into several areas
    for area in areas:
        start, stop, offset = (int(area[index], 16) for index in (1, 2, 3))
        _, _, end = found.get(_file_of(area), ("", False, 0))
        found[_file_of(area)] = area[7], bool(area[8]), max(end, offset + stop - start)
    command = _read_command(pid) if found else ""
    for file, (path, deleted, end) in found.items():
        yield file, Mapper(pid, command, path, deleted, end)


def _file_of(area: re.Match[str]) -> File:
    return File(os.makedev(int(area[4], 16), int(area[5], 16)), int(area[6]))


def _read_command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in words)
