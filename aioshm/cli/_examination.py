"""What `aioshm doctor` looks at: the preflight, and what else decides how a region would come to be here."""

from __future__ import annotations

import asyncio
import os
import resource
from dataclasses import asdict, dataclass, replace
from typing import Any

from aioshm import __version__
from aioshm._cgroup import own_cpu_quota
from aioshm._errors import AioshmError
from aioshm._host import Node, read_memory, read_nodes
from aioshm._leftovers import Found, find_regions
from aioshm._pace import thread_count
from aioshm._picture import PreflightReport, preflight

from ._trial import HugePageTrial, Sample, choose_sample_size, make_request, measure, trial_size, try_huge_pages

_ANY_SIZE = 64 << 30  # where nobody asks about a size: large enough for all threads


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that was found. Sizes are bytes.

    Attributes:
        size: The size asked about; None where none was, and the report is about a single page.
        report: The preflight.
        leftovers: Regions of this user's dead processes in the directory.
        swap_free: What the host can still swap out; None where it does not say.
        nodes: The NUMA nodes that have memory.
        cpus: Processors in the affinity mask.
        quota: Processors' worth of time that the control groups allow; None: no limit.
        threads: In how many threads a region of that size would be populated.
        memlock: The soft RLIMIT_MEMLOCK; None: no limit.
        huge_pages: What came of asking for huge pages; None where that was not tried.
        sample: How fast memory is populated; None where that was not measured.
        untried: Why it was not.
    """

    size: int | None
    report: PreflightReport
    leftovers: tuple[Found, ...]
    swap_free: int | None
    nodes: tuple[Node, ...]
    cpus: int
    quota: float | None
    threads: int
    memlock: int | None
    huge_pages: HugePageTrial | None
    sample: Sample | None
    untried: str | None

    @property
    def ready_seconds(self) -> float | None:
        """How long a region of the size asked about would take, at the sample's rate; None where that is unknown."""
        return self.size / self.sample.rate if self.size and self.sample else None

    @property
    def leftover_bytes(self) -> int:
        """What the leftovers take."""
        return sum(each.resident for each in self.leftovers)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        return {
            "version": __version__,
            **asdict(replace(self, report=replace(self.report, problems=()))),
            "report": self.report.to_dict(),
            "sample": {**asdict(self.sample), "rate": self.sample.rate} if self.sample else None,
            "leftover_bytes": self.leftover_bytes,
            "ready_seconds": self.ready_seconds,
        }


def examine(size: int | None, directory: str) -> Examination:
    """Look at everything, and try what has to be tried; a second or two, and nothing is left."""
    return asyncio.run(_examine(size, directory))


async def _examine(size: int | None, directory: str) -> Examination:
    report = await preflight(size or 1, directory=directory, allocation_name="the region")
    request = make_request(size or _ANY_SIZE, directory)
    quota = own_cpu_quota()
    host = read_memory()
    found = Examination(
        size=size,
        report=report,
        leftovers=_find_leftovers(directory),
        swap_free=host.swap_free if host else None,
        nodes=read_nodes(),
        cpus=len(os.sched_getaffinity(0)),
        quota=quota,
        threads=thread_count(request, request.size, quota),
        memlock=_read_memlock(),
        huge_pages=None,
        sample=None,
        untried=None,
    )
    return await _try_out(found)


async def _try_out(found: Examination) -> Examination:
    """Return it with what trials showed, as far as there is room for them: a quarter of what is free at the most."""
    where, room = found.report.directory, found.report.largest
    if room == 0:
        return replace(found, untried="no region fits there, of whatever size")
    size = choose_sample_size(found.threads, where.page, room)
    if size < trial_size(where.page):
        return replace(found, untried="there is too little room to try it")
    try:
        found = replace(found, huge_pages=await try_huge_pages(where.path, where.page))
        return replace(found, sample=await measure(where.path, where.page, size))
    except (AioshmError, OSError) as error:  # others took the room meanwhile
        return replace(found, untried=str(error))


def _find_leftovers(directory: str) -> tuple[Found, ...]:
    try:
        return tuple(each for each in find_regions(directory) if each.state == "leftover" and each.ours)
    except OSError:
        return ()


def _read_memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
