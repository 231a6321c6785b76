"""Real memory groups: what does not fit ends in an error with figures, the process alive and the memory given back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from cgroups import MemoryGroup, start_in
from ranks import Rank

from aioshm._host import read_file_system, read_memory

MIB = 1 << 20
LIMIT = 512 * MIB
# What an interpreter's heap, page tables and the kernel's batches may add to a group between two looks.
SLACK = 24 * MIB

pytestmark = pytest.mark.root


@pytest.fixture
def directory(small_tmpfs) -> str:
    """A file system with room for everything here, so that memory alone is short."""
    host = read_memory()
    if host is None or host.available < 2048 * MIB:
        pytest.skip("the host itself has less than 2 GiB of memory to give")
    return str(small_tmpfs(mib=1024))


@pytest.fixture
def group(memory_group) -> MemoryGroup:
    return without_swap(memory_group(limit=LIMIT))


def without_swap(group: MemoryGroup) -> MemoryGroup:
    """Let the group swap nothing out, where it could: then its limit is what it has."""
    name, value = ("memory.memsw.limit_in_bytes", str(LIMIT)) if group.version == 1 else ("memory.swap.max", "0")
    with contextlib.suppress(FileNotFoundError):
        (group.path / name).write_text(value)
    return group


def send_open(rank: Rank, size: int, directory: str, **options: Any) -> None:
    options = {"directory": directory, "allocation_name": "CPU KV cache", "hint": "Lower it.", **options}
    rank.send("try_open", name=rank.name, size=size, options=options)


def open_here(rank: Rank, size: int, directory: str, **options: Any) -> dict[str, Any]:
    send_open(rank, size, directory, **options)
    return rank.answer()


def warnings(rank: Rank) -> list[str]:
    return [text for level, text in rank.ask("logged")["records"] if level not in ("DEBUG", "INFO")]


def check_error(answer: dict[str, Any], group: MemoryGroup) -> None:
    assert answer["outcome"] == "InsufficientMemoryError", answer
    facts = answer["facts"]
    assert facts["level"] == str(group.path)
    assert facts["limit"] == LIMIT
    assert 0 < facts["usage"] <= LIMIT
    assert facts["required"] > facts["limit"] - facts["usage"] + facts["reclaimable"]
    for words in (f"in memory cgroup {group.path} for CPU KV cache", "512.0 MiB", "Ask for less", "Lower it."):
        assert words in answer["message"]


def check_given_back(rank: Rank, group: MemoryGroup, before: int, directory: str) -> None:
    """The process is alive, nobody was killed, and what was taken is free again."""
    assert rank.ask("holdings")["mapped"] == []
    assert group.usage < before + SLACK
    assert group.oom_kills == 0
    assert list(Path(directory).iterdir()) == []


@pytest.mark.parametrize("populate", [True, False])
def test_what_cannot_fit_is_refused_before_a_page_is_touched(ranks, group, directory, populate):
    rank = start_in(ranks, group)
    held, before = rank.ask("holdings"), group.usage
    answer = open_here(rank, 700 * MIB, directory, populate=populate)
    check_error(answer, group)
    assert answer["facts"]["required"] > 700 * MIB
    assert answer["seconds"] < 1
    assert rank.ask("holdings") == held
    assert warnings(rank) == []
    check_given_back(rank, group, before, directory)


def test_what_fits_is_taken_without_a_word(ranks, group, directory):
    rank = start_in(ranks, group)
    before = group.usage
    assert open_here(rank, 300 * MIB, directory)["outcome"] == "open"
    assert group.usage > before + 290 * MIB
    assert warnings(rank) == []
    rank.ask("close")
    check_given_back(rank, group, before, directory)


@pytest.mark.parametrize("huge_pages", ["try", "off"])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_taken_by_another_process_in_the_middle_of_a_populate(ranks, group, directory, huge_pages, threads):
    hog, rank = start_in(ranks, group), start_in(ranks, group)
    before = group.usage
    rank.ask("stop_at", point="chunk", count=3 * threads)
    send_open(rank, 300 * MIB, directory, threads=threads, huge_pages=huge_pages)
    rank.wait_stopped()
    populated = group.usage - before
    assert 0 < populated < 300 * MIB
    # What it still needs is not there any more; what it has in flight is.
    taken = LIMIT - group.usage - (300 * MIB - populated) // 2 - (threads - 1) * 20 * MIB
    hog.ask("take", size=taken)
    rank.resume()
    answer = rank.answer()
    check_error(answer, group)
    assert hog.ask("hello")["pid"] == hog.pid
    check_given_back(rank, group, before + taken, directory)


def test_memory_taken_after_the_guard_let_a_chunk_in(ranks, group, directory):
    """A full group refuses the huge page, and small pages are then not tried: they would end in the OOM killer."""
    hog, rank = start_in(ranks, group), start_in(ranks, group)
    before = group.usage
    rank.ask("stop_at", point="admitted")
    send_open(rank, 300 * MIB, directory, threads=1)
    rank.wait_stopped()
    for left in (8 * MIB, 3 * MIB // 2):  # in two steps, for taking takes page tables as well
        hog.ask("take", size=LIMIT - group.usage - left)
    assert LIMIT - group.usage < 2 * MIB  # less than a huge page, and less than the chunk
    rank.resume()
    check_error(rank.answer(), group)
    hog.kill()
    check_given_back(rank, group, before, directory)


def test_a_limit_that_is_lowered_in_the_middle_of_a_populate(ranks, memory_group, directory):
    group = without_swap(memory_group(limit=LIMIT))
    rank = start_in(ranks, group)
    before = group.usage
    rank.ask("stop_at", point="chunk", count=3)
    send_open(rank, 300 * MIB, directory, threads=1)
    rank.wait_stopped()
    lowered = group.usage + 60 * MIB
    group.set_limit(lowered)
    rank.resume()
    answer = rank.answer()
    assert answer["outcome"] == "InsufficientMemoryError", answer
    assert answer["facts"]["limit"] == lowered
    check_given_back(rank, group, before, directory)


def test_waiting_ranks_take_over_once_there_is_room_again(ranks, group, directory):
    hog, rank, second = start_in(ranks, group), start_in(ranks, group), start_in(ranks, group)
    before = group.usage
    rank.ask("stop_at", point="chunk", count=3)
    send_open(rank, 200 * MIB, directory, threads=1)
    rank.wait_stopped()
    taken = LIMIT - group.usage - 60 * MIB
    hog.ask("take", size=taken)
    second.ask("stop_at", point="check")
    send_open(second, 200 * MIB, directory)
    rank.resume()
    check_error(rank.answer(), group)
    second.wait_stopped()  # it is the creator now, and finds all of the first one's memory free
    assert group.usage < before + taken + SLACK
    hog.kill()
    second.resume()
    assert second.answer()["outcome"] == "open"
    second.ask("close")


@pytest.mark.slow
def test_file_cache_makes_room_with_one_warning(ranks, group, directory, tmp_path):
    if read_file_system(str(tmp_path)).kind != "other":
        pytest.skip("the temporary directory stands in memory here: its files are no cache")
    rank = start_in(ranks, group)
    before = group.usage
    rank.ask("cache", timeout=100, path=str(tmp_path / "file"), size=400 * MIB)
    if group.usage < before + 390 * MIB:
        pytest.skip("the file's cache is not charged to the group here")
    assert open_here(rank, 300 * MIB, directory)["outcome"] == "open"
    (warning,) = warnings(rank)
    assert "which fits only after reclaim" in warning
    assert str(group.path) in warning
    assert group.oom_kills == 0
    rank.ask("write", offset=300 * MIB - 5, text="there")
    rank.ask("close")
    check_given_back(rank, group, before + 400 * MIB, directory)


@pytest.mark.parametrize("own", [None, 2 * LIMIT])
def test_the_limit_of_a_parent_binds_and_is_named(ranks, memory_group, directory, own):
    parent = without_swap(memory_group(limit=LIMIT))
    child = memory_group(limit=own, parent=parent)
    rank = start_in(ranks, child)
    before = parent.usage
    check_error(open_here(rank, 700 * MIB, directory), parent)
    check_given_back(rank, parent, before, directory)


def test_memory_of_a_sibling_counts_at_the_parent(ranks, memory_group, directory):
    parent = without_swap(memory_group(limit=LIMIT))
    child, sibling = memory_group(limit=LIMIT - MIB, parent=parent), memory_group(limit=None, parent=parent)
    hog, rank = start_in(ranks, sibling), start_in(ranks, child)
    hog.ask("take", size=250 * MIB)
    before = parent.usage
    check_error(open_here(rank, 300 * MIB, directory), parent)
    check_given_back(rank, parent, before, directory)


def test_the_tightest_of_a_chain_is_named(ranks, memory_group, directory):
    parent = memory_group(limit=2 * LIMIT)
    child = without_swap(memory_group(limit=LIMIT, parent=parent))
    rank = start_in(ranks, child)
    check_error(open_here(rank, 700 * MIB, directory), child)


def test_only_the_creator_checks_so_ranks_do_not_count_the_region_again(ranks, group, directory):
    crew = [start_in(ranks, group) for _ in range(4)]
    for rank in crew:
        assert open_here(rank, 300 * MIB, directory)["outcome"] == "open"
    assert [warnings(rank) for rank in crew] == [[], [], [], []]
    assert group.usage < LIMIT
    for rank in crew:
        rank.ask("close")
    assert group.oom_kills == 0


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_a_policy_that_does_not_refuse(ranks, group, directory, policy):
    rank = start_in(ranks, group)
    before = group.usage
    answer = open_here(rank, 700 * MIB, directory, memory_policy=policy, populate=False)
    assert answer["outcome"] == "open"
    texts = warnings(rank)
    assert len(texts) == (policy == "warn")
    assert all("which does NOT fit in memory level" in text and str(group.path) in text for text in texts)
    rank.ask("write", offset=700 * MIB - 5, text="there")
    rank.ask("close")
    check_given_back(rank, group, before, directory)


def test_the_guard_is_there_too_for_a_part_populated_later(ranks, group, directory):
    rank = start_in(ranks, group)
    before = group.usage
    assert open_here(rank, 300 * MIB, directory, populate=False)["outcome"] == "open"
    rank.ask("take", size=250 * MIB)
    rank.send("populate", offset=0, length=300 * MIB)
    answer = rank.answer()
    assert answer["error"] == "InsufficientMemoryError"
    assert answer["facts"]["level"] == str(group.path)
    rank.ask("write", offset=0, text="alive")
    assert rank.ask("read", offset=0, length=5)["text"] == "alive"
    rank.ask("close")
    check_given_back(rank, group, before + 250 * MIB, directory)
