"""Real v2 groups: which level is named, with which figures; file cache, swap limits and memory.high. On the machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cgroups import MemoryGroup, start_in
from ranks import Rank

MIB = 1 << 20
# What an interpreter's heap and the kernel's batches may add to a group between two looks.
SLACK = 4 * MIB

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture
def directory(small_tmpfs) -> str:
    return str(small_tmpfs(mib=1024))


def try_open(rank: Rank, size: int, directory: str) -> dict[str, Any]:
    rank.send("try_open", name=rank.name, size=size, options={"directory": directory})
    return rank.answer()


def warnings(rank: Rank) -> list[str]:
    return [text for level, text in rank.ask("logged")["records"] if level not in ("DEBUG", "INFO")]


def write(group: MemoryGroup, file: str, value: int | str) -> None:
    (group.path / file).write_text(str(value))


def cache(group: MemoryGroup) -> int:
    """What the kernel gives up without swap, by its own counts."""
    stat = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    return sum(int(stat[key]) for key in ("active_file", "inactive_file", "slab_reclaimable"))


def check_refused(answer: dict[str, Any], group: MemoryGroup, limit: int, swappable: int = 0) -> None:
    """Refused for want of memory at `group`, with the figures that the kernel's files have, for they stand still."""
    assert answer["outcome"] == "InsufficientMemoryError", answer
    facts = answer["facts"]
    assert (facts["level"], facts["limit"]) == (str(group.path), limit)
    assert facts["usage"] == pytest.approx(group.usage, abs=SLACK)
    assert facts["reclaimable"] == pytest.approx(cache(group) + swappable, abs=SLACK)
    assert group.oom_kills == 0


@pytest.mark.parametrize("file", ["memory.max", "memory.high"])
def test_of_three_nested_groups_the_one_with_the_limit_is_named(ranks, memory_group, directory, tmp_path, file):
    outer = memory_group(limit=None)
    middle = memory_group(limit=None, parent=outer)
    inner = memory_group(limit=None, parent=middle)
    uncle, rank = start_in(ranks, memory_group(limit=None, parent=outer)), start_in(ranks, inner)
    uncle.ask("take", size=24 * MIB)  # so that the levels differ in what they have
    rank.ask("cache", path=str(tmp_path / "file"), size=32 * MIB)
    for group in (inner, middle, outer):
        write(group, file, 160 * MIB)
        check_refused(try_open(rank, 192 * MIB, directory), group, 160 * MIB)
        write(group, file, "max")
    assert outer.usage > inner.usage + 24 * MIB
    assert try_open(rank, 192 * MIB, directory)["outcome"] == "open"
    assert warnings(rank) == []
    rank.ask("close")


def test_file_cache_gives_way_and_a_file_in_memory_does_not(ranks, memory_group, directory, tmp_path):
    """An experiment that users reported, at a quarter of its size: a limit of 1 GiB, 300 MiB of it free, 512 wanted."""
    group = memory_group(limit=256 * MIB)
    rank = start_in(ranks, group)
    write(group, "memory.swap.max", 0)
    rank.ask("cache", timeout=100, path=str(tmp_path / "file"), size=256 * MIB - 75 * MIB - group.usage)
    free = 256 * MIB - group.usage  # the cache needs a few MiB of its own
    assert free == pytest.approx(75 * MIB, abs=12 * MIB)
    assert try_open(rank, 128 * MIB, directory)["outcome"] == "open"
    (warning,) = warnings(rank)
    figures = re.search(
        r"([\d.]+) MiB required, which fits only after reclaim in memory level (\S+): "
        r"usage ([\d.]+) MiB, available ([\d.]+) MiB, limit ([\d.]+) MiB, remaining ([\d.]+) MiB",
        warning,
    )
    required, level, usage, available, limit, remaining = figures.groups()
    assert (level, float(limit)) == (str(group.path), 256)
    assert 128 < float(required) < float(available)
    assert float(remaining) == pytest.approx(free / MIB, abs=SLACK / MIB)
    assert float(usage) + float(remaining) == pytest.approx(256, abs=0.3)  # both are rounded
    rank.ask("write", offset=128 * MIB - 5, text="there")
    rank.ask("close")

    Path(tmp_path / "file").unlink()
    rank.ask("cache", path=f"{directory}/file", size=256 * MIB - 75 * MIB - group.usage)
    answer = try_open(rank, 128 * MIB, directory)
    check_refused(answer, group, 256 * MIB)
    assert answer["facts"]["reclaimable"] < SLACK
    assert rank.ask("hello")["pid"] == rank.pid
    Path(directory, "file").unlink()


def test_memory_high_lowered_in_the_middle_of_a_populate(ranks, memory_group, directory):
    """Above memory.high nobody is killed, but throttled, until a populate hardly moves."""
    group = memory_group(limit=None)
    rank = start_in(ranks, group)
    before = group.usage
    rank.ask("stop_at", point="chunk", count=6)
    options = {"directory": directory, "threads": 1}
    rank.send("try_open", name=rank.name, size=192 * MIB, options=options)
    rank.wait_stopped()
    populated = sum(file.stat().st_blocks * 512 for file in Path(directory).iterdir())
    assert populated > 8 * MIB
    high = (group.usage + 48 * MIB) // 4096 * 4096
    write(group, "memory.high", high)
    rank.resume()
    answer = rank.answer()
    assert answer["outcome"] == "InsufficientMemoryError", answer
    assert (answer["facts"]["level"], answer["facts"]["limit"]) == (str(group.path), high)
    assert "high 0\n" in (group.path / "memory.events").read_text()  # it never got there
    assert group.usage < before + 8 * MIB
    assert list(Path(directory).iterdir()) == []


@pytest.mark.parametrize("limited", ["own", "parent's"])
def test_of_swap_counts_what_its_tightest_limit_leaves(ranks, memory_group, directory, swap, limited):
    """A swap limit holds for all groups below, also where the memory limit is theirs alone."""
    parent = memory_group(limit=None)
    group = memory_group(limit=128 * MIB, parent=parent)
    swapper = group if limited == "own" else parent
    hog, rank = start_in(ranks, group), start_in(ranks, group)
    write(swapper, "memory.swap.max", 0)
    hog.ask("take", size=128 * MIB - 40 * MIB - group.usage)
    check_refused(try_open(rank, 64 * MIB, directory), group, 128 * MIB)
    write(swapper, "memory.swap.max", 16 * MIB)
    check_refused(try_open(rank, 64 * MIB, directory), group, 128 * MIB, swappable=16 * MIB)
    write(swapper, "memory.swap.max", 40128 * MIB)  # more than the machine has
    check_refused(try_open(rank, 100 * MIB, directory), group, 128 * MIB, swappable=swap)
    assert warnings(rank) == []
    answer = try_open(rank, 64 * MIB, directory)
    assert answer["outcome"] == "open", answer
    (warning,) = warnings(rank)
    assert "which fits only after reclaim" in warning
    assert int((group.path / "memory.swap.current").read_text()) > 0
    assert group.oom_kills == 0
    assert hog.ask("hello")["pid"] == hog.pid
    rank.ask("close")
