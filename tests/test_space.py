"""File systems without room, for real: every opener has the clear error at once, and everything is as it was before."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioshm
from aioshm._host import read_huge_page_pool

MIB = 1 << 20
HUGE = 2 * MIB

pytestmark = pytest.mark.root


def look(directory: Path) -> tuple[int, int, list[str]]:
    """Return what an open could leave behind: free blocks, free inodes, names."""
    figures = os.statvfs(directory)
    return figures.f_bfree, figures.f_ffree, sorted(entry.name for entry in directory.iterdir())


def fill(path: Path, size: int) -> None:
    """Be another program that takes space, `size` bytes of it or what is left."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def fail(run: Any, name: str, size: int, directory: Path, **options: Any) -> BaseException:
    """Open, and return the error it raises."""

    async def main() -> BaseException:
        with pytest.raises((aioshm.AioshmError, OSError)) as caught:
            async with aioshm.open_region(name, size, directory=directory, **options):
                pass  # pragma: no cover
        return caught.value

    error: BaseException = run(main())
    return error


def send_open(rank: Any, size: int, directory: Path, **options: Any) -> None:
    options = {"directory": str(directory), "hint": "Lower it.", **options}
    rank.send("try_open", name=rank.name, size=size, options=options)


def has_open(rank: Any, directory: Path) -> set[int]:
    """Return the inodes of the directory's files, deleted ones among them, that the process has open."""
    found = set()
    for fd in Path(f"/proc/{rank.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(fd).startswith(f"{directory}/"):
                found.add(fd.stat().st_ino)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def check_space_error(answer: dict[str, Any], directory: Path, required: int, available: int) -> None:
    assert answer["outcome"] == "InsufficientSpaceError", answer
    facts = answer["facts"]
    assert (facts["directory"], facts["required"], facts["available"]) == (str(directory), required, available)
    for words in (f"Insufficient space in {directory}", "--shm-size", "emptyDir with medium: Memory", "Lower it."):
        assert words in answer["message"]


@pytest.fixture
def crew(ranks) -> list[Any]:
    """Eight rank processes that have loaded whatever an open loads."""
    crew = ranks.start_many(8)
    for rank in crew:
        rank.send("warm_up")
    for rank in crew:
        rank.answer()
    return crew


def test_eight_openers_of_a_region_larger_than_the_file_system(crew, small_tmpfs):
    directory = small_tmpfs(mib=64)
    before = look(directory)
    held = [rank.ask("holdings") for rank in crew]
    for rank in crew:
        send_open(rank, 128 * MIB, directory)
    for answer in [rank.answer() for rank in crew]:
        check_space_error(answer, directory, 128 * MIB, 64 * MIB)
        assert answer["seconds"] < 1
    assert look(directory) == before
    assert [rank.ask("holdings") for rank in crew] == held


def test_joiners_that_wait_have_the_error_as_soon_as_the_creator_fails(crew, small_tmpfs):
    directory = small_tmpfs(mib=64)
    before = look(directory)
    held = [rank.ask("holdings") for rank in crew]
    creator, *joiners = crew
    creator.ask("stop_at", point="check")
    send_open(creator, 128 * MIB, directory)
    creator.wait_stopped()
    for rank in joiners:
        send_open(rank, 128 * MIB, directory)
    wait_until(lambda: all(has_open(rank, directory) for rank in joiners))
    started = time.monotonic()
    creator.resume()
    for rank in crew:
        check_space_error(rank.answer(), directory, 128 * MIB, 64 * MIB)
    assert time.monotonic() - started < 1
    assert look(directory) == before
    assert [rank.ask("holdings") for rank in crew] == held


def test_another_program_takes_the_space_between_check_and_populate(crew, small_tmpfs):
    directory = small_tmpfs(mib=64)
    held = [rank.ask("holdings") for rank in crew]
    creator, *joiners = crew
    creator.ask("stop_at", point="checked")
    send_open(creator, 48 * MIB, directory)
    creator.wait_stopped()
    for rank in joiners:
        send_open(rank, 48 * MIB, directory)
    wait_until(lambda: all(has_open(rank, directory) for rank in joiners))
    fill(directory / "other", 32 * MIB)
    started = time.monotonic()
    creator.resume()
    answers = [rank.answer() for rank in crew]
    assert time.monotonic() - started < 1
    for answer in answers:
        assert answer["outcome"] == "InsufficientSpaceError", answer
        assert answer["facts"]["required"] > answer["facts"]["available"]
    for answer in answers[1:]:  # the creator says what it still needed
        check_space_error(answer, directory, 48 * MIB, 32 * MIB)
    free, _, names = look(directory)
    assert (free * 4096, names) == (32 * MIB, ["other"])
    assert [rank.ask("holdings") for rank in crew] == held


@pytest.mark.parametrize("huge_pages", ["try", "off"])
def test_space_taken_in_the_middle_of_a_populate(ranks, small_tmpfs, huge_pages):
    directory = small_tmpfs(mib=64)
    rank = ranks.start()
    rank.ask("warm_up")
    held = rank.ask("holdings")
    rank.ask("stop_at", point="chunk", count=3)
    send_open(rank, 48 * MIB, directory, threads=1, huge_pages=huge_pages)
    rank.wait_stopped()
    free = look(directory)[0] * 4096
    assert free < 64 * MIB
    fill(directory / "other", free - 3 * MIB)
    other = (directory / "other").stat().st_size
    rank.resume()
    answer = rank.answer()
    assert answer["outcome"] == "InsufficientSpaceError", answer
    assert answer["facts"]["required"] > answer["facts"]["available"]
    free, _, names = look(directory)
    assert (free * 4096, names) == (64 * MIB - other, ["other"])
    assert rank.ask("holdings") == held


@pytest.mark.parametrize("taken", [16 * MIB, 64 * MIB])
def test_a_region_that_just_does_not_fit_and_one_that_just_does(run, name, small_tmpfs, taken):
    directory = small_tmpfs(mib=64)
    fill(directory / "other", taken)
    before = look(directory)
    free = 64 * MIB - taken
    error = fail(run, name, free + 1, directory, hint="Lower it.", allocation_name="CPU KV cache")
    assert isinstance(error, aioshm.InsufficientSpaceError)
    assert (error.required, error.available, error.allocation_name) == (free + 4096, free, "CPU KV cache")
    assert look(directory) == before

    async def fits():
        async with aioshm.open_region(name, free, directory=directory) as region:
            assert region.report.populated == free
            assert look(directory)[0] == 0

    if free:
        run(fits())
    assert look(directory) == before


def test_not_even_a_name_can_be_made(run, name, small_tmpfs):
    directory = small_tmpfs(mib=64, options="nr_inodes=2")
    fill(directory / "other", 4096)
    before = look(directory)
    assert before[1] == 0
    error = fail(run, name, 8 * MIB, directory, hint="Lower it.")
    assert type(error) is aioshm.InsufficientSpaceError
    assert (error.required, error.available, error.hint) == (8 * MIB, 0, "Lower it.")
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC
    assert look(directory) == before


def test_without_a_limit_of_the_file_system_the_kernels_word_comes_through_and_nothing_stays(run, name, small_tmpfs):
    directory = small_tmpfs(mib=0)
    error = fail(run, name, 1 << 56, directory, memory_policy="ignore", populate=False)
    assert type(error) is OSError
    assert error.errno in {errno.ENOMEM, errno.EFBIG, errno.EINVAL}
    assert look(directory)[2] == []


def test_populate_of_a_part_says_that_there_is_no_room_and_keeps_the_region(run, name, small_tmpfs):
    directory = small_tmpfs(mib=64)

    async def main():
        async with aioshm.open_region(name, 48 * MIB, directory=directory, populate=False) as region:
            await region.populate(0, 8 * MIB)
            region.buffer[:5] = b"hello"
            fill(directory / "other", 40 * MIB)
            with pytest.raises(aioshm.InsufficientSpaceError):
                await region.populate()
            (directory / "other").unlink()
            await region.populate()
            assert bytes(region.buffer[:5]) == b"hello"
            region.buffer[48 * MIB - 1] = 1

    run(main())
    assert look(directory)[2] == []
    assert look(directory)[0] * 4096 == 64 * MIB


def test_whoever_comes_after_one_that_gave_up_finds_its_memory_free(ranks, small_tmpfs):
    directory = small_tmpfs(mib=64)
    first, second = ranks.start_many(2)
    for rank in (first, second):
        rank.ask("warm_up")
    first.ask("fail_at", point="finish")
    first.ask("stop_at", point="free")
    send_open(first, 48 * MIB, directory)
    first.wait_stopped()  # all of it is populated, and about to be given back
    assert look(directory)[0] * 4096 == 16 * MIB
    send_open(second, 48 * MIB, directory)
    wait_until(lambda: has_open(second, directory) != set())
    assert has_open(second, directory) == has_open(first, directory)  # so it waits
    first.resume()
    assert first.answer()["outcome"] == "OSError"
    assert second.answer()["outcome"] == "open"
    second.ask("close")


def test_a_leftover_is_freed_before_anyone_looks_for_room(ranks, small_tmpfs):
    directory = small_tmpfs(mib=64)
    dead, first, second = ranks.start_many(3)
    for rank in (dead, first, second):
        rank.ask("warm_up")
    dead.open(48 * MIB, directory=str(directory))
    dead.kill()
    first.ask("stop_at", point="close")
    send_open(first, 48 * MIB, directory)
    first.wait_stopped()  # it has removed the leftover, and has it open
    send_open(second, 48 * MIB, directory)
    wait_until(lambda: has_open(second, directory) != set())
    assert has_open(second, directory) < has_open(first, directory)  # so it waits for the one that will be
    first.resume()
    assert {rank.answer()["outcome"] for rank in (first, second)} == {"open"}
    for rank in (first, second):
        rank.ask("close")


@pytest.mark.parametrize("size", ["", "size=64M"], ids=["without size", "with size"])
def test_a_hugetlbfs_whose_pool_has_not_enough_pages(run, name, tmp_path, size):
    pool = read_huge_page_pool(HUGE)
    if pool is None or pool >= 64 * MIB:
        pytest.skip("there is no pool of 2 MiB pages that 64 MiB would exceed")
    directory = tmp_path / "huge"
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "hugetlbfs", "-o", f"pagesize=2M,{size}".rstrip(","), "aioshm-test", str(directory)],
        capture_output=True,
        check=False,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"hugetlbfs cannot be mounted here: {done.stderr.strip()}")
    try:
        error = fail(run, name, pool + 1, directory, hint="Lower it.")
        assert type(error) is aioshm.InsufficientSpaceError
        assert (error.required, error.available) == (pool + HUGE, pool)
        assert list(directory.iterdir()) == []
    finally:
        subprocess.run(["umount", str(directory)], check=True)
