"""Bytes as text, rounded so that figures agree; pauses that start short, grow to a limit and never keep step."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshm._backoff import LONGEST, SHORTEST, backoff
from aioshm._units import mib, mib_down, mib_up

MIB = 1 << 20
sizes = st.integers(0, 1 << 56)


def exact(text: str) -> int:
    """Return the figure in tenths of a MiB."""
    whole, _, tenth = text.partition(".")
    assert len(tenth) == 1
    return int(whole) * 10 + int(tenth)


@pytest.mark.parametrize(
    ("size", "nearest", "up", "down"),
    [
        (0, "0.0", "0.0", "0.0"),
        (1, "0.0", "0.1", "0.0"),
        (MIB, "1.0", "1.0", "1.0"),
        (MIB - 1, "1.0", "1.0", "0.9"),
        (MIB + 1, "1.0", "1.1", "1.0"),
        (64 << 30, "65536.0", "65536.0", "65536.0"),
        (33_285_996_544, "31744.0", "31744.0", "31744.0"),
        (33_285_996_543, "31744.0", "31744.0", "31743.9"),
        (33_285_996_545, "31744.0", "31744.1", "31744.0"),
    ],
)
def test_examples(size, nearest, up, down):
    assert (mib(size), mib_up(size), mib_down(size)) == (nearest, up, down)


@given(sizes)
def test_up_is_not_less_and_down_not_more_by_less_than_a_tenth(size):
    assert 0 <= exact(mib_up(size)) * MIB - size * 10 < MIB
    assert 0 <= size * 10 - exact(mib_down(size)) * MIB < MIB
    assert exact(mib_down(size)) <= exact(mib(size)) <= exact(mib_up(size))


@given(sizes, st.integers(1, 1 << 40))
def test_what_is_required_never_reads_like_what_is_there_when_it_is_more(available, short):
    assert exact(mib_up(available + short)) > exact(mib_down(available))


def test_pauses_begin_at_half_a_millisecond_and_end_at_twenty():
    pauses = list(islice(backoff(), 400))
    assert all(0 < pause <= LONGEST for pause in pauses)
    assert SHORTEST / 2 <= pauses[0] <= SHORTEST
    assert all(pause >= LONGEST / 2 for pause in pauses[20:])
    assert (SHORTEST, LONGEST) == (0.0005, 0.020)


def test_pauses_grow_between_the_two():
    ladders = [list(islice(backoff(), 12)) for _ in range(50)]
    highest = [max(step) for step in zip(*ladders, strict=True)]
    lowest = [min(step) for step in zip(*ladders, strict=True)]
    assert all(later > earlier * 0.9 for earlier, later in pairwise(highest))
    assert all(high < low * 2.01 for high, low in zip(highest, lowest, strict=True))  # shortened by half at the most
    # The first ten looks of a rank that waits come within 0.1 s: a race among ranks is over before that.
    assert all(sum(ladder[:9]) < 0.1 for ladder in ladders)


def test_two_waiters_do_not_keep_step():
    first, second = list(islice(backoff(), 50)), list(islice(backoff(), 50))
    assert len({*first, *second}) > 90
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.001
