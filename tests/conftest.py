"""Options, fixtures and guards of the suite: a test that leaks a name, a descriptor, a thread or a mapping fails."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from cgroups import MemoryGroup, find_memory_controller
from ranks import RankCrew
from reading import DATA, Reads, watched_reads

SHM = Path("/dev/shm")
_PREFIX = f"test-{os.getpid()}-"
_serial = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="the event loop to test on")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["AIOSHM_TEST_LOOP"] = config.getoption("--loop")  # the rank processes use the same
    # A shell that starts the suite in the background has it ignore Ctrl-C, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # uvloop's first loop keeps a pipe for good
        runner.get_loop()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the loop that this run is about; rank processes ask too."""
    if os.environ.get("AIOSHM_TEST_LOOP") == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return None


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine on a new loop of the kind under test, to its end."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(coroutine)

    return run


@pytest.fixture
def name() -> str:
    """A region name that no other test, run or user has."""
    return f"{_PREFIX}{next(_serial)}-{secrets.token_hex(3)}"


@pytest.fixture
def path(name: str) -> Path:
    """The file of the region called `name` in /dev/shm."""
    return SHM / f"aioshm-{os.geteuid()}-{name}"


@pytest.fixture
def place(name: str) -> Iterator[Path]:
    """A directory in /dev/shm of this test alone, which other users may enter too."""
    where = SHM / f"directory-{name}"
    where.mkdir()
    where.chmod(0o777)
    yield where
    shutil.rmtree(where)


@pytest.fixture
def there(place: Path, name: str) -> Path:
    """Where the region's file stands in `place`."""
    return place / f"aioshm-{os.geteuid()}-{name}"


@pytest.fixture
def ranks(name: str, memory_group: Callable[..., MemoryGroup]) -> Iterator[RankCrew]:
    """Rank processes (see `ranks`), killed and reaped at the end of the test whatever happens.

    Before the memory groups are removed, which they may be in.
    """
    crew = RankCrew(name)
    yield crew
    crew.reap()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file to load, with other bytes in every place."""
    path = tmp_path / "weights.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def reads() -> Iterator[Reads]:
    """What a load reads from its file while the test runs."""
    with watched_reads() as reads:
        yield reads


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount tmpfs file systems of a given size: `small_tmpfs(mib=64)`; needs root."""
    mounted: list[Path] = []

    def mount(*, mib: int, options: str = "") -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a tmpfs needs root")
        where = tmp_path / f"tmpfs-{len(mounted)}"
        where.mkdir()
        arguments = f"size={mib}m,mode=1777" + (f",{options}" if options else "")
        done = subprocess.run(  # noqa: PLW1510 - a mount that is refused skips the test
            ["mount", "-t", "tmpfs", "-o", arguments, "aioshm-test", str(where)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        left = sorted(entry.name for entry in where.iterdir())
        subprocess.run(["umount", "-l", str(where)], check=True)
        assert not [entry for entry in left if entry.startswith("aioshm-")], f"left behind in {where}: {left}"


@pytest.fixture
def memory_group() -> Iterator[Callable[..., MemoryGroup]]:
    """Make memory control groups with a limit in bytes: `memory_group(limit=512 << 20)`; needs root."""
    made: list[MemoryGroup] = []

    def make(*, limit: int | None, parent: MemoryGroup | None = None) -> MemoryGroup:
        controller = find_memory_controller()
        if controller is None or os.geteuid() != 0:
            pytest.skip("no memory controller that this process may make groups in")
        try:
            group = MemoryGroup.make(controller, limit=limit, parent=parent)
        except OSError as error:
            pytest.skip(f"memory groups cannot be made here: {error}")
        made.append(group)
        return group

    yield make
    for group in reversed(made):
        group.remove()


def _descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that lists
            continue
    return found


def _mappings() -> list[str]:
    with open("/proc/self/maps") as lines:
        return [line.strip() for line in lines if "/aioshm-" in line]


def _names() -> set[str]:
    """The regions of this process's tests and of their ranks: other suites may run on the same machine."""
    return {entry.name for entry in SHM.iterdir() if entry.name.startswith("aioshm-") and _PREFIX in entry.name}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _find_leaks(before: tuple[set[str], dict[str, str], set[threading.Thread]]) -> list[str]:
    names, descriptors, threads = before
    leaks = [f"name /dev/shm/{left}" for left in sorted(_names() - names)]
    leaks += [f"fd {fd} -> {to}" for fd, to in _descriptors().items() if fd not in descriptors]
    leaks += [f"thread {thread.name}" for thread in _threads() - threads]
    return leaks + [f"mapping {line}" for line in _mappings()]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """The guard. A forked child is no business of it: only this process is looked at, and the names of all."""
    before = _names(), _descriptors(), _threads()
    yield
    leaks = _find_leaks(before)
    # A thread is counted for a moment after it was joined, a dead rank's pipe until it is collected: look once more.
    deadline = time.monotonic() + 2
    while leaks and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.01)
        leaks = _find_leaks(before)
    for left in _names() - before[0]:
        (SHM / left).unlink(missing_ok=True)
    assert not leaks, "left behind:\n" + "\n".join(leaks)
