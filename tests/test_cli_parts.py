"""The parts of `aioshm demo` that decide: sizes, patterns, the heartbeat, the verdict."""

from __future__ import annotations

import asyncio
import itertools
import time

import click
import pytest

from aioshm.cli import _heartbeat
from aioshm.cli._heartbeat import Heartbeat
from aioshm.cli._shares import PIECE, Pattern, find_wrong_byte, share_of, write_share
from aioshm.cli._sizes import choose_size, in_words, parse_size, seconds_in_words
from aioshm.cli._verdict import Usage, judge_directory, judge_race, judge_shares, tell_stall

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2 GiB", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("64M", 64 * MIB),
        ("64m", 64 * MIB),
        ("4096", 4096),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "big", "0", "0MiB", "-1MiB", "16Mb", "1e999GiB", "128PiB", "nan", "9" * 400 + "GiB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(click.BadParameter):
        parse_size(text)


def test_sizes_and_times_are_written():
    assert [in_words(size) for size in (0, 1023, 1024, 16 * MIB, 5592405, 1 << 30)] == [
        *("0 B", "1023 B", "1 KiB", "16 MiB", "5.3 MiB", "1 GiB"),
    ]
    assert [seconds_in_words(seconds) for seconds in (0.0004, 0.0123, 0.999, 2.5)] == [
        "0.4 ms",
        "12 ms",
        "999 ms",
        "2.50 s",
    ]


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ([], 1 << 30),
        ([64 << 30, 32 << 30], 1 << 30),
        ([64 << 30, 100 * MIB], 24 * MIB),
        ([0], 2 * MIB),
    ],
)
def test_the_default_size_is_modest_and_in_huge_pages(limits, size):
    assert choose_size(limits, 2 * MIB) == size


@pytest.mark.parametrize("size", [1, 7, 3 * PIECE, 10 * PIECE + 1])
def test_shares_cover_the_region_once(size):
    shares = [share_of(rank, 3, size) for rank in range(3)]
    assert [offset for share in shares for offset in (share.start, share.stop)] == [
        *(0, *itertools.chain.from_iterable((share.stop, share.stop) for share in shares[:2]), size),
    ]


@pytest.mark.parametrize(
    "damage", ["none", "exchanged shares", "exchanged pieces", "one bit", "never written", "another's hand"]
)
def test_a_wrong_share_is_found(run, damage):
    """Shares of equal length at places that are multiples of a piece: what is exchanged would fit."""
    size = 12 * PIECE
    shares = [share_of(rank, 3, size) for rank in range(3)]
    memory = memoryview(bytearray(size))
    expected = None

    async def main():
        for rank in range(3):
            if damage != "never written" or rank != 1:
                hand = 2 if damage == "another's hand" else rank
                await write_share(memory, shares[rank], Pattern(hand), lambda _: None)
        first, second = shares[1], shares[2]
        if damage == "exchanged shares":
            exchange(first, second)
        elif damage == "exchanged pieces":
            exchange(range(first.start, first.start + PIECE), range(first.stop - PIECE, first.stop))
        elif damage == "one bit":
            memory[first.stop - 1] ^= 1
        return await find_wrong_byte(memory, first, Pattern(1), lambda _: None)

    def exchange(one: range, other: range) -> None:
        kept = bytes(memory[one.start : one.stop])
        memory[one.start : one.stop] = memory[other.start : other.stop]
        memory[other.start : other.stop] = kept

    found = run(main())
    if damage == "none":
        assert found is expected
    elif damage == "one bit":
        assert found == shares[1].stop - 1
    else:
        # By chance a few bytes agree, a piece never does.
        assert found is not None
        assert shares[1].start <= found < shares[1].start + 16


def test_progress_adds_up(run):
    share = range(5, 2 * PIECE + 100)
    told: list[int] = []
    memory = memoryview(bytearray(share.stop))

    async def main():
        await write_share(memory, share, Pattern(0), told.append)
        assert await find_wrong_byte(memory, share, Pattern(0), told.append) is None

    run(main())
    assert sum(told) == 2 * len(share)


def test_heartbeat_finds_what_held_the_loop_up(run):
    async def main():
        async with Heartbeat("idling") as heartbeat:
            await asyncio.sleep(0.01)
            heartbeat.during = "blocking"
            await asyncio.sleep(0.01)
            time.sleep(1.0)  # noqa: ASYNC251 - what the heart has to feel
        return heartbeat

    heartbeat = run(main())
    assert heartbeat.longest.seconds > 0.9
    assert heartbeat.longest.during == "blocking"
    assert heartbeat.beats > 2
    if heartbeat.longest_held is not None:
        assert heartbeat.longest_held == heartbeat.longest or heartbeat.longest_held.seconds > 0.5


def test_heartbeat_tells_a_busy_machine_from_a_busy_loop(run, monkeypatch):
    """A thread that waits for a processor is late as well; the kernel's figure is made up here."""
    queued = itertools.chain([0.0], itertools.repeat(1000.0))
    monkeypatch.setattr(_heartbeat._RunQueue, "read", lambda self: next(queued))

    async def main():
        async with Heartbeat("waiting") as heartbeat:
            time.sleep(1.0)  # noqa: ASYNC251 - within the first beat
        return heartbeat

    heartbeat = run(main())
    assert heartbeat.longest.seconds > 0.9
    assert heartbeat.longest_held is not None
    assert heartbeat.longest_held.seconds < 0.9


def test_heartbeat_does_without_the_kernels_figure(run, monkeypatch):
    monkeypatch.setattr(_heartbeat._RunQueue, "read", lambda self: None)

    async def main():
        async with Heartbeat("idling") as heartbeat:
            await asyncio.sleep(0.01)
        return heartbeat

    assert run(main()).longest_held is None


def opened(*created: bool, inode: str | None = "00:19 7") -> list[dict[str, object]]:
    return [{"created": each, "inode": inode} for each in created]


def test_race_is_judged():
    assert judge_race(opened(False, True)).held
    assert not judge_race(opened(True, True)).held
    assert not judge_race(opened(False, False)).held
    assert not judge_race([*opened(True), *opened(False, inode="00:19 8")]).held
    assert not judge_race(opened(True, False, inode=None)).held


def test_shares_are_judged():
    assert judge_shares([{"wrong": {}}, {"wrong": {}}], 8).held
    finding = judge_shares([{"wrong": {}}, {"wrong": {"0": 3}}], 8)
    assert not finding.held
    assert "rank 1 found share 0 wrong from byte 3" in finding.text


def test_directory_is_judged_by_names():
    assert judge_directory("/x", Usage(0, 8, 0, [])).held
    assert "others use it too" in judge_directory("/x", Usage(0, 8, 8, [])).text
    assert "Space" not in judge_directory("/x", Usage(None, None, None, [])).text
    finding = judge_directory("/x", Usage(0, 8, 8, ["aioshm-0-demo-1"]))
    assert not finding.held
    assert "aioshm-0-demo-1" in finding.text


def test_the_worst_loop_is_named():
    stalls = [
        {"stall": {"seconds": 0.002, "during": "opening"}, "held": {"seconds": 0.002, "during": "opening"}, "beats": 5},
        {"stall": {"seconds": 0.030, "during": "closing"}, "held": {"seconds": 0.001, "during": "closing"}, "beats": 6},
    ]
    finding = tell_stall(stalls)
    assert finding.held is None
    assert "30 ms (rank 1 while closing)" in finding.text
    assert "without waits for a free processor 2.0 ms (rank 0 while opening). 11 beats" in finding.text
    assert "free processor" not in tell_stall([{**each, "held": None} for each in stalls]).text
