"""One region per node under torchrun: two agents on this machine stand for two nodes, with two ranks each.

    python examples/torchrun_offload.py --size 64

On real nodes the same program is started on each of them, by torchrun itself:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id JOB \\
        examples/torchrun_offload.py --size 64

The ranks of a node write their shares of the node's region, check those of their peers, and all ranks of all nodes
add up what they wrote. Ends with status 1 if any rank saw anything else than what was written, or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import aioshm

NODES, RANKS_PER_NODE = 2, 2
ROW = 1 << 20


def value(rank: int, row: int) -> int:
    """Return what a global rank fills a row with: never 0, and another one for each of some hundred."""
    return (rank * 83 + row) % 255 + 1


def exists(path: str) -> bool:
    return os.path.exists(path)


async def take_part(size: int) -> bool:
    """Be one rank: open the node's region with its peers, write, check, and tell whether everything was right."""
    import torch
    import torch.distributed as dist

    cohort = aioshm.Cohort.from_env()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks_here = range(rank - cohort.local_rank, rank - cohort.local_rank + cohort.local_world_size)
    rows = size // ROW

    def owner(row: int, ranks: range) -> int:
        return ranks[row % cohort.local_world_size]

    # torchrun ends the ranks of a job that failed by SIGTERM. As a cancellation it cleans up, until the name is gone;
    # from there on there is nothing to clean up.
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    async with aioshm.open_region(
        cohort.region_name("kv"), size, allocation_name=f"KV cache of node {cohort.node}", **cohort.ranks
    ) as region:
        loop.remove_signal_handler(signal.SIGTERM)
        released = not exists(region.path)  # before any rank gets here
        blocks = region.tensor((rows, ROW), dtype=torch.uint8)
        mine = [row for row in range(rows) if owner(row, ranks_here) == rank]
        for row in mine:
            blocks[row] = value(rank, row)
        await asyncio.to_thread(dist.barrier)  # it blocks, so not on the loop
        intact = all(bool((blocks[row] == value(owner(row, ranks_here), row)).all()) for row in range(rows))
        checksum = torch.tensor([int(blocks[mine].sum())])
        await asyncio.to_thread(dist.all_reduce, checksum)
        del blocks
    nodes = [range(first, first + cohort.local_world_size) for first in range(0, world, cohort.local_world_size)]
    expected = sum(value(owner(row, ranks), row) * ROW for ranks in nodes for row in range(rows))
    right = checksum.item() == expected
    print(
        f"node {cohort.node}, local rank {cohort.local_rank}, rank {rank} of {world}: {region.report.role} of "
        f"{region.name}, released: {released}, peers intact: {intact}, checksum right: {right}\n",
        end="",  # the line and its end in one write, or the lines of several ranks could mix
        flush=True,
    )
    dist.destroy_process_group()
    return released and intact and right


def start_nodes(size: int, run_id: str) -> int:
    """Start one torchrun per node, all on this machine, and return how many of them failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"),
        *(__file__, f"--size={size >> 20}"),
    ]
    agents = [subprocess.Popen(command, env=environ) for _ in range(NODES)]
    try:
        return sum(agent.wait() != 0 for agent in agents)
    finally:
        for agent in agents:  # after Ctrl-C or SIGTERM: an agent ends its ranks before itself
            agent.terminate()
            agent.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="MiB of memory per node (default: 64)")
    parser.add_argument("--name", default=f"offload-{uuid.uuid4().hex[:12]}", help="the job's id, part of all names")
    arguments = parser.parse_args()

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0 if asyncio.run(take_part(arguments.size << 20)) else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed = start_nodes(arguments.size << 20, arguments.name)
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*{arguments.name}*")]
    print(f"{NODES - failed} of {NODES} nodes right, left behind: {left or 'nothing'}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    raise SystemExit(main())
