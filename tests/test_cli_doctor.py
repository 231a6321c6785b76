"""`aioshm doctor` as a real process: what it says in each situation, its exit status, and that it leaves nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminal import draw, environment, without_controls

import aioshm
from aioshm._host import read_file_system, read_memory
from aioshm.cli._examination import Examination
from aioshm.cli._trial import measure, try_huge_pages

MIB = 1 << 20
DOCTOR = (sys.executable, "-m", "aioshm", "doctor")
LABELS = ["directory", "memory", "swap", "huge pages", "NUMA", "processors", "memlock", "leftovers", "speed"]


def doctor(
    *arguments: object, inside: Callable[[], None] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run it with pipes for its output, perhaps in a memory group."""
    return subprocess.run(
        [*DOCTOR, *map(str, arguments)],
        check=False,
        capture_output=True,
        encoding="utf-8",
        env=environment(**more),
        preexec_fn=inside,
    )


def draw_doctor(*arguments: object, columns: int) -> tuple[int, list[str]]:
    """Run it on a terminal, and return its exit status and the lines without their colours."""
    status, drawn = draw([*DOCTOR, *map(str, arguments)], columns=columns, rows=50)
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor was hidden, and is shown again
    return status, [line.rstrip() for line in re.split(r"[\r\n]+", without_controls(drawn))]


def row(out: str, label: str) -> str:
    """Return the one row of this label."""
    (line,) = re.findall(rf"^. {label}: (.*)$", out, re.MULTILINE)
    return str(line)


def is_tight() -> bool:
    memory = read_memory()
    return memory is None or memory.available < 1 << 30 or read_file_system("/dev/shm").free < 1 << 30


@pytest.mark.skipif(is_tight(), reason="there is less than 1 GiB to be had here")
@pytest.mark.parametrize("size", [None, "200MiB"])
def test_a_plain_host(size):
    done = doctor(*(["--size", size] if size else []))
    assert (done.returncode, done.stderr) == (0, "")
    labels = re.findall(r"^. ([\w ]{4,10}): ", done.stdout, re.MULTILINE)
    assert [label for label in LABELS if label in labels] == list(dict.fromkeys(labels))
    assert row(done.stdout, "directory").startswith("/dev/shm: tmpfs, huge=")
    assert re.search(r"^. memory: host: [\d.]+ GiB of [\d.]+ GiB free.* \[[#=+.]{20}\]$", done.stdout, re.MULTILINE)
    speed = r"[\d.]+ [MG]iB/s with \d+ threads?, measured on \d+ MiB"
    if size is None:
        assert re.fullmatch(speed, row(done.stdout, "speed"))
        assert "\n✓ A region can stand in /dev/shm.\n• The largest region that fits right now: " in done.stdout
    else:
        assert re.fullmatch(speed + r": 200 MiB would take about [\d.]+ m?s", row(done.stdout, "speed"))
        assert done.stdout.startswith("aioshm doctor: 200 MiB in /dev/shm\n\n")
        assert "\n\n✓ 200 MiB fit.\n" in done.stdout  # another suite's leftovers may be told of after it


@pytest.mark.root
class TestSmallFileSystem:
    def test_it_does_not_fit(self, small_tmpfs):
        where = small_tmpfs(mib=64)
        before = os.statvfs(where)
        done = doctor("--size", "1GiB", "--directory", where)
        assert (done.returncode, done.stderr) == (1, "")
        assert (
            f"\n✗ directory: {where}: tmpfs, huge=never: 64 MiB of 64 MiB free [++++++++++++++++++++]\n" in done.stdout
        )
        assert f"\n✗ Insufficient space in {where} for the region: 1024.0 MiB required, 64.0 MiB free" in done.stdout
        assert done.stdout.endswith("\n• The largest region that fits right now: 64 MiB.\n")
        assert "measured on 16 MiB" in row(done.stdout, "speed")
        assert (os.statvfs(where).f_bfree, os.statvfs(where).f_ffree) == (before.f_bfree, before.f_ffree)

    def test_the_largest_that_it_names_fits(self, small_tmpfs):
        where = small_tmpfs(mib=64)
        assert doctor("--size", "64MiB", "--directory", where).returncode == 0
        assert doctor("--size", 64 * MIB + 1, "--directory", where).returncode == 1

    @pytest.mark.parametrize("option", ["huge=always", "huge=advise"])
    def test_huge_pages_that_the_mount_gives(self, small_tmpfs, option):
        where = small_tmpfs(mib=64, options=option)
        done = doctor("--directory", where)
        assert option in row(done.stdout, "directory")
        if "none" in row(done.stdout, "huge pages"):
            pytest.skip("this kernel gives no huge pages")
        assert row(done.stdout, "huge pages").startswith("2 MiB pages work, given by the mount at first touch")

    def test_leftovers_in_the_way(self, small_tmpfs, ranks, name):
        where = small_tmpfs(mib=64)
        dead = ranks.start()
        dead.open(40 * MIB, directory=str(where))
        alive = ranks.start(f"{name}-alive")
        alive.open(4 * MIB, directory=str(where))
        dead.kill()
        done = doctor("--size", "48MiB", "--directory", where)
        assert done.returncode == 1
        assert f"\n! leftovers: 1, taking 40 MiB in {where}\n" in done.stdout
        (verdict,) = [line for line in done.stdout.splitlines() if "Insufficient space" in line]
        assert f"aioshm gc --directory {where}" in verdict
        assert doctor("--size", "4MiB", "--directory", where).stdout.endswith(f"--directory {where} frees it.\n")
        assert alive.ask("read", offset=0, length=1) == {"text": "\0"}
        alive.ask("close")
        assert (where / f"aioshm-{os.geteuid()}-{name}").stat().st_size == 40 * MIB  # looking removes nothing
        (where / f"aioshm-{os.geteuid()}-{name}").unlink()

    @pytest.mark.parametrize("columns", [80, 120])
    def test_on_a_terminal(self, small_tmpfs, columns):
        where = small_tmpfs(mib=64)
        status, lines = draw_doctor("--size", "1GiB", "--directory", where, columns=columns)
        assert status == 1
        assert max(map(len, lines)) <= columns
        assert "             ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ 64 MiB of 64 MiB free" in lines
        assert "             █ in use  ▒ of it reclaimable  ▓ the region  ░ free" in lines
        labels = [line[2:12].strip() for line in lines if re.match(r"[✓!✗•] [a-zA-Z]", line)]
        assert [label for label in LABELS if label in labels] == labels[: len(LABELS)]
        assert not [line for line in lines if "…" in line]
        assert any(line.startswith("✗ Insufficient space in") for line in lines)

    def test_a_path_longer_than_a_line_is_told_whole(self, small_tmpfs):
        where = small_tmpfs(mib=64) / ("deep-" * 20 + "end")
        where.mkdir()
        _, lines = draw_doctor("--size", "1GiB", "--directory", where, columns=80)
        assert f"Insufficientspacein{where}fortheregion" in "".join("".join(lines).split())


@pytest.mark.root
@pytest.mark.parametrize("options", ["", "huge=always"])
def test_a_trial_gives_all_of_it_back(run, small_tmpfs, options):
    where = small_tmpfs(mib=64, options=options)
    sample = run(measure(str(where), 4096, 16 * MIB))
    assert (sample.size, sample.threads) == (16 * MIB, 1)
    assert 0 < sample.huge <= 16 * MIB or run(try_huge_pages(str(where), 4096)).reason
    run(try_huge_pages(str(where), 4096))
    assert os.statvfs(where).f_bfree * 4096 == 64 * MIB
    assert str(where) not in Path("/proc/self/maps").read_text()


@pytest.mark.root
def test_a_trial_that_finds_no_room_gives_all_of_it_back_too(run, small_tmpfs):
    where = small_tmpfs(mib=16)
    with pytest.raises(aioshm.InsufficientSpaceError):
        run(measure(str(where), 4096, 32 * MIB))
    assert os.statvfs(where).f_bfree * 4096 == 16 * MIB
    assert str(where) not in Path("/proc/self/maps").read_text()


@pytest.mark.root
class TestMemoryGroup:
    def test_a_group_that_is_too_small(self, memory_group, small_tmpfs):
        parent = memory_group(limit=512 * MIB)
        group = memory_group(limit=200 * MIB, parent=parent)
        done = doctor("--size", "300MiB", "--directory", small_tmpfs(mib=1024), inside=group.enter)
        assert (done.returncode, done.stderr) == (1, "")
        marks = {level: mark for mark, level in re.findall(r"^(.) memory: (\S+): ", done.stdout, re.MULTILINE)}
        assert (marks[str(group.path)], marks[str(parent.path)], marks["host"]) == ("✗", "✓", "✓")
        assert "✓ directory" in done.stdout
        (verdict,) = [line for line in done.stdout.splitlines() if line.startswith("✗ Insufficient")]
        assert f"Insufficient memory in memory cgroup {group.path} for the region" in verdict
        assert "raise the memory limit of the container or pod" in verdict
        assert group.oom_kills == 0

    def test_it_fits_after_reclaim(self, memory_group, small_tmpfs, ranks, tmp_path):
        if read_file_system(str(tmp_path)).kind != "other":
            pytest.skip("the temporary directory stands in memory here: its files are no cache")
        group = memory_group(limit=512 * MIB)
        ranks.start(preexec=group.enter).ask("cache", timeout=100, path=str(tmp_path / "file"), size=300 * MIB)
        if group.usage < 290 * MIB:
            pytest.skip("the file's cache is not charged to the group here")
        done = doctor("--size", "300MiB", "--directory", small_tmpfs(mib=1024), inside=group.enter)
        assert (done.returncode, done.stderr) == (0, "")
        (line,) = re.findall(rf"^! memory: {group.path}: .*$", done.stdout, re.MULTILINE)
        assert re.search(r" MiB by reclaim \[#+=+\++\]$", line)
        assert "\n✓ 300 MiB fit once the kernel has dropped caches" in done.stdout

    def test_a_sample_is_no_more_than_a_quarter(self, memory_group, small_tmpfs):
        group = memory_group(limit=100 * MIB)
        done = doctor("--directory", small_tmpfs(mib=1024), inside=group.enter)
        assert done.returncode == 0
        (measured,) = re.findall(r"measured on (\d+) MiB", row(done.stdout, "speed"))
        assert 0 < int(measured) <= 25


def test_a_directory_on_disk(tmp_path):
    if read_file_system(str(tmp_path)).kind != "other":
        pytest.skip("the temporary directory stands in memory here")
    done = doctor("--directory", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert row(done.stdout, "directory").startswith(f"{tmp_path}: not in memory")
    assert row(done.stdout, "speed") == "not measured: no region fits there, of whatever size"
    assert done.stdout.endswith(
        f"\n✗ {tmp_path} cannot hold a region: it is not in memory (neither tmpfs nor hugetlbfs). "
        "Use /dev/shm, or another tmpfs or hugetlbfs mount.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path):
    done = doctor("--directory", tmp_path / "missing")
    assert (done.returncode, done.stderr) == (1, "")
    assert row(done.stdout, "directory") == f"{tmp_path}/missing: cannot be looked at"


def test_output_in_a_pipe_is_plain_text():
    out = doctor("--size", "1GiB").stdout
    assert not re.findall(r"[^\n -~✓•✗]", out)
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_ascii_where_the_output_takes_nothing_else():
    done = doctor("--size", "60PiB", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert "\nNO Insufficient" in done.stdout


def names_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("size", [None, 64 * MIB, 1 << 56])
def test_json_is_complete(size):
    done = doctor("--json", *(["--size", size] if size else []))
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    assert set(facts) == names_of(Examination) | {"version", "leftover_bytes", "ready_seconds", "fits", "findings"}
    assert set(facts["report"]) == names_of(aioshm.PreflightReport) | {"fits"}
    assert done.returncode == (0 if facts["fits"] else 1)
    assert facts["fits"] is facts["report"]["fits"]
    assert facts["size"] == size
    assert facts["report"]["size"] == (size or 1)
    assert facts["version"] == aioshm.__version__
    assert facts["findings"][0]["held"] is facts["fits"]
    if facts["sample"] is not None:
        assert facts["sample"]["rate"] == facts["sample"]["size"] / facts["sample"]["seconds"]
        assert facts["ready_seconds"] == (size / facts["sample"]["rate"] if size else None)
        assert facts["huge_pages"]["way"] in ("collapse", "mount", None)
    if size == 1 << 56:
        assert facts["report"]["problems"][0]["required"] == facts["report"]["allocated"]


@pytest.mark.parametrize("arguments", [("--size", "0"), ("--size", "big"), ("--directory", "")])
def test_bad_usage_is_told_with_status_2(arguments):
    done = doctor(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: aioshm doctor")
    assert f"Invalid value for '{arguments[0]}'" in done.stderr


def test_it_ends_quietly_when_nobody_reads():
    process = subprocess.Popen(DOCTOR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")


def test_interrupted_it_is_gone_with_what_it_took(small_tmpfs, tmp_path):
    """Held in the middle of its sample by a hook that Python itself runs first."""
    where = small_tmpfs(mib=512)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from aioshm import _populate\n"
        "real = _populate.Populate._populate\n"
        "def interrupted(self, chunk):\n"
        "    if self.done > 16 << 20: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(self, chunk)\n"
        "_populate.Populate._populate = interrupted\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = doctor("--directory", where, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
    assert os.statvfs(where).f_bfree == os.statvfs(where).f_blocks
    assert list(where.iterdir()) == []
