"""`aioshm ls` and `aioshm gc` as real processes: what they show, their exit status, and what they leave alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from leavings import MIB, NOBODY, SIZE, UID, has_answered, leave, stop_in_open
from memory_maps import collapse_works
from terminal import draw, environment, without_controls

import aioshm

# Run by root as what it becomes: the interpreter may stand where only root may read.
AS_NOBODY = f"""
import os
from aioshm.cli import _group, main
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
main()
"""
AS_OURSELVES = "from aioshm.cli import main; main()"


def command(what: str, place: Path, *options: str, program: str = AS_OURSELVES) -> tuple[int, str, str]:
    """Run a command on `place`, and return its exit status, output and errors."""
    arguments = [sys.executable, "-c", program, what, "--directory", str(place), *options]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment(), timeout=60)
    return done.returncode, done.stdout, done.stderr


def answer(what: str, place: Path, *options: str, program: str = AS_OURSELVES) -> Any:
    status, out, err = command(what, place, "--json", *options, program=program)
    assert (status, err) == (0, "")
    return json.loads(out)


def on_a_terminal(what: str, place: Path, columns: int) -> list[str]:
    status, drawn = draw([sys.executable, "-m", "aioshm", what, "--directory", str(place)], columns=columns)
    assert status == 0
    return without_controls(drawn).splitlines()


@pytest.fixture
def scene(ranks, name, place) -> dict[str, Any]:
    """A region of each state, with the pids of those who have it mapped."""
    pids: dict[str, list[int]] = {"leftover": [], "foreign": []}
    live = ranks.start_many(2, name=f"{name}-live")
    for rank in live:
        rank.open(SIZE, directory=str(place))
    forming = ranks.start(f"{name}-forming")
    stop_in_open(forming, "os.fchmod", place)
    dead = ranks.start(f"{name}-leftover")
    dead.open(SIZE, directory=str(place))
    dead.kill()
    cohort = ranks.start_many(2, name=f"{name}-released")
    for index, rank in enumerate(cohort):
        options = {"local_rank": index, "local_world_size": 2, "directory": str(place)}
        rank.send("open", name=rank.name, size=SIZE, options=options)
    assert all("error" not in rank.answer() for rank in cohort)
    (place / f"aioshm-{UID}-{name}-foreign").symlink_to("nowhere")
    return {
        **pids,
        "live": [rank.pid for rank in live],
        "forming": [forming.pid],
        "released": [rank.pid for rank in cohort],
    }


def test_ls_tells_every_state_and_who_has_it_mapped(scene, name, place):
    listing = answer("ls", place)
    assert listing["directory"] == str(place)
    rows = {row["state"]: row for row in listing["regions"]}
    assert len(listing["regions"]) == 5
    for state, pids in scene.items():
        row = rows[state]
        assert row["name"] == f"{name}-{state}"
        assert row["path"] == str(place / f"aioshm-{UID}-{name}-{state}")
        assert row["user"] == UID
        assert [mapper["pid"] for mapper in row["mapped_by"]] == sorted(pids)
        assert all("rank_main.py" in mapper["command"] for mapper in row["mapped_by"])
        if state != "foreign":
            assert (row["size"], row["resident"], row["reason"]) == (SIZE, SIZE, None)
            share = float(collapse_works()) if pids else None  # nobody who maps a leftover can be asked
            assert row["huge_share"] == share
    assert rows["foreign"]["reason"] == "it is not a regular file"


def test_ls_in_a_pipe_is_plain_text_that_is_never_cut(scene, name, place):
    status, out, err = command("ls", place)
    assert (status, err) == (0, "")
    assert not re.findall(r"[^\n -~─]", out)
    lines = out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    for state, pids in scene.items():
        (row,) = [number for number, line in enumerate(lines) if f"{name}-{state} " in line]
        assert f" {state}" in lines[row]
        for offset, pid in enumerate(sorted(pids)):
            assert re.search(rf"\b{pid} python\S* .*/rank_main\.py$", lines[row + offset])
        if state != "foreign":
            assert lines[row].count("4 MiB") == 2
    assert f"1 leftover takes 4 MiB: `aioshm gc --directory {place}` removes it." in out


@pytest.mark.parametrize("columns", [80, 120])
def test_ls_fits_a_terminal(scene, place, columns):
    lines = on_a_terminal("ls", place, columns)
    assert max(map(len, lines)) <= columns
    for state, pids in scene.items():
        assert [line for line in lines if f" {state} " in line and ("4 MiB" in line or state == "foreign")]
        assert all([line for line in lines if f" {pid} python" in line] for pid in pids)


def test_ls_and_gc_where_there_is_nothing(place):
    status, out, err = command("ls", place)
    assert (status, out.splitlines()[0], err) == (0, f"No regions in {place}.", "")
    assert answer("ls", place)["regions"] == []
    assert command("gc", place) == (0, f"Nothing to remove in {place}.\n", "")
    assert command("gc", place, "--dry-run") == (0, f"Nothing to remove in {place}.\n", "")
    assert answer("gc", place) == {"directory": str(place), "dry_run": False, "freed": 0, "leftovers": []}


@pytest.mark.parametrize("what", ["ls", "gc"])
def test_a_directory_that_cannot_be_read_is_one_sentence(what, place):
    status, out, err = command(what, place / "missing")
    assert (status, out) == (1, "")
    assert err == f"{place}/missing cannot be read: No such file or directory.\n"
    arguments = [sys.executable, "-m", "aioshm", what, "--directory", ""]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for '--directory': directory must be the path of a directory" in done.stderr


def test_a_region_that_only_a_view_holds_is_released_and_its_size_is_what_is_mapped(run, name, place):
    async def main():
        async with aioshm.open_region(name, SIZE - 100, directory=place) as region:
            view = memoryview(region.buffer)
        (row,) = answer("ls", place)["regions"]
        assert (row["name"], row["state"], row["size"], row["resident"]) == (name, "released", SIZE, None)
        assert [mapper["pid"] for mapper in row["mapped_by"]] == [os.getpid()]
        del view

    run(main())
    assert answer("ls", place)["regions"] == []


def test_regions_of_another_directory_are_not_told(run, name, place):
    """On the same file system, released too."""
    beside = place / "beside"
    beside.mkdir()

    async def main():
        cohort = {"local_rank": 0, "local_world_size": 1}
        async with (
            aioshm.open_region(name, SIZE, directory=beside),
            aioshm.open_region(f"{name}-2", SIZE, directory=beside, **cohort),
        ):
            assert answer("ls", place)["regions"] == []
            assert [row["state"] for row in answer("ls", beside)["regions"]] == ["live", "released"]

    run(main())


def test_gc_removes_leftovers_and_nothing_else(scene, ranks, name, place):
    """vllm #54124: a sweep by name deletes a live engine's region."""
    there = place / f"aioshm-{UID}-{name}-leftover"
    before = sorted(place.iterdir())
    assert command("gc", place, "--dry-run") == (
        0,
        f"Would remove {there}: 4 MiB.\nWould free 4 MiB by removing 1 leftover.\n",
        "",
    )
    assert sorted(place.iterdir()) == before
    facts = {"name": f"{name}-leftover", "path": str(there), "bytes": SIZE, "reason": None, "mapped_by": []}
    told = answer("gc", place, "--dry-run")
    assert (told["freed"], told["leftovers"]) == (0, [{**facts, "outcome": "would remove"}])
    told = answer("gc", place)
    assert (told["freed"], told["leftovers"]) == (SIZE, [{**facts, "outcome": "removed"}])
    before.remove(there)
    assert sorted(place.iterdir()) == before
    states = {row["state"]: row for row in answer("ls", place)["regions"]}
    assert set(states) == {"live", "forming", "released", "foreign"}
    assert [mapper["pid"] for mapper in states["live"]["mapped_by"]] == scene["live"]
    late = ranks.start(f"{name}-live")
    assert not late.open(SIZE, directory=str(place))["created"]


def test_gc_says_what_it_removed(name, place):
    for number in range(2):
        leave(place / f"aioshm-{UID}-{name}-{number}")
    status, out, err = command("gc", place)
    assert (status, err) == (0, "")
    assert out == "".join(
        [
            *(f"Removed {place}/aioshm-{UID}-{name}-{number}: 4 MiB.\n" for number in range(2)),
            "2 leftovers removed, 8 MiB freed.\n",
        ]
    )


def test_memory_that_a_view_still_holds_is_not_said_to_be_freed(run, ranks, name, place):
    rank = ranks.start()
    rank.open(SIZE, directory=str(place))

    async def main():
        async with aioshm.open_region(name, SIZE, directory=place) as region:
            view = memoryview(region.buffer)
            view[:5] = b"alive"
        rank.kill()
        _, out, _ = command("gc", place)
        assert f"4 MiB, freed when it is no longer mapped by pid {os.getpid()}.\n1 leftover removed, 0 B freed." in out
        assert bytes(view[:5]) == b"alive"
        del view

    run(main())
    assert list(place.iterdir()) == []


@pytest.mark.root
def test_a_crash_loop_has_room_again_after_gc(run, ranks, name, small_tmpfs):
    """vllm #51579, #54002, #57303: each start leaves its region under another name until the tmpfs is full."""
    where = small_tmpfs(mib=64)
    for attempt in range(3):
        rank = ranks.start(f"{name}-{attempt}")
        rank.open(20 * MIB, directory=str(where))
        rank.kill()

    async def main():
        with pytest.raises(aioshm.InsufficientSpaceError, match=r"take 60\.0 MiB of it: `aioshm gc"):
            await aioshm.open_region(name, 20 * MIB, directory=where).__aenter__()
        status, out, _ = command("gc", where)
        assert (status, out.splitlines()[-1]) == (0, "3 leftovers removed, 60 MiB freed.")
        async with aioshm.open_region(name, 60 * MIB, directory=where) as region:
            assert region.created

    run(main())


@pytest.mark.root
def test_what_cannot_be_removed_makes_the_exit_status_1(name, small_tmpfs):
    where = small_tmpfs(mib=8)
    there = leave(where / f"aioshm-{UID}-{name}")
    subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
    try:
        status, out, err = command("gc", where)
        assert (status, err) == (1, "")
        assert out == f"Could not remove {there} (4 MiB): read-only file system.\nNothing removed.\n"
        status, out, _ = command("gc", where, "--json")
        assert (status, json.loads(out)["leftovers"][0]["outcome"]) == (1, "failed")
        assert command("gc", where, "--dry-run")[0] == 0
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
    assert command("gc", where)[0] == 0


@pytest.mark.root
@pytest.mark.skipif(UID != 0, reason="becoming another user needs root")
class TestOtherUsers:
    def test_what_may_not_be_read_is_said_so(self, run, name, place):
        there = leave(place / f"aioshm-0-{name}")
        mine = place / f"aioshm-{NOBODY}-{name}"
        os.chown(leave(mine), NOBODY, NOBODY)
        told = answer("ls", place, program=AS_NOBODY)
        assert told["unreadable_processes"] > 0
        assert {row["path"]: row["state"] for row in told["regions"]} == {str(mine): "leftover", str(there): "unknown"}
        _, out, _ = command("ls", place, program=AS_NOBODY)
        assert re.search(r"\(uid 0\) .* unknown +permission denied$", out, re.MULTILINE)
        assert re.search(r"^\d+ process(es)? may not be looked at by this user", out, re.MULTILINE)
        told = answer("gc", place, program=AS_NOBODY)
        assert [left["path"] for left in told["leftovers"]] == [str(mine)]
        assert list(place.iterdir()) == [there]

    def test_root_leaves_what_is_not_its_own(self, name, place):
        other = place / f"aioshm-{NOBODY}-{name}"
        os.chown(leave(other), NOBODY, NOBODY)
        status, out, _ = command("gc", place)
        assert (status, out) == (
            0,
            f"Left {other} (4 MiB): it belongs to uid {NOBODY}, who can remove it.\nNothing removed.\n",
        )
        assert other.exists()


@pytest.mark.slow
def test_ls_and_gc_while_eight_open_and_leave_200_times(ranks, name, place):
    crew = ranks.start_many(8)
    for index, rank in enumerate(crew):
        options = {"directory": str(place), "threads": 1}
        rank.send("rounds", name=name, size=MIB + 13, count=200, index=index, options=options)
    while not all(map(has_answered, crew)):
        answer("ls", place)
        answer("gc", place)
    answers = [rank.answer() for rank in crew]
    assert not [each for each in answers if "error" in each], answers
    assert list(place.iterdir()) == []
