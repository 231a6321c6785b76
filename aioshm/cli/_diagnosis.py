"""What `aioshm doctor` concludes: an examination in, sentences out, first the verdict and then what to change."""

from __future__ import annotations

import errno
import shlex

from aioshm._errors import InsufficientSpaceError
from aioshm._picture import HugePagesReport

from ._examination import Examination
from ._sizes import in_words, seconds_in_words
from ._verdict import Finding

_POOLS = "/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages"
_DEFRAGMENT = "echo 1 > /proc/sys/vm/compact_memory, or a hugetlbfs directory with pages set aside at boot"
_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def diagnose(found: Examination) -> list[Finding]:
    """Return the verdict: what stands in the way, or that nothing does, and what would make it better."""
    findings = [Finding(held=False, text=str(problem)) for problem in found.report.problems]
    if found.report.fits:
        findings += _tell_fit(found)
    if found.report.largest and (found.size is None or not found.report.fits):
        findings.append(Finding(None, f"The largest region that fits right now: {_at_most(found.report.largest)}."))
    told = any(getattr(problem, "reclaimable_leftovers", 0) for problem in found.report.problems)
    if found.leftovers and not told:
        findings.append(Finding(None, _tell_leftovers(found)))
    remedy = find_remedy(found)
    if remedy is not None:
        findings.append(Finding(None, remedy))
    return findings


def _tell_fit(found: Examination) -> list[Finding]:
    if found.size is None:
        return [Finding(held=True, text=f"A region can stand in {found.report.directory.path}.")]
    text = f"{in_words(found.size)} fit"
    if found.report.warning is not None:
        text += " once the kernel has dropped caches or swapped, which takes time and may slow others down"
    return [Finding(held=True, text=f"{text}.")]


def tell_time(found: Examination) -> str | None:
    """Say how fast memory is populated, and how long the region would take; None where it was not measured."""
    if found.sample is None:
        return None
    threads = f"{found.sample.threads} thread{'s' if found.sample.threads > 1 else ''}"
    text = f"{in_words(int(found.sample.rate))}/s with {threads}, measured on {in_words(found.sample.size)}"
    if found.size is not None and found.ready_seconds is not None:
        text += f": {in_words(found.size)} would take about {_about(found.ready_seconds)}"
    return text


def _at_most(size: int) -> str:
    """Return a size that is not rounded up, and may be passed on as it is."""
    return in_words(size) if size < 1 << 20 else f"{size >> 20} MiB"


def _about(seconds: float) -> str:
    if seconds < 10:
        return seconds_in_words(seconds) if seconds < 1 else f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def find_remedy(found: Examination) -> str | None:
    """Say what to set for (more) huge pages; None where there is nothing to say."""
    trial, sample, facts = found.huge_pages, found.sample, found.report.huge_pages
    if facts.pool_free is not None:
        if not any(isinstance(problem, InsufficientSpaceError) for problem in found.report.problems):
            return None
        pool = _POOLS.format(facts.page // 1024)
        return f"For more pages in the pool: echo NUMBER > {pool} (and raise the mount's size=, if it has one)."
    if trial is None:
        return None
    if trial.way is None:
        return _for_any(trial.code, facts, found.report.directory.mount_point)
    if sample is not None and sample.huge < sample.size:
        return (
            f"Huge pages for {sample.huge / sample.size:.0%} of the sample only: free memory is fragmented. "
            f"For more: {_DEFRAGMENT}."
        )
    return None


def _for_any(code: int, facts: HugePagesReport, mount_point: str | None) -> str:
    if facts.shmem_enabled == "deny":
        return f"For huge pages: echo never > {_SHMEM_ENABLED} (anything but deny will do)."
    if code == errno.EINVAL and mount_point is not None:
        return f"For huge pages: Linux 6.1 or newer, or mount -o remount,huge=within_size {mount_point}."
    return f"For huge pages: {_DEFRAGMENT}."


def _tell_leftovers(found: Examination) -> str:
    which = ", ".join(each.name for each in found.leftovers[:3]) + (", ..." if len(found.leftovers) > 3 else "")
    many = len(found.leftovers) > 1
    directory = found.report.directory.path
    command = "aioshm gc" if directory == "/dev/shm" else f"aioshm gc --directory {shlex.quote(directory)}"
    return (
        f"{len(found.leftovers)} region{'s' if many else ''} of dead processes ({which}) "
        f"take{'' if many else 's'} {in_words(found.leftover_bytes)}: {command} frees {'them' if many else 'it'}."
    )
