"""Every error aioshm raises, with its facts as attributes and a message that says what to do.

    AioshmError (RuntimeError)
    ├── InsufficientSpaceError                     the file system has no room
    ├── InsufficientMemoryError (MemoryError)      a memory cgroup or the host has no room
    ├── ShortFileError (EOFError)                  a file that is loaded has too few bytes
    ├── JoinTimeoutError (TimeoutError)            ranks never came, or nobody finished what was begun
    ├── PeerLostError                              a rank that had come went away before all were ready
    ├── RankInUseError                             another living process has this local rank
    ├── RegionMismatchError (ValueError)           same name, another size or local world size
    ├── RegionAccessError (PermissionError)        something at the path is not a region of ours
    ├── RegionRemovedError                         somebody deleted the name from outside
    ├── RegionClosedError                          you closed it
    ├── HugePagesUnavailableError                  huge_pages="require" could not be met
    ├── CohortEnvironmentError (ValueError)        no launcher's variables, or they contradict each other
    ├── UnsuitableDirectoryError                   missing, read-only, or not in memory
    └── UnsupportedPlatformError                   not Linux, or a kernel without what it takes

An error is made from its facts alone and writes its own message, so it pickles by its facts
(a rank process sends it to its parent) and no two places word the same failure differently.
"""

from __future__ import annotations

from typing import Any

from ._files import sweep_command
from ._units import mib, mib_down, mib_up


class AioshmError(RuntimeError):
    """The root of every error that aioshm raises on purpose: catch it to handle all of them.

    An `open_region` that raises leaves nothing: no name in the directory, no memory, no descriptor, no thread. What
    another call leaves is said where it is documented.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class: what others hang on an error (notes, an error tracker's id) are no arguments of it.
        return _rebuild, (type(self), self.args), dict(self.__dict__)


class InsufficientSpaceError(AioshmError):
    """The file system of the directory has no room for the region.

    Attributes:
        allocation_name: What the memory was for.
        directory: Where it was to stand.
        required: Bytes still needed.
        available: Bytes free when it was looked at.
        hint: What the caller wanted its users to be told, or None.
        reclaimable_leftovers: Bytes that regions of this user's dead processes take there.
        huge_page: Bytes of a page where the directory is a hugetlbfs, which takes its pages from a pool; else None.
    """

    def __init__(
        self,
        *,
        allocation_name: str,
        directory: str,
        required: int,
        available: int,
        hint: str | None = None,
        reclaimable_leftovers: int = 0,
        huge_page: int | None = None,
    ) -> None:
        self.allocation_name = allocation_name
        self.directory = directory
        self.required = required
        self.available = available
        self.hint = hint
        self.reclaimable_leftovers = reclaimable_leftovers
        self.huge_page = huge_page
        super().__init__(
            f"Insufficient space in {directory} for {allocation_name}: {mib_up(required)} MiB required, "
            f"{mib_down(available)} MiB free ({mib_up(required - available)} MiB short)."
            f"{_leftovers(reclaimable_leftovers, directory)} {_how_to_grow(directory, huge_page)}{_tail(hint)}"
        )


class InsufficientMemoryError(AioshmError, MemoryError):
    """A memory cgroup, the host, or a NUMA node that was asked for, has no room; raised instead of an OOM kill.

    Attributes:
        allocation_name: What the memory was for.
        level: The limit that binds: the path of a cgroup directory, `"host"`, or a NUMA node such as `"node 1"`.
        required: Bytes still needed.
        limit: Bytes the level allows altogether.
        usage: Bytes in use there.
        reclaimable: Bytes of `usage` that the kernel would give up, such as clean file cache.
        hint: What the caller wanted its users to be told, or None.
        huge_page: Bytes of a page where it is a cgroup's limit on hugetlb pages; None for every other level.
    """

    def __init__(
        self,
        *,
        allocation_name: str,
        level: str,
        required: int,
        limit: int,
        usage: int,
        reclaimable: int,
        hint: str | None = None,
        huge_page: int | None = None,
    ) -> None:
        self.allocation_name = allocation_name
        self.level = level
        self.required = required
        self.limit = limit
        self.usage = usage
        self.reclaimable = reclaimable
        self.hint = hint
        self.huge_page = huge_page
        available = self.available
        if level == "host":
            where, remedy = "on this host", "Ask for less, or free memory on the host."
        elif level.startswith("node "):
            where, remedy = (
                f"on NUMA {level}",
                "Ask for less, free memory there, or let it lie on other nodes too (numa=).",
            )
        elif huge_page is not None:
            where = f"for hugetlb pages in cgroup {level}"
            remedy = "Ask for less, or raise the limit on huge pages of the container or pod (hugepages-2Mi, for one)."
        else:
            where = f"in memory cgroup {level}"
            remedy = "Ask for less, or raise the memory limit of the container or pod."
        super().__init__(
            f"Insufficient memory {where} for {allocation_name}: {mib_up(required)} MiB required, "
            f"{mib_down(available)} MiB available ({mib_up(required - available)} MiB short): limit {mib(limit)} MiB, "
            f"in use {mib(usage)} MiB of which {mib(reclaimable)} MiB reclaimable. {remedy}" + _tail(hint)
        )

    @property
    def available(self) -> int:
        """Bytes that could have been had: the limit less what is in use and cannot be reclaimed."""
        return max(0, self.limit - self.usage + self.reclaimable)


class ShortFileError(AioshmError, EOFError):
    """A file that is loaded into a region has fewer bytes than are needed.

    Attributes:
        path: The file.
        file_offset: Byte of it at which the load begins.
        required: Bytes needed from there on.
        available: Bytes there.
        shrank: False where it was seen before a byte of the region was written; True where the file became shorter
            while it was read, and the region holds a part of it.
    """

    def __init__(self, *, path: str, file_offset: int, required: int, available: int, shrank: bool) -> None:
        self.path = path
        self.file_offset = file_offset
        self.required = required
        self.available = available
        self.shrank = shrank
        super().__init__(
            f"{path} is too short: {required} bytes are needed from byte {file_offset} on, and {available} are there"
            + (", since it shrank while it was read" if shrank else "")
            + ". See whether it was copied or downloaded to its end, and whether it is still being written."
        )


class JoinTimeoutError(AioshmError, TimeoutError):
    """The ranks of the cohort did not all come in time, or without a cohort: nobody was at work on the region.

    Attributes:
        name: The region's name.
        path: Its file.
        waited: Seconds waited.
        missing: The local ranks that never came; empty where nobody was at work on the region instead.
        local_world_size: How many ranks there should be; None where `missing` is empty.
    """

    def __init__(
        self,
        *,
        name: str,
        path: str,
        waited: float,
        missing: tuple[int, ...] = (),
        local_world_size: int | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.waited = waited
        self.missing = missing
        self.local_world_size = local_world_size
        if missing:
            text = (
                f"{_ranks(missing).capitalize()} of {local_world_size} never came to region {name!r} ({path}) within "
                f"{waited:.1f} s. Ranks are local: all of them must run on this host, see the same directory and pass "
                "the same name. See whether they started, and whether local_world_size is the number of ranks per "
                "host, not of all hosts together. If they run already, their cohort was released, and no rank can come "
                "back to it alone: restart all ranks of this host."
            )
        else:
            text = (
                f"Region {name!r} was not ready after {waited:.1f} s: {path} is held by a process that neither "
                "finishes nor abandons it. See who has it open (e.g. fuser -v), end that process, and open it again."
            )
        super().__init__(text)


class PeerLostError(AioshmError):
    """Ranks that had come went away before the region was ready; it will never be.

    Attributes:
        name: The region's name.
        lost: The local ranks that went, in order.
        pids: Their process ids, in the same order, as they are in their own pid namespace; None where unknown.
        missing: The local ranks that had not come by then.
        oom_killed_in: The memory cgroups in which the OOM killer took a process meanwhile.
    """

    def __init__(
        self,
        *,
        name: str,
        lost: tuple[int, ...],
        pids: tuple[int | None, ...],
        missing: tuple[int, ...] = (),
        oom_killed_in: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.lost = lost
        self.pids = pids
        self.missing = missing
        self.oom_killed_in = oom_killed_in
        gone = ", ".join(
            f"rank {rank}" + (f" (pid {pid})" if pid is not None else "") for rank, pid in zip(lost, pids, strict=True)
        )
        absent = f" {_ranks(missing).capitalize()} had never come." if missing else ""
        cause = (
            f" Meanwhile the OOM killer took a process: oom_kill rose in {', '.join(oom_killed_in)}. Raise that memory "
            "limit, or ask for less."
            if oom_killed_in
            else f" Most likely they gave up waiting for {_ranks(missing)}: see why that did not start."
            if missing
            else " The cause stands in the log of a rank with another error than this one; then start all ranks again."
        )
        super().__init__(
            f"Region {name!r} cannot become ready: {gone} went away while it was being made.{absent}{cause}"
        )


class RankInUseError(AioshmError):
    """Another living process holds this local rank of the region.

    Attributes:
        name: The region's name.
        local_rank: The rank.
        pid: The process that holds it, as it is in its own pid namespace; None where unknown.
    """

    def __init__(self, *, name: str, local_rank: int, pid: int | None = None) -> None:
        self.name = name
        self.local_rank = local_rank
        self.pid = pid
        holder = f"pid {pid}" if pid is not None else "another process"
        super().__init__(
            f"Local rank {local_rank} of region {name!r} is taken by {holder}. Every process needs a local rank of its "
            "own (LOCAL_RANK under torchrun, not a device number); two engines need two names."
        )


class RegionMismatchError(AioshmError, ValueError):
    """A living region of this name was opened with other arguments.

    Attributes:
        name: The region's name.
        field: The argument that differs, such as `"size"`.
        expected: Its value in this call.
        found: Its value in the living region.
    """

    def __init__(self, *, name: str, field: str, expected: int, found: int) -> None:
        self.name = name
        self.field = field
        self.expected = expected
        self.found = found
        if field == "local_world_size" and not (expected and found):
            with_ranks = f"as a cohort of {max(expected, found)} ranks"
            there, asked = (with_ranks, "without ranks") if found else ("without ranks", with_ranks)
        else:
            there, asked = f"with {field} {found}", f"with {field} {expected}"
        super().__init__(
            f"Region {name!r} exists {there}, but was opened {asked}. Every process must "
            "pass the same; two regions at a time need two names (put the engine's or replica's id into the name)."
        )


class RegionAccessError(AioshmError, PermissionError):
    """What stands at the region's path is not a region of this user, and was left as it is.

    Attributes:
        path: The region's file.
        reason: What is wrong with it.
    """

    def __init__(self, *, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} cannot be used as a region: {reason}. Remove it, or choose another name.")


class RegionRemovedError(AioshmError):
    """The region's name was deleted from outside before the region was ready.

    Attributes:
        path: The file that is gone.
    """

    def __init__(self, *, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path} was deleted while the region was being made. Look for a cleaner: rm, a tmpfiles rule, or "
            "systemd's RemoveIPC=yes, which empties /dev/shm of a user at the end of the user's last login."
        )


class RegionClosedError(AioshmError):
    """The region was used after it was closed (or after a fork, in the child).

    Attributes:
        name: The region's name.
    """

    def __init__(self, *, name: str) -> None:
        self.name = name
        super().__init__(
            f"Region {name!r} is closed, or was opened before a fork and is not open in this child. Use it inside its "
            "'async with' block, in the process that opened it; views made there stay valid."
        )


class HugePagesUnavailableError(AioshmError):
    """`huge_pages="require"` was asked for, and the kernel gave small pages.

    Attributes:
        allocation_name: What the memory was for.
        directory: Where it was to stand.
        reason: Why not, as far as the kernel says.
    """

    def __init__(self, *, allocation_name: str, directory: str, reason: str) -> None:
        self.allocation_name = allocation_name
        self.directory = directory
        self.reason = reason
        super().__init__(
            f"No huge pages for {allocation_name} in {directory}: {reason}. Linux 6.1 or newer is needed, and "
            '/sys/kernel/mm/transparent_hugepage/shmem_enabled must not be "deny"; or use huge_pages="try".'
        )


class CohortEnvironmentError(AioshmError, ValueError):
    """No cohort can be read from the environment; nothing was guessed.

    Attributes:
        reason: Which variables are missing, are no numbers, or contradict each other.
        launchers: Who started this process, as far as the variables say: of `"torchrun"`, `"Open MPI"` and `"Slurm"`.
            Empty where none did, which a program that also runs alone may take for a world of one.
    """

    def __init__(self, *, reason: str, launchers: tuple[str, ...] = ()) -> None:
        self.reason = reason
        self.launchers = launchers
        super().__init__(
            f"No cohort can be read from the environment: {reason}. Start the ranks with torchrun, mpirun or srun; or "
            "say it yourself: aioshm.Cohort(local_rank=..., local_world_size=..., job=...)."
        )


class UnsuitableDirectoryError(AioshmError):
    """The directory cannot hold a region.

    Attributes:
        directory: The directory.
        reason: Why not.
    """

    def __init__(self, *, directory: str, reason: str) -> None:
        self.directory = directory
        self.reason = reason
        super().__init__(
            f"{directory} cannot hold a region: {reason}. Use /dev/shm, or another tmpfs or hugetlbfs mount."
        )


class UnsupportedPlatformError(AioshmError):
    """This platform lacks what aioshm is made of.

    Attributes:
        reason: What is missing.
    """

    def __init__(self, *, reason: str) -> None:
        self.reason = reason
        super().__init__(f"aioshm does not work here: {reason}. It needs 64-bit Linux.")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"local rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _how_to_grow(directory: str, huge_page: int | None) -> str:
    if huge_page is None:
        return (
            f"Increase {directory} "
            "(e.g. --shm-size or --ipc=host, or an emptyDir with medium: Memory and a larger sizeLimit)."
        )
    pool = f"/sys/kernel/mm/hugepages/hugepages-{huge_page // 1024}kB/nr_hugepages"
    return f"Increase the pool ({pool}, or a pod's limit of hugepages) and the mount's size=, where it has one."


def _leftovers(size: int, directory: str) -> str:
    if mib_down(size) == "0.0":
        return ""
    return f" Leftovers of dead processes take {mib_down(size)} MiB of it: `{sweep_command(directory)}` frees them."


def _tail(hint: str | None) -> str:
    return f" {hint}" if hint else ""


def _rebuild(kind: type[AioshmError], args: tuple[Any, ...]) -> AioshmError:
    # Whose memory layout it has: Python refuses the `__new__` of the other base.
    error: AioshmError = (OSError if issubclass(kind, OSError) else RuntimeError).__new__(kind)
    error.args = args
    return error


for _error in (AioshmError, *AioshmError.__subclasses__()):
    _error.__module__ = "aioshm"
