"""What the kernel says of a mapped region, and whether it makes huge pages here."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import aioshm
from aioshm import _libc
from aioshm._libc import HUGE_PAGE, PAGE
from aioshm._mapping import Mapping, unmap


@functools.cache
def collapse_works() -> bool:
    """Ask the kernel, on a file beside the regions: it needs 6.1, and shmem_enabled other than "deny"."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(HUGE_PAGE)
        mapping = Mapping(file.fileno(), size=HUGE_PAGE, page=PAGE)
        try:
            _libc.try_madvise(mapping.address, PAGE, _libc.MADV_POPULATE_WRITE)
            return _libc.try_madvise(mapping.address, HUGE_PAGE, _libc.MADV_COLLAPSE) == 0
        finally:
            unmap(mapping.release())


def mapped(region: aioshm.Region, field: str) -> int:
    """Return bytes of `field` in /proc/self/smaps, over all of the region's mappings here."""
    return mapped_by("self", region.path, field)


def mapped_by(process: int | str, path: str, field: str) -> int:
    """Return the same of a process, over all its mappings of a file whose path has `path` in it."""
    areas = re.split(r"^(?=[0-9a-f]+-)", Path(f"/proc/{process}/smaps").read_text(), flags=re.MULTILINE)
    ours = [area for area in areas if path in area]
    return sum(int(kib) * 1024 for area in ours for kib in re.findall(rf"^{field}: +(\d+) kB", area, re.MULTILINE))


def flags(region: aioshm.Region) -> list[str]:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    here, found = False, []
    for line in lines:
        if re.match(r"[0-9a-f]+-", line):
            here = region.path in line
        elif here and line.startswith("VmFlags:"):
            found.append(line)
    return found


def bytes_by_node(region: aioshm.Region) -> dict[int, int]:
    """Ask /proc/self/numa_maps where the region's pages are; numa(7). Its mapping must be in one piece."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (line,) = [line for line in lines if f"file={region.path}" in line]
    page = re.search(r"kernelpagesize_kB=(\d+)", line)  # not there where nothing is mapped yet
    size = int(page[1]) * 1024 if page else 0
    return {int(node): int(count) * size for node, count in re.findall(r"\bN(\d+)=(\d+)", line)}


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
