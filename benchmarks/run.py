"""Runs the benchmarks one after the other, keeps what they measured as JSON, and makes the tables and plots of it.

python benchmarks/run.py                 # all, the sizes that the documentation quotes
python benchmarks/run.py stall ready     # some; of the others, what is there from before is used
python benchmarks/run.py --quick         # small sizes, few rounds, and nothing of the documentation is touched
python benchmarks/run.py --full          # more rounds and the largest sizes
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from report import write_report

HERE = Path(__file__).parent
ROOT = HERE.parent

# The options of each: --quick, without an option, --full.
OPTIONS: dict[str, tuple[str, str, str]] = {
    "populate": ("--mib 256 --rounds 2", "--rounds 7", "--mib 4096 --rounds 21"),
    "rate": ("--mib 256 --smaller 64 --rounds 2", "--rounds 5", "--mib 8192 --smaller 64 256 1024 2048 --rounds 7"),
    "peers": ("--mib 128 --rounds 2", "--rounds 5", "--mib 2048 --rounds 11"),
    "growth": ("--mib 512 --rounds 2", "--rounds 5", "--rounds 11"),
    "ready": ("--mib 256 --rounds 2", "--rounds 5", "--rounds 11"),
    "join": ("--mib 256 --rounds 3", "--rounds 9", "--rounds 21"),
    "wait": ("--rounds 20 --seconds 2", "--rounds 150", "--rounds 1000"),
    "stall": ("--mib 512 --rounds 2", "--mib 4096 --rounds 5", "--mib 4096 --rounds 15"),
    "cancel": ("--mib 512 --rounds 5", "--mib 4096 --rounds 25", "--mib 8192 --rounds 100"),
    "capacity": ("--rounds 3", "--rounds 21", "--rounds 101"),
    "teardown": ("--mib 256 --rounds 2", "--mib 4096 --rounds 5", "--mib 4096 --rounds 15"),
    "small": ("--rounds 20", "--rounds 200", "--rounds 1000"),
    "guard": ("--mib 256 --rounds 3", "--rounds 51", "--mib 2048 --rounds 61"),
    "quota": ("--mib 64 --rounds 2", "--rounds 7", "--rounds 21"),
    "memory": ("--mib 128 --rounds 1", "--rounds 5", "--rounds 11"),
    "death": ("--mib 256 --rounds 2", "--rounds 7", "--rounds 21"),
    "import": ("--rounds 3", "--rounds 21", "--rounds 51"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(OPTIONS)}")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it works")
    sizes.add_argument("--full", action="store_true", help="the largest sizes and many rounds")
    parser.add_argument("--results", type=Path, help="where the JSON goes (benchmarks/results; quick: build/bench)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(OPTIONS))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    results = arguments.results or (ROOT / "build" / "bench" if arguments.quick else HERE / "results")
    which = 0 if arguments.quick else 2 if arguments.full else 1
    failed = []
    for name in arguments.names or OPTIONS:
        started = time.monotonic()
        if run(name, OPTIONS[name][which].split(), results / f"{name}.json"):
            failed.append(name)
        print(f"\n({name}: {time.monotonic() - started:.0f} s)\n", flush=True)
    for_documentation = not arguments.quick and arguments.results is None
    page, images = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images") if for_documentation else (None, results)
    print(write_report(results, page, images))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, options: list[str], json: Path) -> int:
    """Run one benchmark, and when interrupted wait until it has given back what it holds."""
    command = [sys.executable, str(HERE / f"bench_{name}.py"), *options, "--json", str(json)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(10)  # Ctrl-C has reached it as well
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait()
            raise


if __name__ == "__main__":
    # A shell that starts us in the background has SIGINT ignored, and what we start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to the benchmark it is handed on as an interrupt
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
