"""Starts the FastAPI server and asks for its health while the region is being populated: how late does it answer?

    python examples/probe_latency.py --size 4096
    python examples/probe_latency.py --size 4096 --stop-early    # SIGTERM in the middle of populating

Ends with status 1 if no probe was answered meanwhile, one took longer than --limit, or anything is left behind.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

SERVER = Path(__file__).with_name("fastapi_lifespan.py")


@contextmanager
def running_server(*options: str) -> Iterator[str]:
    """Start the server and yield its address; at the end SIGTERM it and wait until it is gone."""
    command = [sys.executable, str(SERVER), "--port=0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                sys.stderr.write(line)
                if found := re.search(r"running on (http://\S+)", line):
                    yield found[1]
                    break
            else:
                raise SystemExit("the server did not start")
        finally:
            server.terminate()
            sys.stderr.write(server.stderr.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="MiB of memory (default: 1024)")
    parser.add_argument("--name", default=f"probe-latency-{os.getpid()}", help="the region's name")
    parser.add_argument(
        "--limit", type=float, default=1.0, metavar="SECONDS", help="worst latency allowed (default: 1)"
    )
    parser.add_argument("--stop-early", action="store_true", help="end the server as soon as it reports progress")
    arguments, passed_on = parser.parse_known_args()

    latencies: list[float] = []
    percents: list[float] = []
    options = [f"--size={arguments.size}", f"--name={arguments.name}", *passed_on]
    with running_server(*options) as address, httpx.Client(base_url=address, timeout=60) as client:
        state, stop = "starting", False
        while state == "starting" and not stop:
            asked = time.perf_counter()
            response = client.get("/health")
            latency = time.perf_counter() - asked
            answer = response.json()
            state = answer["state"] if response.is_success else "failed"
            if state == "starting":
                latencies.append(latency)
                percents.append(answer["percent"])
                stop = arguments.stop_early and 0 < answer["percent"] < 100
            time.sleep(0.002)

    worst = max(latencies, default=0.0)
    underway = [percent for percent in percents if 0 < percent < 100]
    left = [path.name for path in Path("/dev/shm").glob(f"aioshm-*-{arguments.name}")]
    print(f"{len(latencies)} probes answered while populating, worst latency {worst * 1000:.1f} ms")
    print(f"progress seen: {min(underway, default=0)} to {max(underway, default=0)} %, at the end: {state}")
    print(f"left behind: {left or 'nothing'}")
    expected = "starting" if arguments.stop_early else "ready"
    return 0 if underway and worst <= arguments.limit and state == expected and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
