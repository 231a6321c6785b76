"""A rank that the OOM killer took: the error of the others says so, and where."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from table import wait_held

from aioshm._locks import READY

MIB = 1 << 20

pytestmark = pytest.mark.root


def test_peers_of_a_rank_that_was_oom_killed_are_told_the_level(memory_group, ranks, name, path):
    """Rank 2 never comes, so the others wait; then rank 1 takes more than the group has."""
    group = memory_group(limit=256 * MIB)

    def first_to_be_killed() -> None:
        group.enter()
        Path("/proc/self/oom_score_adj").write_text("1000")

    crew = [ranks.start(preexec=preexec) for preexec in (group.enter, first_to_be_killed)]
    for index, rank in enumerate(crew):
        rank.send("open", name=name, size=12 * MIB, options={"local_rank": index, "local_world_size": 3, "timeout": 60})
    for index in range(2):
        wait_held(path, READY.at(index))
    eater = ranks.start(preexec=group.enter)
    eater.send("take", size=512 * MIB)
    answer = crew[0].answer()
    assert answer["error"] == "PeerLostError"
    assert f"rank 1 (pid {crew[1].pid}) went away" in answer["message"]
    assert f"oom_kill rose in {group.path}." in answer["message"]
    assert crew[1].process.wait(10) == -signal.SIGKILL


def test_a_rank_that_was_killed_by_hand_is_not_laid_to_the_oom_killer(memory_group, ranks, name, path):
    group = memory_group(limit=256 * MIB)
    crew = [ranks.start(preexec=group.enter) for _ in range(2)]
    for index, rank in enumerate(crew):
        rank.send("open", name=name, size=12 * MIB, options={"local_rank": index, "local_world_size": 3, "timeout": 60})
    for index in range(2):
        wait_held(path, READY.at(index))
    with pytest.raises(TimeoutError):
        crew[0].answer(timeout=0.3)  # it looks on, and sees rank 1
    crew[1].kill()
    assert "oom" not in crew[0].answer()["message"]
