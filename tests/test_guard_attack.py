"""The guard under attack: others take memory while we populate, limits are lowered, groups are nested three deep."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cgroups import MemoryGroup, start_in
from hog import Hog
from ranks import Rank

from aioshm._host import read_memory

MIB = 1 << 20
SLACK = 24 * MIB
RUNS = 100

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def directory(small_tmpfs) -> str:
    host = read_memory()
    if host is None or host.available < 3072 * MIB:
        pytest.skip("the host itself has less than 3 GiB of memory to give")
    return str(small_tmpfs(mib=2048))


def send_open(rank: Rank, size: int, directory: str, *, then_stop: int | None = None, **options: Any) -> None:
    rank.send("try_open", name=rank.name, size=size, options={"directory": directory, **options}, then_stop=then_stop)


@pytest.mark.timeout(300)
def test_a_hundred_races_with_a_hog_in_the_same_group(memory_group, ranks, directory):
    """Region and hog do not fit together; the hog is the smaller one, and must never cost the larger one its life.

    Once the region is open nothing can be done about a hog any more: then it is stopped.
    """
    group = memory_group(limit=384 * MIB)
    rank = start_in(ranks, group)
    before = group.usage
    outcomes = {"open": 0, "InsufficientMemoryError": 0}
    for run in range(RUNS):
        way = random.Random(run)
        hog = Hog(most=160 * MIB, pause=way.choice([0, 0.0005, 0.002]), preexec=group.enter)
        options = way.choice([{}, {"huge_pages": "off"}, {"huge_pages": "off", "threads": 1}])
        try:
            hog_first = way.random() < 0.5
            if hog_first:
                hog.go()
            send_open(rank, 256 * MIB, directory, then_stop=hog.process.pid, **options)
            if not hog_first:
                hog.go()
            answer = rank.answer()
        finally:
            hog.end()
        assert answer["outcome"] in outcomes, (run, answer)
        outcomes[answer["outcome"]] += 1
        if answer["outcome"] == "open":
            rank.ask("close")
        assert group.usage < before + SLACK, (run, options)
    assert rank.process.poll() is None
    assert outcomes["InsufficientMemoryError"] > RUNS // 10, outcomes
    print(outcomes, "OOM kills (the hog):", group.oom_kills)


def test_a_limit_lowered_while_we_populate_is_seen(memory_group, ranks, directory):
    """A pod resized in place: the rank stands before a chunk, the limit goes down, and the chunk is refused."""
    group = memory_group(limit=512 * MIB)
    rank = start_in(ranks, group)
    before = group.usage
    rank.ask("stop_at", point="chunk", count=12)
    send_open(rank, 300 * MIB, directory, threads=1)
    rank.wait_stopped()
    group.set_limit(group.usage + 16 * MIB)
    rank.resume()
    answer = rank.answer()
    assert answer["outcome"] == "InsufficientMemoryError"
    assert answer["facts"]["level"] == str(group.path)
    assert answer["facts"]["limit"] < 512 * MIB
    assert group.oom_kills == 0
    assert group.usage < before + SLACK


@pytest.mark.parametrize("binding", [0, 1, 2])
def test_of_groups_nested_three_deep_the_one_that_binds_is_named_with_its_own_figures(
    memory_group, ranks, directory, binding
):
    """The limit stands at each level in turn, the others have a larger one."""
    groups: list[MemoryGroup] = []
    for depth in range(3):
        limit = (256 if depth == binding else 1024) * MIB
        groups.append(memory_group(limit=limit, parent=groups[-1] if groups else None))
    rank = start_in(ranks, groups[-1])
    send_open(rank, 300 * MIB, directory)
    answer = rank.answer()
    level = groups[binding]
    assert answer["outcome"] == "InsufficientMemoryError"
    assert answer["facts"]["level"] == str(level.path)
    assert answer["facts"]["limit"] == 256 * MIB
    assert abs(answer["facts"]["usage"] - level.usage) < SLACK
    assert [group.oom_kills for group in groups] == [0, 0, 0]


@pytest.mark.parametrize("cached", [True, False], ids=["file cache", "another tmpfs file"])
def test_the_reported_experiment(memory_group, ranks, directory, tmp_path, cached):
    """A limit of 1 GiB of which 300 MiB are left, and a region of 512 MiB: cache goes, shared memory does not."""
    group = memory_group(limit=1024 * MIB)
    rank = start_in(ranks, group)
    filler = ranks.start(preexec=group.enter)
    where = tmp_path / "cache" if cached else f"{directory}/other"
    filler.ask("cache", path=str(where), size=1024 * MIB - group.usage - 300 * MIB)
    send_open(rank, 512 * MIB, directory)
    answer = rank.answer()
    warned = [text for level, text in rank.ask("logged")["records"] if level == "WARNING"]
    if cached:
        assert answer["outcome"] == "open"
        assert len(warned) == 1
        assert "fits only after reclaim" in warned[0]
        rank.ask("close")
    else:
        assert answer["outcome"] == "InsufficientMemoryError"
        assert answer["facts"]["level"] == str(group.path)
    assert group.oom_kills == 0
    assert rank.process.poll() is None
