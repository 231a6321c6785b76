"""Control groups made for a test: real limits of memory, real OOM kills; real quotas of processor time."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ranks import Rank, RankCrew

_serial = itertools.count()


@dataclass(frozen=True)
class Controller:
    """Where the memory controller is mounted, and which version it has."""

    mount: Path
    version: int


def find_memory_controller() -> Controller | None:
    """Return the mounted memory controller, v1 before v2 as on hybrid hosts."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            return Controller(Path(before.split(" ")[4]), 1)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split(" ")[4])
        if after.split(" ")[0] == "cgroup2" and "memory" in (mount / "cgroup.controllers").read_text().split():
            return Controller(mount, 2)
    return None


class MemoryGroup:
    """One group. Processes join it before they run (`enter`, as a preexec step of a rank)."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version

    @classmethod
    def make(cls, controller: Controller, *, limit: int | None, parent: MemoryGroup | None) -> MemoryGroup:
        above = parent.path if parent is not None else controller.mount
        if controller.version == 2:
            (above / "cgroup.subtree_control").write_text("+memory")
        path = above / f"aioshm-test-{os.getpid()}-{next(_serial)}"
        path.mkdir()
        group = cls(path, controller.version)
        if controller.version == 1:
            (path / "memory.use_hierarchy").write_text("1") if (path / "memory.use_hierarchy").exists() else None
        if limit is not None:
            group.set_limit(limit)
        return group

    def set_limit(self, limit: int) -> None:
        self._file("memory.limit_in_bytes", "memory.max").write_text(str(limit))

    @property
    def usage(self) -> int:
        return int(self._file("memory.usage_in_bytes", "memory.current").read_text())

    @property
    def oom_kills(self) -> int:
        text = self._file("memory.oom_control", "memory.events").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def enter(self) -> None:
        """Move the calling process in: for `preexec_fn`."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        _remove(self.path)

    def _file(self, v1: str, v2: str) -> Path:
        return self.path / (v1 if self.version == 1 else v2)


class CpuGroup:
    """A group that may use so many processors' worth of time."""

    def __init__(self, path: Path, version: int, quota: float) -> None:
        self.path = path
        self.version = version
        file, text = ("cpu.cfs_quota_us", "{}") if version == 1 else ("cpu.max", "{} 100000")
        (path / file).write_text(text.format(int(quota * 100_000)))

    @classmethod
    def make(cls, quota: float) -> CpuGroup | None:
        """Make one; None where this process may not."""
        for mount, version in ((Path("/sys/fs/cgroup/cpu"), 1), (Path("/sys/fs/cgroup"), 2)):
            if (mount / "cgroup.procs").exists() and os.geteuid() == 0:
                path = mount / f"aioshm-test-{os.getpid()}-{next(_serial)}"
                try:
                    path.mkdir()
                except OSError:
                    return None
                try:
                    return cls(path, version, quota)
                except OSError:  # the controller is not there
                    path.rmdir()
                    return None
        return None

    @property
    def throttled(self) -> float:
        """For how many seconds its threads were kept from running, one by one, because the quota was used up."""
        stat = dict(line.split() for line in (self.path / "cpu.stat").read_text().splitlines())
        return int(stat["throttled_time"]) / 1e9 if self.version == 1 else int(stat["throttled_usec"]) / 1e6

    def enter(self) -> None:
        """Move the calling process in: for `preexec_fn`."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        _remove(self.path)


def _remove(path: Path) -> None:
    for _ in range(200):  # a killed process leaves its group a moment after it was reaped
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.01)
        else:
            return
    path.rmdir()


def start_in(ranks: RankCrew, group: MemoryGroup) -> Rank:
    """Start a rank inside the group that has loaded what an open loads, and keeps what is logged."""
    rank = ranks.start(preexec=group.enter)
    rank.ask("warm_up")
    rank.ask("listen")
    return rank
