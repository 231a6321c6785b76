"""Removing leftovers while others open and leave: at every step, and 200 times over; nobody has an error of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from leavings import MIB, SIZE, UID, has_answered, has_open, leave, stop_in_open
from ranks import Rank
from sweeper import Sweeper

from aioshm._leftovers import find_regions, remove_leftover


@pytest.mark.parametrize("old", [None, SIZE], ids=["its own stub", "a leftover"])
def test_an_opener_whose_file_goes_before_it_looked_starts_over(ranks, place, there, old):
    """It has made or opened the file, and not locked it yet."""
    if old is not None:
        leave(there, old)
    rank = ranks.start()
    stop_in_open(rank, "aioshm._rendezvous._look", place)
    assert remove_leftover(str(there)) == (old or 0)
    assert not there.exists()
    rank.resume()
    answer = rank.answer()
    assert (answer["created"], answer["inode"]) == (True, there.stat().st_ino)
    assert rank.ask("read", offset=0, length=9)["text"] == "\0" * 9
    rank.ask("close")
    assert not there.exists()


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "is killed"])
@pytest.mark.parametrize("old", [0, 40 * MIB], ids=["stub", "full"])
def test_openers_come_at_every_step_of_a_removal(ranks, place, there, killed, old):
    check_every_step(ranks.start_many(2), there, killed=killed, old=old)


@pytest.mark.root
def test_openers_wait_for_the_room_that_is_being_freed(ranks, name, small_tmpfs):
    """There is none for both: whoever made it anew too early would be told that there is no room."""
    there = small_tmpfs(mib=64) / f"aioshm-{UID}-{name}"
    # Not before its lock: there it is a mere onlooker, who keeps what others remove for as long as it stands still.
    check_every_step(
        ranks.start_many(1), there, killed=False, old=40 * MIB, points=itertools.chain([1], itertools.count(3))
    )


def check_every_step(
    openers: list[Rank], there: Path, *, killed: bool, old: int, points: Iterable[int] | None = None
) -> None:
    steps = []
    for point in points or itertools.count(1):
        leave(there, old)
        sweeper = Sweeper(there, str(point))
        try:
            steps.append(sweeper.at)
            for rank in openers:
                rank.send("open", name=rank.name, size=40 * MIB, options={"directory": str(there.parent), "threads": 1})
            answers: dict[int, Any] = {}
            while not all(rank.pid in answers or has_open(rank, there) for rank in openers):
                for rank in openers:
                    if rank.pid not in answers and has_answered(rank):
                        answers[rank.pid] = rank.answer()
            ended = (sweeper.reap() or "killed") if killed else sweeper.end()
            for rank in openers:
                if rank.pid not in answers:
                    answers[rank.pid] = rank.answer()
        finally:
            sweeper.reap()
        assert not [answer for answer in answers.values() if "error" in answer], (steps, answers)
        assert {answer["inode"] for answer in answers.values()} == {there.stat().st_ino}
        assert sum(answer["created"] for answer in answers.values()) == 1
        for rank in openers:
            assert rank.ask("read", offset=0, length=9)["text"] == "\0" * 9
        for rank in openers:
            rank.ask("close")
        for left in there.parent.iterdir():  # what a kill leaves beside it is empty, and goes with the next sweep
            assert killed
            assert remove_leftover(str(left)) == 0
        if not sweeper.stopped:
            break
    assert ended in ("0", str(old), "None", "killed")
    assert {"open in __init__", "unlink in unlink", "close in close"} <= {*steps}
    assert ("rename in _stand_in" in steps) == bool(old)


@pytest.mark.parametrize("sweeper_waits", [False, True], ids=["swept before", "swept while it tries"])
def test_one_who_leaves_when_the_others_are_killed(ranks, place, there, sweeper_waits):
    """It has let its gate go and not tried it again yet: for this moment nobody is inside."""
    leaver, other = ranks.start_many(2)
    for rank in (leaver, other):
        rank.open(SIZE, directory=str(place))
    leaver.ask("hook", call="stop_at", where="aioshm._locks.Description.try_exclusive", nth=2)
    leaver.send("close")
    assert "stopped" in leaver.answer()
    leaver.wait_stopped()
    other.kill()
    if sweeper_waits:
        sweeper = Sweeper(there, "rename")
        try:
            leaver.resume()
            assert leaver.answer() == {}
            assert sweeper.end() == str(SIZE)
        finally:
            sweeper.reap()
    else:
        assert remove_leftover(str(there)) == SIZE
        leaver.resume()
        assert leaver.answer() == {}
    assert list(place.iterdir()) == []


def test_two_sweepers_at_once(place, there):
    """One is stopped at each of its steps while another sweeps all there is, the first one's new file among it."""
    for point in itertools.count(1):
        leave(there)
        sweeper = Sweeper(there, str(point))
        try:
            for each in find_regions(str(place)):
                remove_leftover(each.path)
            assert sweeper.end() in ("None", str(SIZE))
        finally:
            sweeper.reap()
        assert list(place.iterdir()) == [], sweeper.at
        if not sweeper.stopped:
            break


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [False, True], ids=["no cohort", "cohort"])
def test_sweeping_while_eight_open_and_leave_200_times(ranks, name, place, cohort):
    crew = ranks.start_many(8)
    for index, rank in enumerate(crew):
        options = {"directory": str(place), "threads": 1}
        if cohort:
            options |= {"local_rank": index, "local_world_size": len(crew)}
        rank.send("rounds", name=name, size=MIB + 13, count=200, index=index, options=options)
    seen: set[str] = set()
    while not all(map(has_answered, crew)):
        for each in find_regions(str(place)):
            seen.add(each.state)
            remove_leftover(each.path)
    answers = [rank.answer() for rank in crew]
    assert not [answer for answer in answers if "error" in answer], answers
    assert "forming" in seen
    assert list(place.iterdir()) == []
