"""`aioshm.preflight` beside `open_region`, on real file systems and in real memory groups: they say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aioshm
from aioshm._host import read_file_system

MIB = 1 << 20
# Preflight, then the open, in one process: what each of them said.
PROGRAM = """
import asyncio, json, sys, aioshm
name, size, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
options = {"directory": directory, "allocation_name": "CPU KV cache", "hint": "Lower it."}
async def main():
    report = await aioshm.preflight(size, **options)
    try:
        async with aioshm.open_region(name, size, **options):
            error = None
    except aioshm.AioshmError as caught:
        error = {"error": type(caught).__name__, "message": str(caught), **vars(caught)}
    print(json.dumps({"report": report.to_dict(), "error": error}))
asyncio.run(main())
"""

pytestmark = pytest.mark.root


def look(directory: Path) -> tuple[int, int, int, list[str]]:
    """Return what asking could change: free blocks, free inodes, the time of the last change, names."""
    figures = os.statvfs(directory)
    return figures.f_bfree, figures.f_ffree, directory.stat().st_mtime_ns, sorted(os.listdir(directory))


def compare(run: Any, name: str, size: int, directory: Path) -> aioshm.PreflightReport:
    """Ask, then open; see that they say the same, and that asking changed nothing."""
    options = {"directory": directory, "allocation_name": "CPU KV cache", "hint": "Lower it."}
    in_memory = directory.is_dir() and read_file_system(str(directory)).kind == "tmpfs"  # a mount of the test's own
    before = look(directory) if in_memory else None
    report: aioshm.PreflightReport = run(aioshm.preflight(size, **options))
    assert before is None or look(directory) == before

    async def main() -> aioshm.AioshmError | None:
        try:
            async with aioshm.open_region(name, size, **options):
                return None
        except aioshm.AioshmError as error:
            return error

    raised, told = run(main()), report.error()
    assert (type(raised), str(raised)) == (type(told), str(told))
    if raised is not None and told is not None:
        assert vars(raised) == vars(told)
    return report


def fill(path: Path, size: int) -> None:
    """Be another program that takes space."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


@pytest.mark.parametrize("taken", [0, 16 * MIB, 64 * MIB])
def test_space_of_a_tmpfs_to_the_byte(run, name, small_tmpfs, taken):
    directory = small_tmpfs(mib=64)
    if taken:
        fill(directory / "other", taken)
    free = 64 * MIB - taken
    report = compare(run, name, free + 1, directory)
    assert not report.fits
    facts = report.directory
    assert (facts.kind, facts.total, facts.free, facts.mount_point) == ("tmpfs", 64 * MIB, free, str(directory))
    assert report.largest == free
    if free:
        assert compare(run, name, free, directory).fits


def test_leftovers_are_counted_in_the_same_way(run, name, small_tmpfs, ranks):
    directory = small_tmpfs(mib=64)
    dead = ranks.start(f"{name}-dead")
    dead.open(40 * MIB, directory=str(directory))
    dead.kill()
    report = compare(run, name, 48 * MIB, directory)
    (problem,) = report.problems
    assert isinstance(problem, aioshm.InsufficientSpaceError)
    assert problem.reclaimable_leftovers == 40 * MIB
    (directory / f"aioshm-{os.geteuid()}-{name}-dead").unlink()


def test_not_even_a_name_can_be_made(run, name, small_tmpfs):
    directory = small_tmpfs(mib=64, options="nr_inodes=2")
    (directory / "other").touch()
    report = compare(run, name, 4096, directory)
    assert (len(report.problems), report.largest) == (1, 0)


def test_a_directory_that_is_mounted_read_only(run, name, small_tmpfs):
    directory = small_tmpfs(mib=64, options="ro")
    report = compare(run, name, 4096, directory)
    assert isinstance(report.problems[0], aioshm.UnsuitableDirectoryError)
    assert report.largest == 0


@pytest.mark.parametrize("kind", ["missing", "file", "disk"])
def test_no_directory_for_a_region(run, name, tmp_path, kind):
    if read_file_system(str(tmp_path)).kind != "other":
        pytest.skip("the temporary directory stands in memory here")
    directory = tmp_path / kind
    if kind == "file":
        directory.touch()
    elif kind == "disk":
        directory.mkdir()
    report = compare(run, name, 4096, directory)
    assert isinstance(report.problems[0], aioshm.UnsuitableDirectoryError)
    assert (report.directory.kind, report.largest) == (None if kind == "missing" else "other", 0)


def test_a_directory_of_another_user(name, small_tmpfs, ranks):
    directory = small_tmpfs(mib=64)
    directory.chmod(0o755)
    rank = ranks.start()
    rank.ask("become", user=65534)
    told = rank.ask("preflight", size=4096, options={"directory": str(directory)})["report"]["problems"]
    rank.send("try_open", name=name, size=4096, options={"directory": str(directory)})
    raised = rank.answer()
    assert [(each["error"], each["message"]) for each in told] == [(raised["outcome"], raised["message"])]
    assert raised["outcome"] == "UnsuitableDirectoryError"


@pytest.mark.parametrize("option", ["", "huge=never", "huge=advise", "huge=within_size", "huge=always"])
def test_what_the_mount_says_of_huge_pages(run, small_tmpfs, option):
    report = run(aioshm.preflight(1, directory=small_tmpfs(mib=8, options=option)))
    assert report.huge_pages.mount_option == (option.removeprefix("huge=") or "never")
    assert report.huge_pages.page == 2 * MIB


def ask_inside(group: Any, name: str, size: int, directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(size), str(directory)],
        check=True,
        stdout=subprocess.PIPE,
        preexec_fn=group.enter,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("tight", [0, 1, 2])
def test_each_of_three_groups_in_turn_is_the_one_that_is_short(name, memory_group, small_tmpfs, tight):
    limits = [300 * MIB if level == tight else 400 * MIB for level in range(3)]
    top = memory_group(limit=limits[0])
    middle = memory_group(limit=limits[1], parent=top)
    own = memory_group(limit=limits[2], parent=middle)
    answer = ask_inside(own, name, 320 * MIB, small_tmpfs(mib=512))
    report, error = answer["report"], answer["error"]
    chain = [str(group.path) for group in (own, middle, top)]
    assert [each["level"] for each in report["memory"]][:3] == chain
    assert [each["limit"] for each in report["memory"]][:3] == limits[::-1]
    assert {each["level"] for each in report["memory"] if each["verdict"] == "short"} >= {
        str((top, middle, own)[tight].path)
    }
    (told,) = report["problems"]
    for key in ("error", "level", "limit", "required", "hint", "allocation_name"):
        assert told[key] == error[key]
    assert told["level"] == str((top, middle, own)[tight].path)
    for key in ("usage", "reclaimable"):  # a process that asks and then opens goes on taking memory of its own
        assert abs(told[key] - error[key]) < 4 * MIB
    assert 0 < told["usage"] < 60 * MIB


def test_what_fits_in_its_groups_fits(name, memory_group, small_tmpfs):
    group = memory_group(limit=300 * MIB)
    answer = ask_inside(group, name, 200 * MIB, small_tmpfs(mib=512))
    assert (answer["report"]["fits"], answer["error"]) == (True, None)
    largest = answer["report"]["largest"]
    assert 200 * MIB < largest < 300 * MIB
    again = ask_inside(group, name, largest - 4 * MIB, small_tmpfs(mib=512))
    assert (again["report"]["fits"], again["error"]) == (True, None)
    assert group.oom_kills == 0
