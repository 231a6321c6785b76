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
    assert measure("stall", "--rounds", "5").ratio("longest stall, naive over aioshm") >= 30


@pytest.mark.usefixtures("room")
def test_loop_is_late_by_less_than_15_ms_in_99_of_100_beats(measure):
    stall = measure("stall", "--rounds", "5")
    idle = stall.median("nothing", "p99")
    if idle > 0.002:
        pytest.skip(f"the machine is busy: the p99 of a loop with nothing to do is {idle * 1e3:.1f} ms")
    assert stall.median("aioshm", "p99") < 0.015


@pytest.mark.usefixtures("huge")
def test_memory_is_there_two_and_a_half_times_faster_than_with_madvise(measure):
    assert measure("populate", "--rounds", "5").ratio("rate, aioshm over mmap.madvise") >= 2.5


@pytest.mark.usefixtures("huge")
def test_joiner_is_in_thirty_times_faster_than_one_that_maps_small_pages(measure):
    assert measure("join", "--rounds", "5").ratio("join, 4 KiB over aioshm") >= 30


def test_import_costs_at_most_half_more_than_that_of_anyio(measure):
    imports = measure("import", "--rounds", "11")
    assert imports.ratio("seconds, `import aioshm` over `import anyio`") <= 1.5
    if imports.has_instructions:
        assert imports.ratio("instructions, `import aioshm` over `import anyio`") <= 1.5


@pytest.mark.parametrize("statement", ["import aioshm", "from aioshm import open_region"])
def test_import_loads_neither_torch_nor_numpy(measure, statement):
    assert measure("import", "--rounds", "11").median(statement, "heavy") == 0
