"""`aioshm demo` as real processes: what it shows, its exit status, and that it leaves nothing however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from terminal import draw, environment, without_controls

import aioshm.cli

SHM = Path("/dev/shm")
SMALL = ("--size", "16MiB", "--processes", "3")

# Run by Python itself before a rank begins: there one piece of the kernel, or of the demo, behaves otherwise.
HOLD = """
import os, threading
from aioshm import _libc
real, first = _libc.try_madvise, threading.Lock()
def held(address, length, advice):
    if advice == _libc.MADV_POPULATE_WRITE and first.acquire(blocking=False):
        os.write(os.open("{place}/held", os.O_WRONLY), b"%d " % os.getpid())
        os.read(os.open("{place}/go-on", os.O_RDONLY), 1)
    return real(address, length, advice)
_libc.try_madvise = held
"""
WRITE_NOTHING = """
from aioshm.cli import _shares
async def write_nothing(*_): pass
_shares.write_share = write_nothing
"""


class Demo:
    """One run of the command, with pipes for its output."""

    def __init__(self, *arguments: str, hook: str | None = None, place: Path | None = None) -> None:
        self.pipes: list[int] = []
        if hook is not None and place is not None:
            (place / "sitecustomize.py").write_text(hook.format(place=place))
            for pipe in ("held", "go-on"):
                os.mkfifo(place / pipe)
                self.pipes.append(os.open(place / pipe, os.O_RDWR))  # both ways: nobody waits for an opener
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aioshm", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # so that a test can send what a Ctrl-C sends, to the whole group
            env=environment(place),
        )

    def ranks(self, count: int) -> list[int]:
        """Read on until all ranks have said their pids."""
        assert self.process.stdout is not None
        pids: list[int] = []
        while len(pids) < count:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            pids += map(int, re.findall(r"is ready, pid (\d+)", line))
        return pids

    def held(self) -> int:
        """Wait until a creator stands in the middle of its populate, and return its pid."""
        return int(os.read(self.pipes[0], 64))

    def go_on(self) -> None:
        """Let it go on, and whoever takes over from it."""
        os.write(self.pipes[1], bytes(64))

    def names(self) -> list[str]:
        """Return the names of its region in /dev/shm."""
        mine = f"aioshm-{os.geteuid()}-demo-{self.process.pid}-"
        return [entry.name for entry in SHM.iterdir() if entry.name.startswith(mine)]

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def reap(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pipe in self.pipes:
            os.close(pipe)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start demos; reaped at the end of the test whatever happens."""
    started: list[Demo] = []

    def start(*arguments: str, hook: str | None = None) -> Demo:
        started.append(Demo(*arguments, hook=hook, place=tmp_path if hook else None))
        return started[-1]

    yield start
    for each in started:
        each.reap()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_it_shows_the_main_job_and_leaves_nothing(demo):
    run = demo(*SMALL)
    status, out, err = run.finish()
    assert (status, err) == (0, "")
    assert "3 processes race for one region of 16 MiB in /dev/shm" in out
    verbs = {"is ready": 3, "created the region": 1, "joined the region": 2, "wrote": 3, "checked the": 3, "left": 3}
    for verb, times in verbs.items():
        assert len(re.findall(rf"^rank \d {verb}", out, re.MULTILINE)) == times, verb
    seconds, rate = r"[\d.]+ m?s", r"[\d.]+ \w+/s"
    row = rf"^ +(\d) (creator|joiner) +{seconds} +{seconds} +{rate} (.+?) +\d+ +{seconds}$"
    rows = re.findall(row, out, re.MULTILINE)
    assert [int(rank) for rank, _, _ in rows] == [0, 1, 2]
    assert sorted(role for _, role, _ in rows) == ["creator", "joiner", "joiner"]
    assert {huge for _, role, huge in rows if role == "joiner"} == {"as the creator's"}
    for sentence in (
        r"One creator, rank \d; all ranks have the same inode mapped\.",
        r"3 shares of 5\.3 MiB written, each checked by the 2 other ranks: all as written\.",
        rf"Longest stall of an event loop: {seconds} \(rank \d while \w+.* until after the close\.",
        r"Nothing left in /dev/shm\. .*",
    ):
        assert re.search(f"^[✓•] {sentence}$", out, re.MULTILINE), sentence
    assert not run.names()


def test_output_in_a_pipe_is_plain_text(demo):
    _, out, _ = demo(*SMALL).finish()
    assert not re.findall(r"[^\n -~✓•─']", out)
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_ascii_where_the_output_takes_nothing_else():
    command = [sys.executable, "-m", "aioshm", "demo", *SMALL]
    done = subprocess.run(command, check=False, capture_output=True, env=environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0, done.stderr
    assert b"\nok One creator" in done.stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_progress_is_drawn_on_a_terminal(columns):
    status, drawn = draw([sys.executable, "-m", "aioshm", "demo", *SMALL], columns=columns)
    assert status == 0
    assert "\x1b[?25l" in drawn  # the cursor is hidden,
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # and shown again
    text = without_controls(drawn)
    lines = re.split(r"[\r\n]+", text)
    for rank in range(3):
        assert [line for line in lines if line.startswith(f"rank {rank} starting") and "━━━" in line]
        assert [line for line in lines if line.startswith(f"rank {rank} left") and "━━━" in line]
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if "…" in line]
    assert "is ready, pid" not in text


def test_what_does_not_fit_is_one_sentence(demo):
    run = demo("--size", "60PiB", "--processes", "3")
    status, out, err = run.finish()
    assert status == 1
    assert re.fullmatch(r"Insufficient (space|memory) .* for the demo: 64424509440\.\d MiB required, .*--size.*\n", err)
    assert "Nothing left in /dev/shm" in out
    assert not run.names()


def test_an_unsuitable_directory_is_one_sentence(demo, tmp_path):
    status, _, err = demo("--directory", str(tmp_path / "missing")).finish()
    assert status == 1
    assert re.fullmatch(r"\S+/missing cannot hold a region: no such file or directory\..*\n", err)


def test_a_small_file_system_is_enough_by_default(demo, small_tmpfs):
    where = small_tmpfs(mib=40)
    status, out, err = demo("--directory", str(where)).finish()
    assert (status, err) == (0, "")
    assert f"one region of 10 MiB in {where}" in out
    assert "Space in use: 0 B before, 10 MiB while open, 0 B afterwards." in out


def test_shares_that_are_not_right_are_found(demo):
    status, out, _ = demo(*SMALL, hook=WRITE_NOTHING).finish()
    assert status == 1
    assert re.search(
        r"^✗ Not the bytes that were written: rank 0 found share 1 wrong from byte \d+; ", out, re.MULTILINE
    )
    assert "✓ One creator" in out


@pytest.mark.parametrize("victims", ["creator", "all"])
def test_killed_ranks_leave_nothing(demo, victims):
    run = demo(*SMALL, hook=HOLD)
    ranks = run.ranks(3)
    creator = run.held()
    assert creator in ranks
    assert len(run.names()) == 1
    for pid in ranks if victims == "all" else [creator]:
        os.kill(pid, signal.SIGKILL)
    run.go_on()
    status, out, err = run.finish()
    assert status == 1
    dead = "|".join(map(str, ranks if victims == "all" else [creator]))
    assert re.fullmatch(rf"Rank \d \(pid ({dead})\) was ended by SIGKILL at step 'open'\.\n", err)
    assert not run.names()
    assert not [pid for pid in ranks if is_alive(pid)]
    # The survivors recycle what the creator left, or leave before that, and then the command says and removes it.
    assert "in /dev/shm" in out or victims == "all"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_in_the_middle_it_cleans_up(demo, number, expected):
    run = demo(*SMALL, hook=HOLD)
    ranks = run.ranks(3)
    run.held()
    assert run.process.pid not in map(os.getpgid, ranks)
    os.killpg(run.process.pid, number)
    run.go_on()
    status, out, err = run.finish()
    assert status == expected
    assert err in ("Interrupted.\n", "Terminated.\n")
    assert "Nothing left in /dev/shm" in out
    assert not run.names()
    assert not [pid for pid in ranks if is_alive(pid)]


def test_a_second_interrupt_waits_for_nobody(demo):
    run = demo(*SMALL, hook=HOLD)
    ranks = run.ranks(3)
    os.kill(run.held(), signal.SIGSTOP)
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):  # well within what a rank gets to leave by itself
            run.process.wait(2)
    assert run.finish()[0] == 130
    assert not run.names()
    assert not [pid for pid in ranks if is_alive(pid)]


def test_ranks_of_a_killed_demo_leave_by_themselves(demo):
    run = demo(*SMALL, hook=HOLD)
    handles = [os.pidfd_open(pid) for pid in run.ranks(3)]
    run.held()
    run.process.kill()
    run.go_on()
    try:
        for handle in handles:
            assert select.select([handle], [], [], 30)[0]
    finally:
        for handle in handles:
            os.close(handle)
    assert not run.names()


def test_it_ends_quietly_when_nobody_reads(demo):
    run = demo(*SMALL)
    assert run.process.stdout.readline()
    run.process.stdout.close()
    run.process.stdout = None
    status, _, err = run.finish()
    assert (status, err) == (1, "")
    assert not run.names()


@pytest.mark.parametrize("package", ["click", "rich", "bitmath"])
def test_without_the_extra_it_says_how_to_install_it(package):
    program = f"import sys; sys.modules[{package!r}] = None; import aioshm.cli; aioshm.cli.main()"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"The command aioshm needs {package}: install it with pip install 'aioshm[cli]'\n"


@pytest.mark.parametrize("arguments", [("--size", "0"), ("--size", "big"), ("--processes", "1"), ("--directory", "")])
def test_bad_usage_is_told_with_status_2(demo, arguments):
    status, out, err = demo(*arguments).finish()
    assert (status, out) == (2, "")
    assert err.startswith("Usage: aioshm demo")
    assert f"Invalid value for '{arguments[0]}'" in err.replace("for --directory", "for '--directory'")


def test_the_script_is_the_same_command():
    (script,) = entry_points(group="console_scripts", name="aioshm")
    assert script.load() is aioshm.cli.main
