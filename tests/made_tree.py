"""A made `/` for what reads /proc and /sys: control groups, memory and huge-page pools, as garbled as wanted."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from aioshm._cgroup import MemoryFigures, MemoryLevel, memory_levels, read_figures

V1_UNLIMITED = 0x7FFFFFFFFFFFF000
MEMORY = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"


class Tree:
    """A made `/`: what /proc/self says, and group directories with their files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw"]
        self.write("/proc/self/mountinfo", self.mounts[0] + "\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(text))

    def inside(self, *memberships: str) -> None:
        """Say what /proc/self/cgroup says."""
        self.write("/proc/self/cgroup", "".join(line + "\n" for line in memberships))

    def mount(
        self, where: str, *, version: int, root: str = "/", controllers: str = "memory", optional: str = ""
    ) -> None:
        """Say that a hierarchy, or a part of it, is mounted; octal escapes are the caller's."""
        kind = "cgroup2 cgroup2 rw,nsdelegate" if version == 2 else f"cgroup cgroup rw,{controllers}"
        self.mounts.append(f"{30 + len(self.mounts)} 25 0:26 {root} {where} rw,nosuid{optional} - {kind}")
        self.write("/proc/self/mountinfo", "".join(line + "\n" for line in self.mounts))

    def v1(self, path: str, limit: int | str, usage: int | str, stat: str = "") -> None:
        self.write(f"{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{path}/memory.stat", stat)

    def v2(self, path: str, limit: int | str, usage: int | str, stat: str = "") -> None:
        self.write(f"{path}/memory.max", f"{limit}\n")
        self.write(f"{path}/memory.current", f"{usage}\n")
        self.write(f"{path}/memory.stat", stat)

    def levels(self) -> list[str]:
        """The directories found, as paths of the tree."""
        return [level.path.removeprefix(str(self.root)) for level in memory_levels(str(self.root))]

    def figures(self, host_swap: int = 0) -> list[MemoryFigures]:
        found = read_figures(memory_levels(str(self.root)), host_swap)
        return [dataclasses.replace(one, level=one.level.removeprefix(str(self.root))) for one in found]

    def level(self, path: str, version: int) -> MemoryLevel:
        """Return the level whose directory is `path`."""
        return MemoryLevel(f"{self.root}{path}", version)

    def meminfo(self, *, total: int, available: int, swap_free: int = 0) -> None:
        """Say what /proc/meminfo says, in bytes."""
        lines = {
            "MemTotal": total,
            "MemFree": 0,
            "MemAvailable": available,
            "SwapTotal": 1 << 40,
            "SwapFree": swap_free,
        }
        text = "".join(f"{key + ':':<16}{value // 1024:>12} kB\n" for key, value in lines.items())
        self.write("/proc/meminfo", text + "HugePages_Total:       0\nHugepagesize:       2048 kB\n")

    def pool(self, page: int, *, free: int, reserved: int = 0, overcommit: int = 0, surplus: int = 0) -> None:
        """Say how many huge pages of `page` bytes there are."""
        where = f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB"
        self.write(f"{where}/free_hugepages", f"{free}\n")
        self.write(f"{where}/resv_hugepages", f"{reserved}\n")
        self.write(f"{where}/nr_overcommit_hugepages", f"{overcommit}\n")
        self.write(f"{where}/surplus_hugepages", f"{surplus}\n")
