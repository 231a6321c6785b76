"""The regions of a directory with what /proc adds: who has them mapped, huge pages, and those whose name is gone."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from aioshm import _leftovers
from aioshm._files import resident
from aioshm._host import read_file_system
from aioshm._leftovers import find_owner, find_regions

from ._processes import File, Mapper, read_huge, read_status, take_census

State = _leftovers.State | Literal["released"]


@dataclass(frozen=True)
class Row:
    """One region, or what stands in place of one.

    Attributes:
        name: The region's name.
        path: Its file, or what that was called.
        user: The id of the user whose region it is.
        state: As `Found` says it, or `"released"`: its name is gone, and living processes have it mapped.
        reason: Why it is foreign or unknown; else None.
        size: Bytes; of a released one that nobody has open, the pages that are mapped.
        resident: Bytes of memory that it takes; None where it cannot be read.
        huge_share: The part of that in huge pages; None where nobody who maps it can be asked.
        mapped_by: The processes that have it mapped, as far as they can be seen.
    """

    name: str
    path: str
    user: int
    state: State
    reason: str | None
    size: int
    resident: int | None
    huge_share: float | None
    mapped_by: tuple[Mapper, ...]


@dataclass(frozen=True)
class Listing:
    """What is in a directory, and how many processes could not be asked."""

    directory: str
    rows: list[Row]
    unreadable_processes: int


def list_regions(directory: str) -> Listing:
    """Look at a directory and at all processes.

    Raises:
        OSError: The directory cannot be read.
    """
    place = os.stat(directory)
    # The names first: a region that is released in between is then listed once, as what it was.
    found = find_regions(directory)
    census = take_census()
    named = {File(each.device, each.inode) for each in found}
    rows = [
        Row(
            name=each.name,
            path=each.path,
            user=each.user,
            state=each.state,
            reason=each.reason,
            size=each.size,
            resident=each.resident,
            huge_share=None,
            mapped_by=tuple(census.mappers.get(File(each.device, each.inode), ())),
        )
        for each in found
    ]
    files = [File(each.device, each.inode) for each in found]
    for file, mappers in census.mappers.items():
        row = _released(directory, place, file, mappers) if file not in named else None
        if row is not None:
            rows.append(row)
            files.append(file)
    hugetlb = read_file_system(directory).kind == "hugetlbfs"
    told = [
        replace(row, huge_share=1.0 if hugetlb and row.resident else _find_huge_share(file, row))
        for file, row in zip(files, rows, strict=True)
    ]
    return Listing(directory, sorted(told, key=lambda row: (row.name, row.user, row.path)), census.unreadable)


def _released(directory: str, place: os.stat_result, file: File, mappers: list[Mapper]) -> Row | None:
    """Return the row of a file whose name is gone, if it was a region of this directory."""
    path = mappers[0].path
    owner = find_owner(os.path.basename(path))
    if owner is None or not mappers[0].deleted or file.device != place.st_dev:
        return None
    try:
        there = os.stat(os.path.dirname(path))
    except OSError:
        there = None
    # On the device, but in another directory of it. What is no directory here is a container's name for this one.
    if there is not None and there.st_dev == place.st_dev and there.st_ino != place.st_ino:
        return None
    status = next(filter(None, (read_status(mapper.pid, file) for mapper in mappers)), None)
    return Row(
        name=owner[1],
        path=os.path.join(directory, os.path.basename(path)),
        user=owner[0],
        state="released",
        reason=None,
        size=status.st_size if status else max(mapper.end for mapper in mappers),
        resident=resident(status) if status else None,
        huge_share=None,
        mapped_by=tuple(mappers),
    )


def _find_huge_share(file: File, row: Row) -> float | None:
    """Ask those who map it, until one of them has mapped all there is: asking is slow where pages are small."""
    whole = row.resident if row.resident is not None else row.size
    most: int | None = None
    for mapper in row.mapped_by:
        figures = read_huge(mapper.pid, file)
        if figures is not None:
            huge, present = figures
            most = max(most or 0, huge)
            if present >= whole:
                break
    return None if most is None or not whole else min(1.0, most / whole)
