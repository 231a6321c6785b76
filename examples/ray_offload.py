"""One region per node under Ray: a cluster of two nodes on this machine, with two async actors on each as its ranks.

    python examples/ray_offload.py --size 64

Ray tells an actor on which node it is, and nothing about its peers there. So the actors are started first, and whoever
started them groups them by node and tells each its local rank; on a real cluster that is `ray.init(address="auto")` in
place of the `Cluster`, and nothing else. The ranks of a node write their shares of the node's region, check those of
their peers, and the driver adds up what all of them found. Ends with status 1 if any rank saw anything else than what
was written, or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, TypeVar

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")  # read when Ray is imported

import ray
from ray.cluster_utils import Cluster

import aioshm

T = TypeVar("T")

NODES, RANKS_PER_NODE = 2, 2
ROW = 1 << 20
NODE: dict[str, Any] = {"num_cpus": RANKS_PER_NODE, "object_store_memory": 80 << 20}  # about the least there can be
# Loopback all of them, but not 127.0.0.1, which Ray takes for "this machine, at its address on the network".
ADDRESSES = [f"127.0.0.{2 + node}" for node in range(NODES)]


def value(node: str, rank: int, row: int) -> int:
    """Return what a node's local rank fills a row with: never 0, and seldom the same on two nodes."""
    return (int(node[:6], 16) + rank * 83 + row) % 255 + 1


class Worker:
    """One rank: an actor whose methods are coroutines, so that all of them run on one event loop."""

    def __init__(self) -> None:
        self.stack = contextlib.AsyncExitStack()  # a region that is entered by one method and left by another
        self.node = ray.get_runtime_context().get_node_id()

    async def find_node(self) -> str:
        return self.node

    async def open(self, cohort: aioshm.Cohort, size: int) -> str:
        """Open the node's region together with its other ranks, and return what there is to say of it."""
        self.cohort, self.rows = cohort, range(size // ROW)
        opening = aioshm.open_region(cohort.region_name("kv"), size, allocation_name="KV cache", **cohort.ranks)
        self.region = region = await self.stack.enter_async_context(opening)
        named = await asyncio.to_thread(os.path.exists, region.path)  # the name is gone before any rank gets here
        return f"rank {cohort.local_rank}: {region.report.role} of {region.name}, released: {not named}"

    async def write(self) -> None:
        """Fill this rank's rows."""
        rank, world = self.cohort.local_rank, self.cohort.local_world_size
        with self.region.buffer as buffer:
            for row in self.rows[rank::world]:
                buffer[row * ROW : (row + 1) * ROW] = bytes([value(self.node, rank, row)]) * ROW

    async def check(self) -> int:
        """Return how many rows hold what the rank that they belong to had to write."""
        world = self.cohort.local_world_size
        with self.region.buffer as buffer:
            return sum(
                buffer[row * ROW : (row + 1) * ROW] == bytes([value(self.node, row % world, row)]) * ROW
                for row in self.rows
            )

    async def close(self) -> None:
        await self.stack.aclose()


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait until all calls have ended, and only then raise: who is killed on the way cannot clean up."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise BaseExceptionGroup("ranks failed", errors)
    return [result for result in results if not isinstance(result, BaseException)]


async def use_nodes(size: int, job: str) -> bool:
    """Start the ranks wherever Ray puts them, make each node's ones a cohort, and tell whether everything was right."""
    start = ray.remote(num_cpus=1)(Worker).remote
    workers: list[Any] = [start() for _ in range(NODES * RANKS_PER_NODE)]
    nodes: list[str] = await all_of(worker.find_node.remote() for worker in workers)
    # A rank is one among those of its node. Ray's job id is a small number that every cluster counts anew: not a name.
    cohorts = [
        aioshm.Cohort(
            local_rank=nodes[:index].count(node), local_world_size=nodes.count(node), job=f"ray-{job}", node=node
        )
        for index, node in enumerate(nodes)
    ]
    opened: list[str] = await all_of(
        worker.open.remote(cohort, size) for worker, cohort in zip(workers, cohorts, strict=True)
    )
    await all_of(worker.write.remote() for worker in workers)
    rows: list[int] = await all_of(worker.check.remote() for worker in workers)
    await all_of(worker.close.remote() for worker in workers)
    for line, found in sorted(zip(opened, rows, strict=True)):
        print(f"{line}, rows right: {found} of {size // ROW}")
    print(f"{len(set(nodes))} nodes, {len(workers)} ranks")
    return all("released: True" in line for line in opened) and set(rows) == {size // ROW}


def run_cluster(size: int, job: str) -> bool:
    """Start a cluster, use it, and end it whatever happens."""
    cluster = Cluster()
    try:
        for address in ADDRESSES:  # the first is the head
            cluster.add_node(**NODE, node_ip_address=address, include_dashboard=False)
        ray.init(address=cluster.address, _node_ip_address=ADDRESSES[0], log_to_driver=False)
        return asyncio.run(use_nodes(size, job))
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="MiB of memory per node (default: 64)")
    parser.add_argument("--name", default=f"offload-{uuid.uuid4().hex[:12]}", help="the job's id, part of all names")
    arguments = parser.parse_args()

    # A short path, for Ray makes sockets there; its own, so that no other cluster of this machine is touched.
    folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        right = run_cluster(arguments.size << 20, arguments.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*{arguments.name}*")]
    print(f"everything right: {right}, left behind: {left or 'nothing'}")
    return 0 if right and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
