"""Which memory nodes a region's pages lie on: said to the kernel before the first touch, and asked of it afterwards.

On a tmpfs the policy is the file's (mm/shmem.c: shmem_set_policy): whoever touches a page, in whatever process and
however late, it lies where the file says. So it is set through a window that is mapped for the call only, and the
region's own mapping stays in one piece however many stripes there are: the kernel cuts a mapping wherever the policy
changes, and a process may have 65,530 pieces. On hugetlbfs it is the mapping's, and each process says it for itself.

MADV_COLLAPSE asks no policy: the huge page lies where the one small page lies that was touched for it. Under the
kernel's own interleaving, page by page, these are every 512th, and all on one node. So whoever wants several nodes
gets whole huge pages' worth from each in turn, stripe by stripe.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, replace

from . import _libc, _preflight
from ._host import read_allowed_nodes, read_node_numbers
from ._libc import HUGE_PAGE
from ._log import log
from ._mapping import Mapping
from ._request import Request
from ._threads import StopFlag, run_through
from ._units import mib

# A stripe takes 12 microseconds to set, in which 120 KiB could be populated, and 0.3 KiB of the kernel's memory for as
# long as the file lives. Small regions get fine ones, for an even spread; none is larger than what a few threads
# populate at a time, or all of them would wait for the memory of one node.
_FINE_STRIPES = 512
_LARGEST_STRIPE = 8 * HUGE_PAGE

# Pages asked about in one call: what lies between two of them holds the interpreter lock.
_QUESTION = 512


@dataclass(frozen=True)
class Policy:
    """What the kernel is told of a part of the region: see set_mempolicy(2).

    Attributes:
        part: Bytes of the region.
        mode: One of the MPOL constants.
        nodes: Where they shall lie; none stands for the node of whoever touches first.
    """

    part: range
    mode: int
    nodes: tuple[int, ...]


def check_numbers(request: Request) -> None:
    """See that the nodes that were asked for are there, before anything is touched.

    Raises:
        ValueError: One does not exist, has no memory, or is none of this process's cpuset.
    """
    if not isinstance(request.numa, tuple):
        return
    known = read_allowed_nodes()
    wrong = [node for node in request.numa if node not in known]
    if known and wrong:  # none is known where they cannot be read
        raise ValueError(
            f"numa names {_listed(wrong)}, and the memory that this process may use is on {_listed(known)} "
            "(/sys/devices/system/node/has_memory, and Mems_allowed_list in /proc/self/status)"
        )


async def place(request: Request, mapping: Mapping, fd: int, *, span: range, makes: bool) -> Request:
    """Tell the kernel where this process's share shall lie, before anything is touched.

    Args:
        request: What was asked for.
        mapping: The region's.
        fd: Its file.
        span: This process's share, in bytes of the region.
        makes: Whether this process makes its pages, and is not one that joins what others made.

    Returns:
        The request; without its nodes where they do not hold, so that nobody counts on them: all memory is on one node
        anyway, or the kernel refused.

    Raises:
        InsufficientMemoryError: A node that was asked for has no room for its part.
        OSError: Whatever else the kernel says.

    Cancellation:
        Felt at once.
    """
    if request.numa is None or not span:
        return request
    if len(read_node_numbers()) < 2:
        return replace(request, numa=None)
    return await run_through(lambda stop: _place(request, mapping, fd, span, makes=makes, stop=stop), name="numa")


def _place(request: Request, mapping: Mapping, fd: int, span: range, *, makes: bool, stop: StopFlag) -> Request:
    is_hugetlb = mapping.page > _libc.PAGE
    if not makes and not is_hugetlb:  # the file has its policy, and its pages
        return request
    nodes = request.numa if isinstance(request.numa, tuple) else read_allowed_nodes()
    if not nodes:  # it cannot be read which
        return replace(request, numa=None)
    policies = list(choose_policies(request, nodes, span, length=mapping.length, page=mapping.page))
    if not _tell(policies, mapping, fd, stop):
        _warn_of_refusal(request.allocation_name)
        return replace(request, numa=None)
    if makes and isinstance(request.numa, tuple):
        # Bound memory knows no other node: without room there the OOM killer would come, and a pool's say EFAULT.
        parts = needed(policies, len(span))
        if is_hugetlb:
            _preflight.check_node_pools(request, parts, mapping.page)
        else:
            _preflight.check_nodes(request, parts)
    return request


def choose_policies(request: Request, nodes: Sequence[int], span: range, *, length: int, page: int) -> Iterator[Policy]:
    """Yield what the kernel has to be told.

    To bind is strict: a node that is full raises an error before the kernel would look elsewhere. To interleave is not:
    what a node has no room for lies on another. The pages of a pool are interleaved over several nodes also where they
    are to be bound: for them a look at the nodes' pools beforehand has to do.
    """
    chosen = tuple(nodes)
    if page > _libc.PAGE:  # the kernel interleaves by whole pages of the pool, whoever touches which
        mode = _libc.MPOL_BIND if len(chosen) == 1 else _libc.MPOL_INTERLEAVE
        local = request.numa == "first-touch"
        yield Policy(range(length), _libc.MPOL_PREFERRED if local else mode, () if local else chosen)
    elif request.numa == "first-touch":
        yield Policy(span, _libc.MPOL_PREFERRED, ())
    else:
        mode = _libc.MPOL_PREFERRED if request.numa == "interleave" else _libc.MPOL_BIND
        for part, node in stripes(span, length, chosen):
            yield Policy(part, mode, (node,))


def stripes(span: range, length: int, nodes: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Deal the span out to the nodes in turn; where a stripe ends and whose it is depends on the region alone.

    So ranks that ask for the same get an even spread over the region together, however small their shares.
    """
    huge_pages = max(1, length // _FINE_STRIPES // HUGE_PAGE)
    size = min(huge_pages * HUGE_PAGE, _LARGEST_STRIPE) if len(nodes) > 1 else length
    start = span.start
    while start < span.stop:
        number = start // size
        end = min(span.stop, (number + 1) * size)
        yield range(start, end), nodes[number % len(nodes)]
        start = end


def needed(policies: Sequence[Policy], share: int) -> dict[int, int]:
    """Return how many bytes of the share each node has to hold."""
    total: dict[int, int] = {}
    for policy in policies:
        for node in policy.nodes:
            bytes_ = min(len(policy.part), share) // len(policy.nodes)
            total[node] = total.get(node, 0) + bytes_
    return total


def _tell(policies: Sequence[Policy], mapping: Mapping, fd: int, stop: StopFlag) -> bool:
    """Say it to the kernel; False where it does not let us."""
    if mapping.page > _libc.PAGE:
        return all(_bind(mapping.address + policy.part.start, policy) for policy in policies)
    with _libc.reopened(fd) as own:
        for policy in policies:
            if stop:
                break
            length = len(policy.part)
            window = _libc.mmap(None, length, _libc.PROT_NONE, _libc.MAP_SHARED, own, policy.part.start)
            try:
                if not _bind(window, policy):
                    return False
            finally:
                _libc.munmap(window, length)
    return True


def _bind(address: int, policy: Policy) -> bool:
    code = _libc.try_mbind(address, len(policy.part), policy.mode, policy.nodes)
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return False
    if code:
        raise OSError(code, f"mbind to {_listed(policy.nodes)}: {os.strerror(code)}")
    return True


async def find_nodes(mapping: Mapping, span: range, populated: int) -> dict[int, int] | None:
    """Return how many bytes of the span lie on which node, of which so many were populated here.

    Returns:
        None where the kernel does not tell. On one node it need not be asked.

    Cancellation:
        Felt within a millisecond.
    """
    nodes = read_node_numbers()
    if not nodes or not populated:
        return {} if nodes else None
    if len(nodes) == 1:
        return {nodes[0]: populated}
    return await run_through(lambda stop: _count(mapping, span, stop), name="nodes")


def _count(mapping: Mapping, span: range, stop: StopFlag) -> dict[int, int] | None:
    step = max(HUGE_PAGE, mapping.page)
    total: dict[int, int] = {}
    for first in range(span.start, span.stop, step * _QUESTION):
        starts = range(first, min(span.stop, first + step * _QUESTION), step)
        if stop:
            break
        try:
            found = _libc.page_nodes(range(mapping.address + starts.start, mapping.address + starts.stop, step))
        except OSError:
            return None
        for start, node in zip(starts, found, strict=True):
            if node >= 0:
                total[node] = total.get(node, 0) + min(step, span.stop - start)
    return dict(sorted(total.items()))


def in_words(nodes: MappingOf[int, int]) -> str:
    """Return for a log line what `find_nodes` found: `on node 1`."""
    if len(nodes) == 1:
        return f"on {_listed(tuple(nodes))}"
    return ", ".join(f"{mib(bytes_)} MiB on node {node}" for node, bytes_ in nodes.items())


@functools.cache
def _warn_of_refusal(allocation_name: str) -> None:
    log.warning(
        "%s: mbind(2) is not permitted here (a container's seccomp profile; Docker: --cap-add=SYS_NICE): "
        "numa= is ignored, and pages lie on the node of the processor that touches them first",
        allocation_name,
    )


def _listed(nodes: Sequence[int]) -> str:
    return f"node{'' if len(nodes) == 1 else 's'} {', '.join(map(str, nodes))}"
