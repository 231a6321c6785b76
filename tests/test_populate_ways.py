"""Populate's other ways: old kernels, huge pages that do not come, chunks that adapt, space that others take."""

from __future__ import annotations

import errno
import logging
import math
import os
from pathlib import Path

import pytest
from memory_maps import collapse_works, flags, mapped, whole_pages
from ranks import RankError
from tracing import traced

import aioshm
from aioshm import _libc, _pace, _pages
from aioshm._libc import HUGE_PAGE, PAGE

MIB = 1 << 20


@pytest.fixture
def collapsing():
    if not collapse_works():
        pytest.skip("this kernel makes no huge pages by MADV_COLLAPSE")


def test_legacy_kernel_gets_small_pages_one_warning_and_keeps_the_data(run, name, path, ranks):
    """Before 5.14 the kernel says EINVAL to the advice: fallocate and MAP_POPULATE do it, in maker and joiner alike."""
    size = 3 * MIB + 9
    maker, joiner = ranks.start_many(2)
    for rank in (maker, joiner):
        rank.ask("hook", call="warm_up")
    with traced(maker.pid, "madvise:error=EINVAL"):
        report = maker.open(size)["report"]
    assert (report["huge"], report["populated"]) == (0, whole_pages(size))
    assert "5.14" in report["small_page_reason"]
    assert path.stat().st_size == size
    assert path.stat().st_blocks * 512 == whole_pages(size)
    maker.ask("write", offset=0, text="at the start")
    maker.ask("write", offset=size - 10, text="at the end")
    with traced(joiner.pid, "madvise:error=EINVAL"):
        assert not joiner.open(size)["created"]
    for rank in (maker, joiner):
        assert rank.ask("read", offset=0, length=12)["text"] == "at the start"
        assert rank.ask("read", offset=size - 10, length=10)["text"] == "at the end"
    joiner.ask("write", offset=MIB, text="from the joiner")
    assert maker.ask("read", offset=MIB, length=15)["text"] == "from the joiner"

    async def main():  # and a joiner that has the advice
        async with aioshm.open_region(name, size) as region:
            assert bytes(region.buffer[:12]) == b"at the start"

    run(main())
    for rank in (maker, joiner):
        rank.ask("close")
    assert not path.exists()


@pytest.fixture
def refuse(monkeypatch):
    """Let advice fail as the kernel would; return the list of (advice, length) that was given."""
    real, given_ = _libc.try_madvise, []

    def refuse(wrong: dict[int, int]) -> list[tuple[int, int]]:
        def try_madvise(address: int, length: int, advice: int) -> int:
            given_.append((advice, length))
            return wrong.get(advice) or real(address, length, advice)

        monkeypatch.setattr(_libc, "try_madvise", try_madvise)
        return given_

    return refuse


def test_legacy_kernel_is_warned_of_once_and_its_pages_stay_out_of_core_files(run, name, path, caplog, refuse):
    refuse({_libc.MADV_POPULATE_WRITE: errno.EINVAL, _libc.MADV_COLLAPSE: errno.EINVAL})
    _pages._warn_of_old_kernel.cache_clear()

    async def main():
        with caplog.at_level(logging.WARNING, "aioshm"):
            async with aioshm.open_region(name, 5 * MIB + 3, threads=2) as region:
                assert mapped(region, "Rss") == whole_pages(region.size)
                assert path.stat().st_size == region.size
                assert all(" dd" in line for line in flags(region)), flags(region)  # MADV_DONTDUMP
                async with aioshm.open_region(name, 5 * MIB + 3) as joiner:
                    assert not joiner.created

    run(main())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "5.14" in caplog.text


# With one thread: the main one gives MADV_DONTDUMP and MADV_HUGEPAGE; the populating one touches both huge pages of its
# first chunk, 4 MiB, and the third piece of advice is the collapse.
THE_TOUCH, THE_COLLAPSE = 1, 3
EHWPOISON = 133  # in `errno` from Python 3.14 on


@pytest.mark.usefixtures("collapsing")
@pytest.mark.parametrize("code", ["ENOMEM", "EAGAIN", "EBUSY"])
def test_chunk_that_is_not_collapsed_gets_small_pages_and_the_next_is_tried(ranks, name, path, code):
    rank = ranks.start()
    rank.ask("hook", call="warm_up")
    with traced(rank.pid, f"madvise:error={code}:when={THE_COLLAPSE}"):
        report = rank.open(8 * MIB, threads=1)["report"]
    assert (report["populated"], report["huge"]) == (8 * MIB, 4 * MIB)
    assert code in report["small_page_reason"]
    assert path.stat().st_blocks * 512 == 8 * MIB
    rank.ask("close")


@pytest.mark.usefixtures("collapsing")
@pytest.mark.parametrize("code", ["ENOMEM", "EAGAIN", "EBUSY", "EINVAL"])
def test_required_huge_pages_that_are_not_given_are_an_error_that_leaves_nothing(ranks, path, code):
    rank = ranks.start()
    rank.ask("hook", call="warm_up")
    with (
        traced(rank.pid, f"madvise:error={code}:when={THE_COLLAPSE}"),
        pytest.raises(RankError, match="No huge pages for") as caught,
    ):
        rank.open(8 * MIB, threads=1, huge_pages="require")
    assert caught.value.answer["error"] == "HugePagesUnavailableError"
    assert not path.exists()
    assert rank.ask("memory") == {"mapped": [], "descriptions": 0}


def test_required_huge_pages_on_a_legacy_kernel(ranks, path):
    rank = ranks.start()
    rank.ask("hook", call="warm_up")
    with traced(rank.pid, "madvise:error=EINVAL"), pytest.raises(RankError, match=r"No huge pages for .*5\.14"):
        rank.open(8 * MIB, huge_pages="require")
    assert not path.exists()


@pytest.mark.parametrize("when", [THE_TOUCH, THE_COLLAPSE], ids=["touch", "collapse"])
def test_poisoned_memory_keeps_its_name(ranks, path, when):
    """EHWPOISON is no want of memory and no old kernel: it must not be swallowed by a fallback."""
    rank = ranks.start()
    rank.ask("hook", call="warm_up")
    with (
        traced(rank.pid, f"madvise:error=EHWPOISON:when={when}"),
        pytest.raises(RankError, match=f"Errno {EHWPOISON}") as caught,
    ):
        rank.open(8 * MIB, threads=1)
    assert caught.value.answer["error"] == "OSError"
    assert not path.exists()
    assert rank.ask("memory") == {"mapped": [], "descriptions": 0}


@pytest.mark.parametrize(("code", "asked"), [(errno.EAGAIN, 8), (errno.EINVAL, 1)])
def test_huge_pages_that_do_not_come_are_not_asked_for_for_ever(run, name, monkeypatch, refuse, code, asked):
    monkeypatch.setattr(_pace, "LARGEST_CHUNK", HUGE_PAGE)  # many chunks
    advice = refuse({_libc.MADV_COLLAPSE: code})

    async def main():
        async with aioshm.open_region(name, 40 * MIB, threads=1) as region:
            assert region.report.huge == 0
            assert mapped(region, "Rss") == 40 * MIB

    run(main())
    assert [kind for kind, _ in advice].count(_libc.MADV_COLLAPSE) == asked


@pytest.mark.parametrize(
    ("seconds", "expected"), [(math.inf, [4] + [8] * 30 + [6]), (1e-9, [4] + [2] * 123)], ids=["fast", "slow"]
)
def test_chunks_grow_while_they_are_fast_and_shrink_when_slow(run, name, monkeypatch, refuse, seconds, expected):
    for limit in ("CHUNK_SECONDS", "LONGEST_SECONDS"):
        monkeypatch.setattr(_pace, limit, min(seconds, 1e6))
    advice = refuse({})

    async def main():
        async with aioshm.open_region(name, 250 * MIB, threads=1, huge_pages="off"):
            pass

    run(main())
    assert [length // MIB for kind, length in advice if kind == _libc.MADV_POPULATE_WRITE] == expected


def taker(directory: Path):
    """Return a progress callback that takes 24 MiB of the directory as populating begins."""

    def take(_: aioshm.Progress) -> None:
        if not (directory / "taken").exists():
            (directory / "taken").write_bytes(bytes(24 * MIB))

    return take


@pytest.mark.root
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("huge_pages", ["try", "require", "off"])
def test_space_that_is_taken_between_check_and_populate(run, name, small_tmpfs, monkeypatch, huge_pages, threads):
    """vllm #46949: OSError Bad address. However the kernel says it, it is the space that is short."""
    # Chunks of 4, 8, 16, 32 MiB: one page per 2 MiB of the last still fits into 40 MiB, and its collapse does not.
    for limit in ("CHUNK_SECONDS", "LONGEST_SECONDS"):
        monkeypatch.setattr(_pace, limit, 1e6)
    directory = small_tmpfs(mib=64)

    async def main():
        with pytest.raises(aioshm.InsufficientSpaceError, match=r"--shm-size") as caught:
            async with aioshm.open_region(
                name,
                64 * MIB,
                directory=directory,
                huge_pages=huge_pages,
                threads=threads,
                on_progress=taker(directory),
            ):
                pass
        assert caught.value.required > caught.value.available

    run(main())
    assert [entry.name for entry in directory.iterdir()] == ["taken"]
    assert os.statvfs(directory).f_bavail * PAGE == 40 * MIB


@pytest.mark.root
@pytest.mark.parametrize("huge_pages", ["try", "off"])
def test_space_that_is_taken_under_a_legacy_kernel(run, name, small_tmpfs, refuse, huge_pages):
    directory = small_tmpfs(mib=64)
    refuse({_libc.MADV_POPULATE_WRITE: errno.EINVAL, _libc.MADV_COLLAPSE: errno.EINVAL})

    async def main():
        with pytest.raises(aioshm.InsufficientSpaceError):
            async with aioshm.open_region(
                name,
                64 * MIB,
                directory=directory,
                huge_pages=huge_pages,
                on_progress=taker(directory),
            ):
                pass

    run(main())
    assert os.statvfs(directory).f_bavail * PAGE == 40 * MIB
