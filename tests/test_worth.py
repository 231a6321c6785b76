"""Whether huge pages are worth it: decided by both sizes in turns, never by a slow chunk alone, and said in words."""

from __future__ import annotations

import errno
import itertools
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_maps import collapse_works, mapped, whole_pages

import aioshm
from aioshm import _libc, _pace, _pages, _worth
from aioshm._libc import HUGE_PAGE
from aioshm._worth import Worth

MIB = 1 << 20
FAST, SLOW = 0.0005, 0.010  # seconds for a huge page


@pytest.fixture(autouse=True)
def stalls(monkeypatch):
    """The kernel's count of stalls, which grows whenever somebody looks; put another in its place."""
    count = itertools.count(step=100)
    monkeypatch.setattr(_worth, "read_stalls", lambda: next(count))


def populate(worth: Worth, huge: list[float], small: float) -> list[str]:
    """Note a chunk for each of `huge`, those that it wanted small as long as `small`; return what it wanted."""
    ways = []
    for seconds in huge:
        way = worth.choose()
        ways.append(way)
        worth.note(way, HUGE_PAGE, seconds if way == "huge" else small)
    return ways


def test_fast_chunks_and_a_slow_one_now_and_then_call_for_no_trial():
    worth = Worth()
    assert set(populate(worth, [FAST, FAST, SLOW, SLOW] * 100, small=FAST)) == {"huge"}


def test_slow_chunks_in_a_row_call_for_a_trial_in_turns():
    ways = populate(Worth(), [FAST, SLOW, SLOW, SLOW] + [SLOW] * 18 + [SLOW] * 5, small=SLOW)
    assert ways == ["huge"] * 4 + ["small", "huge"] * 9 + ["huge"] * 5


def test_huge_pages_that_are_much_slower_are_given_up_and_the_figures_said():
    worth = Worth()
    ways = populate(worth, [SLOW] * 40, small=0.0008)
    assert ways == ["huge"] * 3 + ["small", "huge"] * 9 + ["small"] * 19
    assert worth.verdict == (
        "huge pages took 12.5 times as long as small ones: memory is fragmented "
        "(10.0 ms for 2 MiB against 0.8 ms, medians of 9 samples)"
    )


@pytest.mark.parametrize("small", [SLOW, SLOW / 2, SLOW / 2.9])
def test_where_both_are_slow_huge_pages_stay_and_are_hardly_tried_again(small):
    """As in a virtual machine, whose host has to find the memory first."""
    worth = Worth()
    ways = populate(worth, [SLOW] * 1000, small=small)
    assert worth.verdict is None
    assert ways.count("small") <= 3 * 9
    assert set(ways[100:]) == {"huge"}


@pytest.mark.parametrize(
    ("counts", "tried", "given_up"),
    [
        ([7, 7], False, False),
        ([7, 8, 11], True, False),
        ([7, 8, 12], True, True),
        ([None, None, None], True, True),
        ([7, None, 7], True, True),
    ],
)
def test_what_is_slow_without_compaction_stays_huge(monkeypatch, counts, tried, given_up):
    """A virtual machine finds small pages in memory that its host has found already, for as long as there is some.

    Seen: 4.6 ms for 2 MiB against 1.3 ms, and not one stall.
    """
    read = iter(counts)
    monkeypatch.setattr(_worth, "read_stalls", lambda: next(read))
    worth = Worth()
    ways = populate(worth, [SLOW] * (21 if tried else 3), small=SLOW / 4)
    assert ("small" in ways, worth.verdict is not None) == (tried, given_up)
    assert list(read) == []


def test_memory_that_gets_fragmented_on_the_way_is_noticed():
    """The free huge pages are used up first, and only then the kernel begins to compact."""
    worth = Worth()
    populate(worth, [SLOW] * 100, small=SLOW)
    ways = populate(worth, [SLOW * 10] * 28, small=SLOW)
    assert ways == ["huge"] * 3 + ["small", "huge"] * 9 + ["small"] * 7
    assert "took 10.0 times as long" in worth.verdict


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(held_up=st.sets(st.integers(0, 8), max_size=4), way=st.sampled_from(["huge", "small"]))
def test_four_samples_that_something_else_held_up_decide_nothing(held_up, way):
    worth = Worth()
    populate(worth, [SLOW] * 3, small=SLOW)
    for number in range(9):
        for kind in ("small", "huge"):
            assert worth.choose() == kind
            worth.note(kind, HUGE_PAGE, 1.0 if kind == way and number in held_up else FAST)
    assert worth.verdict is None
    assert worth.choose() == "huge"


def test_chunks_of_any_size_are_compared_by_the_byte():
    worth = Worth()
    populate(worth, [SLOW] * 3, small=SLOW)
    for _ in range(9):
        worth.note(worth.choose(), 4 * HUGE_PAGE, 4 * SLOW)
        worth.note(worth.choose(), HUGE_PAGE, SLOW)
    assert worth.verdict is None


@pytest.fixture
def slow_collapse(monkeypatch):
    """Let a collapse take as long as under compaction; return what was asked for, by address."""
    if not collapse_works():
        pytest.skip("this kernel makes no huge pages by MADV_COLLAPSE")
    real, asked = _libc.try_madvise, []

    def try_madvise(address: int, length: int, advice: int) -> int:
        if advice == _libc.MADV_COLLAPSE:
            asked.append(address)
            end = time.thread_time() + 0.03 * length / HUGE_PAGE
            while time.thread_time() < end:
                pass
        return real(address, length, advice)

    monkeypatch.setattr(_libc, "try_madvise", try_madvise)
    return asked


@pytest.mark.parametrize("threads", [1, 2])
def test_a_populate_gives_them_up(run, name, slow_collapse, threads):
    async def main():
        async with aioshm.open_region(name, 160 * MIB + 5, threads=threads) as region:
            report = region.report
            assert "times as long as small ones" in report.small_page_reason
            assert mapped(region, "ShmemPmdMapped") == report.huge < 112 * MIB
            assert report.populated == mapped(region, "Rss") == whole_pages(region.size)
            assert len(slow_collapse) <= 14 + threads

    run(main())


def test_required_ones_are_not_put_to_trial(run, name, slow_collapse):
    async def main():
        async with aioshm.open_region(name, 40 * MIB, huge_pages="require", threads=1) as region:
            assert region.report.huge == 40 * MIB
            assert region.report.small_page_reason is None

    run(main())


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_trial_left_small_is_made_huge_when_they_stand_it(run, name, path, slow_collapse, monkeypatch, threads):
    monkeypatch.setattr(_worth, "_TOO_SLOW", 1e9)
    monkeypatch.setattr(_pace, "LARGEST_CHUNK", HUGE_PAGE)

    async def main():
        async with aioshm.open_region(name, 160 * MIB, threads=threads) as region:
            assert region.report.huge == mapped(region, "ShmemPmdMapped") == 160 * MIB
            assert region.report.small_page_reason is None
            assert path.stat().st_blocks * 512 == 160 * MIB

    run(main())
    assert sorted(slow_collapse) != slow_collapse  # some were asked for at the end


def test_what_cannot_be_made_up_is_told(run, name, monkeypatch, slow_collapse):
    """The samples stay small where the kernel refuses them at the end."""
    monkeypatch.setattr(_worth, "_TOO_SLOW", 1e9)
    monkeypatch.setattr(_pages.Pages, "make_up", _refused(_pages.Pages.make_up, monkeypatch))

    async def main():
        async with aioshm.open_region(name, 40 * MIB, threads=1) as region:
            assert 0 < region.report.huge < 40 * MIB
            assert "ENOMEM" in region.report.small_page_reason

    run(main())


def _refused(make_up, monkeypatch):
    def refused(pages):
        with monkeypatch.context() as patch:
            patch.setattr(_libc, "try_madvise", lambda *_: errno.ENOMEM)
            return make_up(pages)

    return refused
