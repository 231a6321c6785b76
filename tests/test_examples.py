"""Every program of examples/ does what it says, tells by its exit status when it did not, and leaves nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioshm

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SHM = Path("/dev/shm")
NOTHING_LEFT = "left behind: nothing"

# One thread and small pages need about half a second for so much, on fast machines too: time to be seen underway.
SLOW = ("--size=1024", "--huge-pages=off", "--threads=1")

pytestmark = pytest.mark.examples
server_needs = pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in ("fastapi", "httpx", "uvicorn")),
    reason="needs fastapi, httpx and uvicorn (dependency group examples)",
)
much_memory = pytest.mark.skipif(
    not SHM.exists() or shutil.disk_usage(SHM).free < 2 << 30, reason="needs 2 GiB free in /dev/shm"
)


@contextlib.contextmanager
def started(program: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start an example with warnings as errors, in a session of its own: what it started is killed with it."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / program), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},  # for the processes that it starts
    )
    try:
        with process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_example(program: str, *options: str) -> tuple[int, str]:
    """Run an example to its end; return its exit status and what it said on stdout and, after that, on stderr."""
    with started(program, *options) as process:
        out, err = process.communicate(timeout=90)
    return process.returncode, out + err


@contextlib.contextmanager
def taken(name: str, size: int) -> Iterator[None]:
    """Somebody else has a region of this name already: this process, through a second program."""
    code = (
        "import asyncio, sys, aioshm\n"
        "async def main():\n"
        "    async with aioshm.open_region(sys.argv[1], int(sys.argv[2])):\n"
        "        print('open', flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, name, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            yield
        finally:
            holder.communicate(timeout=30)


def test_each_is_listed_and_says_how_to_run_it():
    listed = re.findall(r"^\* `(\w+\.py)`: ", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == PROGRAMS
    for program in PROGRAMS:
        docstring = (EXAMPLES / program).read_text().split('"""')[1]
        assert f"\n    python examples/{program}" in docstring


def test_one_process(name, path):
    status, said = run_example("one_process.py", "--size=8", f"--name={name}")
    assert status == 0, said
    assert f"8.0 MiB, created> at {path}\n" in said
    assert "buffer: 8388608 bytes, starting with b'hello\\x00\\x00\\x00'\n" in said
    assert "array: shape (5,), the same memory: b'HELLO'\n" in said
    assert "report: creator, 8 MiB populated in " in said
    assert f"log: example buffer: created {path}, 8.0 MiB, in " in said
    assert f"log: example buffer: removed {path}\n" in said
    assert NOTHING_LEFT in said


def test_one_process_that_finds_the_name_taken_says_so(name):
    with taken(name, 8 << 20):
        status, said = run_example("one_process.py", "--size=8", f"--name={name}")
    assert status == 1, said
    assert "report: joiner, 8 MiB populated" in said
    assert NOTHING_LEFT not in said


def test_many_processes(name):
    status, said = run_example("many_processes.py", "--size=8", "--processes=4", f"--name={name}")
    assert status == 0, said
    roles = re.findall(
        r"^process (\d): (\w+), ready after \d+ ms, one writer: True, message intact: True$", said, re.MULTILINE
    )
    assert sorted(index for index, _ in roles) == list("0123")
    assert sorted(role for _, role in roles) == ["creator", "joiner", "joiner", "joiner"]
    assert f"4 of 4 processes right, {NOTHING_LEFT}\n" in said


def test_many_processes_without_a_writer_among_them_say_so(name):
    with taken(name, 8 << 20):
        status, said = run_example("many_processes.py", "--size=8", "--processes=2", f"--name={name}")
    assert status == 1, said
    assert said.count("joiner") == said.count("one writer: False") == 2
    assert "0 of 2 processes right" in said


def test_region_opened_in_a_task_group_outlives_it(name):
    status, said = run_example("task_group.py", "--size=8", f"--name={name}")
    assert status == 0, said
    assert f"serving: <aioshm.Region '{name}': 8.0 MiB, created> holds " in said
    assert f"at the end: {NOTHING_LEFT}\n" in said


@much_memory
def test_failing_sibling_cancels_the_open_in_the_middle(name):
    status, said = run_example("task_group.py", "--fail", *SLOW, f"--name={name}")
    assert status == 0, said
    assert f"start-up: the open was cancelled, {NOTHING_LEFT}\n" in said
    assert "could not start: [Errno 2] No such file or directory" in said
    assert f"at the end: {NOTHING_LEFT}\n" in said
    assert "serving" not in said


def test_open_that_fails_by_itself_fails_the_group(name):
    status, said = run_example("task_group.py", f"--size={1 << 30}", f"--name={name}")
    assert status == 1, said
    assert "aioshm.InsufficientSpaceError: Insufficient space in /dev/shm for CPU KV cache: 1073741824.0 MiB" in said


@server_needs
@much_memory
def test_health_is_answered_while_populating(name, path):
    status, said = run_example("probe_latency.py", *SLOW, f"--name={name}")
    assert status == 0, said
    probes, worst = re.findall(r"(\d+) probes answered while populating, worst latency (\d+\.\d) ms", said)[0]
    lowest, highest = re.findall(r"progress seen: (\d+\.\d) to (\d+\.\d) %, at the end: ready", said)[0]
    assert int(probes) >= 1
    assert float(worst) < 1000
    assert 0 < float(lowest) <= float(highest) < 100
    assert f"CPU KV cache: created {path}, 1024.0 MiB" in said
    assert "example:shut down, was ready" in said
    assert NOTHING_LEFT in said


@server_needs
@much_memory
def test_server_ended_in_the_middle_of_populating_leaves_nothing(name):
    status, said = run_example("probe_latency.py", *SLOW, "--stop-early", f"--name={name}")
    assert status == 0, said
    assert "example:shut down, was starting" in said
    assert "CPU KV cache: created" not in said  # it never was
    assert re.search(r"progress seen: \d+\.\d to \d+\.\d %, at the end: starting", said)
    assert NOTHING_LEFT in said


@server_needs
@pytest.mark.parametrize(
    ("options", "end"),
    [(["--limit=0", "--size=8"], "ready"), ([f"--size={1 << 30}"], "failed")],
    ids=["late", "failed"],
)
def test_measuring_tells_what_did_not_hold(name, options, end):
    status, said = run_example("probe_latency.py", *options, f"--name={name}")
    assert status == 1, said
    assert f"at the end: {end}\n" in said
    assert NOTHING_LEFT in said
    if end == "failed":
        assert "aioshm.InsufficientSpaceError: Insufficient space in /dev/shm for CPU KV cache" in said
        assert "Lower --size." in said


@server_needs
@much_memory
def test_endpoints_say_503_until_the_region_is_ready(name, path):
    import httpx

    with started("fastapi_lifespan.py", "--port=0", *SLOW, f"--name={name}") as server:
        assert server.stderr is not None
        address = next(filter(None, (re.search(r"running on (http://\S+)", line) for line in server.stderr)))[1]
        with httpx.Client(base_url=address, timeout=30) as client:
            early = client.get("/blocks/0")
            assert (early.status_code, early.json()) == (503, {"detail": "the cache is starting"})
            deadline = time.monotonic() + 60
            while client.get("/health").json()["state"] == "starting":
                assert time.monotonic() < deadline
            assert client.get("/health").json() == {"state": "ready", "percent": 100.0}
            assert path.stat().st_size == 1 << 30
            assert client.get("/blocks/16383").json() == {"crc32": zlib.crc32(bytes(1 << 16))}
            assert client.get("/blocks/16384").status_code == client.get("/blocks/-1").status_code == 404
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=30)[1]
    assert server.returncode == -signal.SIGTERM, said  # uvicorn dies of what ended it, once it has shut down
    assert f"CPU KV cache: removed {path}\n" in said
    assert not path.exists()
    assert "stay mapped" not in said


def test_they_run_on_the_library_under_test():
    source = subprocess.run(
        [sys.executable, "-c", "import aioshm; print(aioshm.__file__)"], capture_output=True, text=True, check=True
    )
    assert source.stdout.strip() == aioshm.__file__
