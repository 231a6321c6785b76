"""The lock table against the real kernel: what excludes what, what outlives what, within a process and across them."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import warnings

import pytest
from tracing import traced

from aioshm import _locks
from aioshm._locks import CLAIM, GATE, MAX_RANKS, PID, READY, RELEASE, WORLD, Description, Range


@pytest.fixture
def description(tmp_path):
    """Return what opens the same file once more: each a description of its own."""
    opened = []

    def make() -> Description:
        opened.append(Description(str(tmp_path / "file"), os.O_CREAT))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_ranges_do_not_overlap_and_lie_beyond_any_data():
    ranges = sorted([GATE, RELEASE, CLAIM, READY, PID, WORLD], key=lambda what: what.start)
    assert ranges[0].start >= 1 << 62
    for below, above in itertools.pairwise(ranges):
        assert below.start + below.length <= above.start
    assert ranges[-1].start + ranges[-1].length < (1 << 63)
    assert PID.length == MAX_RANKS << 22  # a pid has 22 bits (kernel: PID_MAX_LIMIT)


@pytest.mark.parametrize(
    ("held", "wanted", "granted"),
    [
        ("exclusive", "exclusive", False),
        ("exclusive", "shared", False),
        ("shared", "exclusive", False),
        ("shared", "shared", True),
    ],
)
def test_what_excludes_what(description, held, wanted, granted):
    mine, other = description(), description()
    assert getattr(mine, f"try_{held}")(GATE)
    assert getattr(other, f"try_{wanted}")(GATE) is granted
    assert getattr(other, f"try_{wanted}")(RELEASE)  # its neighbour is free in any case
    mine.unlock(GATE)
    assert getattr(other, f"try_{wanted}")(GATE)


def test_downgrade_lets_in_those_who_share_and_nobody_else(description):
    mine, second, third = description(), description(), description()
    assert mine.try_exclusive(GATE)
    assert not second.try_shared(GATE)
    assert mine.try_shared(GATE)
    assert not third.try_exclusive(GATE)
    assert second.try_shared(GATE)


def test_refused_upgrade_keeps_what_was_held(description):
    """Leaving relies on it: whoever fails to get the gate exclusively still shares it until it says otherwise."""
    mine, other, late = description(), description(), description()
    assert mine.try_shared(GATE)
    assert other.try_shared(GATE)
    assert not mine.try_exclusive(GATE)
    other.close()
    assert not late.try_exclusive(GATE)
    assert mine.try_exclusive(GATE)
    assert not late.try_shared(GATE)


def test_find_held_says_where_and_never_names_our_own(description):
    mine, other, third = description(), description(), description()
    assert mine.find_held(WORLD) is None
    assert mine.try_exclusive(WORLD.at(1))
    assert mine.find_held(WORLD) is None
    assert other.try_shared(WORLD.at(9))
    assert third.try_exclusive(WORLD.at(4))
    assert mine.find_held(WORLD) in (4, 9)
    third.close()
    assert mine.find_held(WORLD) == 9
    assert mine.find_held(Range(WORLD.start, 9)) is None
    assert mine.find_held(Range(WORLD.start + 10, WORLD.length - 10)) is None
    assert other.find_held(WORLD) == 1


def test_find_held_of_a_range_that_reaches_into_ours(description):
    mine, other = description(), description()
    assert other.try_exclusive(CLAIM)
    assert mine.find_held(Range(CLAIM.start + 3, 2)) == 0


def test_find_held_takes_no_lock(description):
    mine, other = description(), description()
    mine.find_held(GATE)
    assert other.try_exclusive(GATE)


def test_closing_drops_the_locks_of_that_description_alone(description):
    """POSIX F_SETLK would drop all of the process's locks here."""
    mine, other, third = description(), description(), description()
    assert mine.try_exclusive(GATE)
    assert other.try_exclusive(RELEASE)
    other.close()
    other.close()
    assert other.closed
    assert not third.try_shared(GATE)
    assert third.try_exclusive(RELEASE)


def test_locks_leave_the_file_empty(description):
    mine = description()
    for what in (GATE, RELEASE, CLAIM, READY, PID, WORLD):
        assert mine.try_exclusive(what)
    assert mine.status().st_size == 0
    assert mine.status().st_blocks == 0


def test_description_that_nobody_closed_is_closed_when_it_goes(description, tmp_path):
    lost = Description(str(tmp_path / "file"), os.O_CREAT)
    assert lost.try_exclusive(GATE)
    fd = lost.fd
    del lost
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert description().try_exclusive(GATE)


def test_locks_are_seen_by_other_processes_and_die_with_their_holder(description, ranks, tmp_path):
    mine = description()
    rank = ranks.start()
    hold = {"call": "hold", "path": str(tmp_path / "file")}
    asked = {"exclusive": [[RELEASE.start, 1], [CLAIM.start + 5, 1]], "shared": [[GATE.start, 1]]}
    assert rank.ask("hook", **hold, **asked)["got"] == [True] * 3
    assert not mine.try_exclusive(GATE)
    assert mine.try_shared(GATE)
    assert not mine.try_shared(RELEASE)
    assert mine.find_held(CLAIM) == 5
    rank.kill()
    assert mine.try_exclusive(GATE)
    assert mine.try_exclusive(RELEASE)
    assert mine.find_held(CLAIM) is None


def _exit_code_of_child(work) -> int:
    """Fork, let `work` say in the child whether all is well, and return 0 if so."""
    with warnings.catch_warnings():
        # Python 3.12 warns where other threads run; that a user may fork all the same is what these tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_forked_child_has_no_description_and_the_parent_keeps_its_locks(description):
    mine, other = description(), description()
    assert mine.try_exclusive(GATE)
    fd = mine.fd
    assert _exit_code_of_child(lambda: mine.closed and other.closed and not _is_open(fd)) == 0
    assert not mine.closed
    assert not other.try_shared(GATE)


def test_child_that_outlives_its_parent_s_close_holds_nothing(description):
    mine, other = description(), description()
    assert mine.try_exclusive(GATE)
    waiting, go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        os.close(go)
        os.read(waiting, 1)  # until the parent has looked
        os._exit(0)
    try:
        mine.close()
        # The child closes its own before os.fork returns in it, which may be a moment after it did here.
        while not other.try_exclusive(GATE):
            threading.Event().wait(0.001)
    finally:
        os.close(go)
        os.close(waiting)
        os.waitpid(pid, 0)


def test_child_can_open_and_fork_again(description, tmp_path):
    description()

    def work() -> bool:
        own = Description(str(tmp_path / "file"), 0)
        taken = own.try_exclusive(GATE)
        return taken and _exit_code_of_child(lambda: own.closed) == 0

    assert _exit_code_of_child(work) == 0


def test_fork_waits_while_another_thread_is_between_open_and_register(description, monkeypatch, tmp_path):
    """Or the child would inherit a description that it does not know of, and keep a dead rank alive."""
    description()
    opened, go, forked = threading.Event(), threading.Event(), threading.Event()
    real, made, codes = os.open, [], []

    def slow_open(*arguments, **options):
        made.append(real(*arguments, **options))
        opened.set()
        assert go.wait(30)
        return made[-1]

    def fork() -> None:
        codes.append(_exit_code_of_child(lambda: not _is_open(made[0])))
        forked.set()

    monkeypatch.setattr(_locks.os, "open", slow_open)
    opener = threading.Thread(target=description)
    opener.start()
    assert opened.wait(30)
    monkeypatch.undo()
    forker = threading.Thread(target=fork)
    forker.start()
    assert not forked.wait(0.2)
    go.set()
    opener.join()
    forker.join()
    assert codes == [0]


def test_started_program_inherits_nothing(description, tmp_path):
    mine = description()
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert " -> " in listed.stdout
    assert str(tmp_path / "file") not in listed.stdout
    assert not os.get_inheritable(mine.fd)


def test_unlink_removes_only_the_file_that_is_ours(description, tmp_path):
    mine = description()
    path = tmp_path / "file"
    assert mine.is_at(str(path))
    path.unlink()
    assert not mine.is_at(str(path))
    assert not mine.unlink(str(path))
    path.touch()
    assert not mine.is_at(str(path))
    assert not mine.unlink(str(path))
    assert path.exists()
    (tmp_path / "link").symlink_to(path)
    other = description()
    assert not other.unlink(str(tmp_path / "link"))
    assert other.unlink(str(path))
    assert not path.exists()


def test_symlink_is_not_followed(description, tmp_path):
    description()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        Description(str(tmp_path / "link"), 0)


def test_kernel_without_these_locks_is_named(ranks, name, path):
    rank = ranks.start()
    rank.ask("hook", call="warm_up")
    with traced(rank.pid, "fcntl:error=EINVAL", path=path):
        rank.send("open", name=name, size=1, options={})
        answer = rank.answer()
    assert answer["error"] == "UnsupportedPlatformError"
    assert "open-file-description locks" in answer["message"]
    assert not path.exists()
