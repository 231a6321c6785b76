"""Shows the promised figures as the benchmarks measure them: in turns in one run, as ratios of medians."""

from __future__ import annotations

import errno
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioshm import _libc
from aioshm._mapping import Mapping, unmap

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZE = 2 << 30

on_one_python = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="no matter of the Python: measured on one")

pytestmark = [pytest.mark.slow, pytest.mark.stress, pytest.mark.timeout(600)]


class Measured:
    """What a benchmark wrote as JSON."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def median(self, contender: str, figure: str) -> float:
        value: float = self._facts["contenders"][contender][figure]["median"]
        return value

    def ratio(self, name: str) -> float:
        value: float = self._facts["ratios"][name]
        return value

    @property
    def has_instructions(self) -> bool:
        return any("instructions" in figures for figures in self._facts["contenders"].values())


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Measured]:
    """Run `bench_{what}.py` with these options, once for all tests that ask for the same."""
    folder = tmp_path_factory.mktemp("figures")
    # Tracing every line of the process that is measured would be measured with it.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}

    @functools.cache
    def measure(what: str, *options: str) -> Measured:
        written = folder / f"{what}.json"
        command = [sys.executable, str(BENCHMARKS / f"bench_{what}.py"), "--json", str(written), *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        print(done.stdout)  # pytest shows it where an assertion fails
        return Measured(json.loads(written.read_text()))

    return measure


@pytest.fixture
def room() -> None:
    """Two regions' worth of memory: with less the machine would measure its own reclaim."""
    figures = os.statvfs("/dev/shm")
    free = min(figures.f_bavail * figures.f_frsize, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if free < 2 * SIZE:
        pytest.skip(f"needs {2 * SIZE >> 20} MiB of free memory and /dev/shm, {free >> 20} MiB are free")


@pytest.fixture
def huge(room: None) -> None:
    """A kernel that makes huge pages on /dev/shm: asked without what is under test."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(_libc.HUGE_PAGE)
        mapping = Mapping(file.fileno(), size=_libc.HUGE_PAGE, page=_libc.PAGE)
        _libc.try_madvise(mapping.address, _libc.PAGE, _libc.MADV_POPULATE_WRITE)
        code = _libc.try_madvise(mapping.address, _libc.HUGE_PAGE, _libc.MADV_COLLAPSE)
        unmap(mapping.release())
    if code:
        pytest.skip(f"MADV_COLLAPSE says {errno.errorcode[code]} on /dev/shm (it needs Linux 6.1)")


@pytest.mark.usefixtures("room")
def test_loop_stands_still_thirty_times_shorter_than_with_madvise_in_a_thread(measure):
    assert measure("stall", "--rounds", "3", "--mib", "1024").ratio("longest stall, naive over aioshm") >= 30


@pytest.mark.usefixtures("room")
def test_99_of_100_beats_are_late_by_a_thirtieth_of_what_a_thread_costs(measure):
    """Promised are 15 ms on the machine that the project is measured on; a test on any machine can only compare."""
    stall = measure("stall", "--rounds", "3", "--mib", "1024")
    assert stall.median("aioshm", "p99") < stall.median("mmap.madvise in a thread", "longest") / 30


@on_one_python
@pytest.mark.usefixtures("huge")
def test_memory_is_there_two_and_a_half_times_faster_than_with_madvise(measure):
    assert measure("populate", "--rounds", "5", "--mib", "1024").ratio("rate, aioshm over mmap.madvise") >= 2.5


@on_one_python
@pytest.mark.usefixtures("huge")
def test_joiner_is_in_thirty_times_faster_than_one_that_maps_small_pages(measure):
    assert measure("join", "--rounds", "5", "--mib", "1024").ratio("join, 4 KiB over aioshm") >= 30


def test_import_costs_at_most_half_more_than_that_of_anyio(measure):
    imports = measure("import", "--rounds", "11")
    assert imports.ratio("seconds, `import aioshm` over `import anyio`") <= 1.5
    if imports.has_instructions:
        assert imports.ratio("instructions, `import aioshm` over `import anyio`") <= 1.5


@pytest.mark.parametrize("statement", ["import aioshm", "from aioshm import open_region"])
def test_import_loads_neither_torch_nor_numpy(measure, statement):
    assert measure("import", "--rounds", "11").median(statement, "heavy") == 0


@on_one_python
@pytest.mark.usefixtures("huge")
def test_four_ranks_are_ready_twice_as_fast_as_four_that_populate_small_pages(measure):
    found = measure("ready", "--rounds", "3", "--mib", "1024")
    assert found.ratio("ready, 4 ranks, mmap.madvise over aioshm") >= 2


@on_one_python
def test_peers_know_of_a_death_at_once(measure):
    """Promised are 0.2 s, and the median is a tenth of that; what is asserted is that nobody waits for a time-out."""
    found = measure("death", "--rounds", "5")
    for phase in ("while all populate", "while all wait"):
        assert found.median(phase, "last") < 2
