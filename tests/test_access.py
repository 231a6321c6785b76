"""What stands at the path or as the directory and is none of ours: a clear error each, and all as before."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioshm
from aioshm._host import read_file_system

MIB = 1 << 20
NOBODY = 65534

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root"),
]


@pytest.fixture
def directory(name: str) -> Iterator[Path]:
    """A directory on /dev/shm of this test alone, which other users may enter too."""
    where = Path("/dev/shm") / f"directory-{name}"
    where.mkdir()
    where.chmod(0o777)
    yield where
    where.chmod(0o700)
    shutil.rmtree(where)


@pytest.fixture
def there(directory: Path, name: str) -> Path:
    """Where the region's file would stand in `directory`."""
    return directory / f"aioshm-{os.geteuid()}-{name}"


def look(directory: Path) -> dict[str, Any]:
    """Everything under `directory` that an open could have changed."""
    found: dict[str, Any] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        facts = (status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size)
        found[str(path)] = (*facts, status.st_mtime_ns, content)
    return found


def refuse(run: Callable[..., Any], name: str, directory: object, **options: Any) -> aioshm.AioshmError:
    """Open, see it refused without a wait, and return the error."""

    async def main() -> aioshm.AioshmError:
        with pytest.raises(aioshm.AioshmError) as caught:
            async with asyncio.timeout(20), aioshm.open_region(name, MIB, directory=directory, timeout=None, **options):
                pass  # pragma: no cover
        return caught.value

    error: aioshm.AioshmError = run(main())
    return error


def make_symlink(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"precious")
    target.chmod(0o600)
    path.symlink_to(target)


def make_dangling_symlink(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def make_symlink_to_itself(path: Path) -> None:
    path.symlink_to(path)


def make_directory(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "file").write_bytes(b"precious")


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_socket(path: Path) -> None:
    # By a relative name: the address of a socket holds 107 bytes only.
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.fchdir(before)
        os.close(before)


def make_file(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(b"precious")
        path.chmod(mode)

    return make


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(make_symlink, "it is a symbolic link", id="symlink"),
        pytest.param(make_dangling_symlink, "it is a symbolic link", id="dangling"),
        pytest.param(make_symlink_to_itself, "it is a symbolic link", id="loop"),
        pytest.param(make_directory, "it is a directory", id="directory"),
        pytest.param(make_fifo, "it is not a regular file", id="fifo"),
        pytest.param(make_socket, "it is a socket or a device without a driver", id="socket"),
        pytest.param(make_file(0o660), "its mode -rw-rw---- lets others in", id="group-writable"),
        pytest.param(make_file(0o640), "its mode -rw-r----- lets others in", id="group-readable"),
        pytest.param(make_file(0o602), "its mode -rw-----w- lets others in", id="world-writable"),
        pytest.param(make_file(0o710), "its mode -rwx--x--- lets others in", id="ready-but-open"),
    ],
)
def test_what_is_no_region_of_ours_is_named_and_left(run, name, directory, there, make, reason):
    make(there)
    before = look(directory)
    error = refuse(run, name, directory)
    assert type(error) is aioshm.RegionAccessError
    assert isinstance(error, PermissionError)
    assert error.path == str(there)
    assert error.reason == reason
    assert str(error) == f"{there} cannot be used as a region: {reason}. Remove it, or choose another name."
    assert look(directory) == before


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "with bytes"])
@pytest.mark.parametrize("mode", [0o600, 0o700])
class TestAnotherUsersFile:
    pytestmark = needs_root

    def test_root_leaves_it_although_it_could_take_it(self, run, name, directory, there, mode, empty):
        there.write_bytes(b"" if empty else b"precious")
        there.chmod(mode)
        os.chown(there, NOBODY, NOBODY)
        before = look(directory)
        error = refuse(run, name, directory)
        assert type(error) is aioshm.RegionAccessError
        assert error.reason == f"it belongs to uid {NOBODY}, not to uid 0"
        assert look(directory) == before

    def test_another_user_may_not_even_open_it(self, ranks, name, directory, mode, empty):
        there = directory / f"aioshm-{NOBODY}-{name}"
        there.write_bytes(b"" if empty else b"precious")
        there.chmod(mode)
        before = look(directory)
        rank = ranks.start()
        rank.ask("become", user=NOBODY)
        answer = rank.ask("try_open", name=name, size=MIB, options={"directory": str(directory)})
        assert answer["outcome"] == "RegionAccessError"
        assert answer["facts"]["path"] == str(there)
        assert "belongs to another user" in answer["facts"]["reason"]
        assert look(directory) == before


def test_a_missing_directory_is_not_made(run, name, directory):
    missing = directory / "missing" / "deeper"
    before = look(directory)
    error = refuse(run, name, missing)
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert (error.directory, error.reason) == (str(missing), "no such file or directory")
    assert str(error) == (
        f"{missing} cannot hold a region: no such file or directory. Use /dev/shm, or another tmpfs or hugetlbfs mount."
    )
    assert isinstance(error.__cause__, FileNotFoundError)
    assert look(directory) == before


@pytest.mark.parametrize("below", ["", "x"])
def test_a_file_is_no_directory(run, name, directory, below):
    file = directory / "file"
    file.write_bytes(b"precious")
    before = look(directory)
    error = refuse(run, name, file / below)
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert error.directory == str(file / below)
    assert "not a directory" in error.reason
    assert look(directory) == before


def test_a_dangling_link_in_place_of_the_directory(run, name, directory):
    link = directory / "link"
    link.symlink_to(directory / "nowhere")
    before = look(directory)
    error = refuse(run, name, link)
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert error.directory == str(link)
    assert look(directory) == before


def test_a_name_too_long_for_the_file_system(run, name):
    error = refuse(run, name, "/dev/shm/" + "x" * 300)
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert error.reason == "file name too long"


def test_a_directory_on_disk_is_refused(run, name, tmp_path):
    if read_file_system(str(tmp_path)).kind != "other":
        pytest.skip("the temporary directory stands in memory here")
    before = look(tmp_path)
    error = refuse(run, name, tmp_path, huge_pages="require")
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert (error.directory, error.reason) == (str(tmp_path), "it is not in memory (neither tmpfs nor hugetlbfs)")
    assert look(tmp_path) == before


@pytest.mark.parametrize("directory", ["/proc", "/sys"])
def test_a_file_system_of_the_kernels_own_is_refused(run, name, directory):
    error = refuse(run, name, directory)
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert "not in memory" in error.reason


@pytest.mark.root
def test_a_read_only_mount(run, name, small_tmpfs):
    where = small_tmpfs(mib=4)
    subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
    before = look(where)
    error = refuse(run, name, where)
    assert type(error) is aioshm.UnsuitableDirectoryError
    assert (error.directory, error.reason) == (str(where), "it is mounted read-only")
    assert isinstance(error.__cause__, OSError)
    assert look(where) == before


class TestWithoutPermission:
    pytestmark = needs_root

    @pytest.mark.parametrize("mode", [0o755, 0o700, 0o766], ids=oct)
    def test_a_directory_in_which_this_user_may_not_make_files(self, ranks, name, directory, mode):
        directory.chmod(mode)
        before = look(directory)
        rank = ranks.start()
        rank.ask("become", user=NOBODY)
        answer = rank.ask("try_open", name=name, size=MIB, options={"directory": str(directory)})
        assert answer["outcome"] == "UnsuitableDirectoryError"
        assert answer["facts"] == {
            "directory": str(directory),
            "reason": "this process may not create files in it",
        }
        assert look(directory) == before

    def test_a_directory_below_one_that_this_user_may_not_search(self, ranks, name, directory):
        below = directory / "below"
        below.mkdir()
        directory.chmod(0o700)
        before = look(directory)
        rank = ranks.start()
        rank.ask("become", user=NOBODY)
        answer = rank.ask("try_open", name=name, size=MIB, options={"directory": str(below)})
        assert answer["outcome"] == "UnsuitableDirectoryError"
        assert answer["facts"] == {"directory": str(below), "reason": "permission denied"}
        assert look(directory) == before

    def test_each_user_has_regions_of_its_own(self, run, ranks, name, directory):
        rank = ranks.start()
        rank.ask("become", user=NOBODY)

        async def main():
            async with aioshm.open_region(name, MIB, directory=directory) as region:
                assert rank.open(MIB, directory=str(directory))["created"]
                assert region.created
                assert {entry.name for entry in directory.iterdir()} == {
                    f"aioshm-0-{name}",
                    f"aioshm-{NOBODY}-{name}",
                }
                rank.ask("close")

        run(main())
        assert list(directory.iterdir()) == []


def test_after_the_obstacle_is_gone_the_same_call_works(run, name, directory, there):
    make_dangling_symlink(there)
    refuse(run, name, directory)
    there.unlink()

    async def main():
        async with aioshm.open_region(name, MIB, directory=directory) as region:
            assert region.created
            assert stat.S_IMODE(there.stat().st_mode) == 0o700

    run(main())
    assert not there.exists()


def test_at_no_time_may_others_come_in_whatever_the_umask(run, name, directory, there):
    modes = set()

    async def main():
        async with aioshm.open_region(name, MIB, directory=directory, on_progress=lambda _: look()):
            look()

    def look() -> None:
        modes.add(stat.S_IMODE(there.stat().st_mode))

    before = os.umask(0)
    try:
        run(main())
    finally:
        os.umask(before)
    assert modes == {0o600, 0o700}  # while it is made, and when it is ready
