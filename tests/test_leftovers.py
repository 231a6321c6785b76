"""Leftovers: every file under a region's name is told apart, and only what is dead and ours is ever removed."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from leavings import MIB, NOBODY, SIZE, UID, leave, states, stop_in_open

import aioshm
from aioshm import _leftovers, _locks
from aioshm._leftovers import find_regions, leftover_bytes, remove_leftover
from aioshm._locks import Description


class TestLooking:
    def test_a_leftover_of_killed_ranks(self, ranks, place, there):
        crew = ranks.start_many(2)
        for rank in crew:
            rank.open(SIZE, directory=str(place))
        (found,) = find_regions(str(place))
        assert (found.path, found.name, found.user, found.state) == (str(there), crew[0].name, UID, "live")
        for rank in crew:
            rank.kill()
        (found,) = find_regions(str(place))
        assert (found.state, found.size, found.resident, found.ours) == ("leftover", SIZE, SIZE, True)
        assert (found.device, found.inode) == (there.stat().st_dev, there.stat().st_ino)
        assert leftover_bytes(str(place)) == SIZE
        assert remove_leftover(str(there)) == SIZE
        assert list(place.iterdir()) == []
        assert leftover_bytes(str(place)) == 0

    @pytest.mark.parametrize("where", ["os.ftruncate", "aioshm._libc.try_madvise", "os.fchmod"])
    def test_a_region_whose_creator_is_at_work_or_stopped(self, ranks, place, there, where):
        rank = ranks.start()
        stop_in_open(rank, where, place)
        assert states(place) == {there.name: "forming"}
        assert leftover_bytes(str(place)) == 0
        assert remove_leftover(str(there)) is None
        rank.resume()
        assert rank.answer()["created"]
        assert states(place) == {there.name: "live"}
        assert remove_leftover(str(there)) is None
        rank.ask("close")

    def test_a_cohort_until_it_is_released(self, ranks, place, there):
        first, second = ranks.start_many(2)
        options = {"local_rank": 0, "local_world_size": 2, "directory": str(place)}
        stop_in_open(first, "aioshm._libc.try_madvise", place, **options)
        assert states(place) == {there.name: "forming"}
        assert remove_leftover(str(there)) is None
        first.resume()
        second.open(SIZE, **{**options, "local_rank": 1})
        assert "error" not in first.answer()
        assert states(place) == {}

    def test_a_stub_that_nobody_has_locked_is_a_leftover_of_no_bytes(self, place, there):
        leave(there, 0, 0o600)
        assert states(place) == {there.name: "leftover"}
        assert remove_leftover(str(there)) == 0
        assert not there.exists()

    def test_other_names_are_not_looked_at(self, place):
        for other in ("aioshm", "aioshm-kv", "aioshm-0-", f"aioshm-{UID}-a b", f"aioshm-{UID}-..", "aioshm-00-kv", "x"):
            leave(place / other)
        assert states(place) == {}
        assert leftover_bytes(str(place)) == 0
        for other in place.iterdir():
            assert remove_leftover(str(other)) is None
        assert len(list(place.iterdir())) == 7

    def test_a_directory_that_is_not_there(self, place):
        with pytest.raises(FileNotFoundError):
            find_regions(str(place / "missing"))
        assert leftover_bytes(str(place / "missing")) == 0
        assert remove_leftover(str(place / "missing" / f"aioshm-{UID}-kv")) is None

    def test_looking_is_in_nobodys_way(self, run, name, place, there, monkeypatch):
        """The last one out goes at every step of a look. A lock held by the onlooker would leave the name behind."""
        for point in ("stat before", "how_held", "status", "close"):

            async def main(point: str = point) -> None:
                async with aioshm.open_region(name, SIZE, directory=place) as region:
                    went = []

                    def go(real: Any) -> Any:
                        def going(*arguments: Any, **options: Any) -> Any:
                            if not went:
                                went.append(True)
                                assert region._tenancy.seat.leave()
                            return real(*arguments, **options)

                        return going

                    with monkeypatch.context() as patch:
                        if point == "stat before":
                            patch.setattr(_leftovers, "Description", go(Description))
                        else:
                            patch.setattr(Description, point, go(getattr(Description, point)))
                        find_regions(str(place))
                    assert went
                    assert not there.exists()

            run(main())

    def test_it_asks_the_table_and_takes_no_lock(self, place, there, monkeypatch):
        leave(there)
        asked = []
        real = _locks.fcntl.fcntl

        def record(fd: int, command: int, *arguments: Any) -> Any:
            asked.append(command)
            return real(fd, command, *arguments)

        monkeypatch.setattr(_locks.fcntl, "fcntl", record)
        assert states(place) == {there.name: "leftover"}
        assert asked == [fcntl.F_OFD_GETLK]


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # Relative: the path itself may be too long for an address.
        before = os.getcwd()
        os.chdir(path.parent)
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def make_directory(path: Path) -> None:
    path.mkdir(0o700)


def make_link(path: Path) -> None:
    target = path.parent / "target"
    leave(target)
    path.symlink_to(target)


def make_open_file(path: Path) -> None:
    leave(path, mode=0o640)


def make_others_file(path: Path) -> None:
    if UID:
        pytest.skip("another user's file needs root")
    os.chown(leave(path), NOBODY, NOBODY)


FOREIGN = [make_fifo, make_socket, make_directory, make_link, make_open_file, make_others_file]


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_what_is_foreign_is_listed_never_opened_and_never_removed(place, there, monkeypatch, make):
    make(there)
    before = there.lstat()
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments) or real(*arguments))
    (found,) = find_regions(str(place))
    assert (found.state, found.ours) == ("foreign", False)
    assert found.reason
    assert leftover_bytes(str(place)) == 0
    assert remove_leftover(str(there)) is None
    assert opened == []
    assert there.lstat() == before


# Run by root as what it becomes: the interpreter may stand where only root may read.
AS_NOBODY = f"""
import dataclasses, json, os, sys
from aioshm import _leftovers, _locks
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
place, path = sys.argv[1:]
found = [dataclasses.asdict(each) for each in _leftovers.find_regions(place)]
print(json.dumps({{
    "found": found, "bytes": _leftovers.leftover_bytes(place), "removed": _leftovers.remove_leftover(path)
}}))
"""


@pytest.mark.root
@pytest.mark.skipif(UID != 0, reason="becoming another user needs root")
class TestOtherUsers:
    def test_regions_that_this_user_may_not_open_are_listed_and_their_state_is_unknown(self, place, there):
        leave(there)
        arguments = [sys.executable, "-c", AS_NOBODY, str(place), str(there)]
        told = json.loads(subprocess.run(arguments, check=True, capture_output=True).stdout)
        (found,) = told["found"]
        assert (found["state"], found["reason"]) == ("unknown", "permission denied")
        assert (found["user"], found["size"], found["resident"]) == (0, SIZE, SIZE)
        assert (told["bytes"], told["removed"]) == (0, None)
        assert there.exists()

    def test_root_sees_their_state_and_leaves_them(self, place):
        other = place / f"aioshm-{NOBODY}-kv"
        os.chown(leave(other), NOBODY, NOBODY)
        (found,) = find_regions(str(place))
        assert (found.state, found.user, found.ours) == ("leftover", NOBODY, False)
        assert leftover_bytes(str(place)) == 0
        assert remove_leftover(str(other)) is None
        assert other.exists()


class TestRemoving:
    def test_the_new_owner_of_the_name_is_left_alone(self, run, name, place, there):
        """The leftover is recycled between the look that found it and the removal."""
        leave(there)
        (found,) = find_regions(str(place))

        async def main():
            async with aioshm.open_region(name, SIZE, directory=place) as region:
                assert remove_leftover(found.path) is None
                async with aioshm.open_region(name, SIZE, directory=place) as other:
                    assert not other.created
                assert not region.closed

        run(main())
        assert not there.exists()

    def test_what_was_deleted_or_replaced_between_open_and_lock_is_left_alone(self, place, there, monkeypatch):
        leave(there)
        real = Description.try_exclusive

        def replace_first(description: Description, what: Any) -> bool:
            there.unlink()
            leave(there)
            return real(description, what)

        monkeypatch.setattr(Description, "try_exclusive", replace_first)
        assert remove_leftover(str(there)) is None
        assert states(place) == {there.name: "leftover"}

    @pytest.mark.parametrize("call", ["rename", "open"])
    def test_without_a_stand_in_it_is_unlinked(self, place, there, monkeypatch, call):
        leave(there)
        real = getattr(os, call)

        def fail(*arguments: Any) -> Any:
            if "-gc." in str(arguments[0]):
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, call, fail)
        assert remove_leftover(str(there)) == SIZE
        assert list(place.iterdir()) == []

    @pytest.mark.root
    def test_on_a_file_system_without_a_free_inode(self, small_tmpfs, name):
        where = small_tmpfs(mib=8, options="nr_inodes=3")
        there = leave(where / f"aioshm-{UID}-{name}")
        leave(where / "other", 0)
        assert os.statvfs(where).f_ffree == 0
        assert remove_leftover(str(there)) == SIZE
        assert os.statvfs(where).f_bfree * 4096 == 8 * MIB

    @pytest.mark.root
    def test_what_cannot_be_removed_is_an_error(self, small_tmpfs, name):
        where = small_tmpfs(mib=8)
        there = leave(where / f"aioshm-{UID}-{name}")
        subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
        try:
            assert states(where) == {there.name: "leftover"}
            with pytest.raises(OSError, match="Read-only file system"):
                remove_leftover(str(there))
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
        assert remove_leftover(str(there)) == SIZE

    @pytest.mark.root
    def test_an_error_of_space_says_what_leftovers_take(self, run, name, small_tmpfs):
        """vllm #51579, #54002, #57303: a crash loop fills the tmpfs, and nothing says with what."""
        where = small_tmpfs(mib=64)
        there = leave(where / f"aioshm-{UID}-old-{name}", 40 * MIB)

        async def main():
            async with aioshm.open_region(name, 20 * MIB, directory=where):
                with pytest.raises(aioshm.InsufficientSpaceError) as caught:
                    await aioshm.open_region(f"{name}-2", 30 * MIB, directory=where).__aenter__()
                assert caught.value.reclaimable_leftovers == 40 * MIB
                command = f"`aioshm gc --directory {where}` frees them"
                assert f"Leftovers of dead processes take 40.0 MiB of it: {command}." in str(caught.value)
                assert remove_leftover(str(there)) == 40 * MIB
                async with aioshm.open_region(f"{name}-2", 30 * MIB, directory=where) as region:
                    assert region.created
                with pytest.raises(aioshm.InsufficientSpaceError) as caught:
                    await aioshm.open_region(f"{name}-2", 60 * MIB, directory=where).__aenter__()
                assert caught.value.reclaimable_leftovers == 0
                assert "eftover" not in str(caught.value)

        run(main())
