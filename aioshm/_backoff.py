"""How long a waiter sleeps between two looks: short at first, longer later, never in step with others."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Seconds.
SHORTEST = 0.0005
LONGEST = 0.020
_GROWTH = 1.6


def backoff(longest: float = LONGEST) -> Iterator[float]:
    """Yield seconds to sleep, without end.

    Starts at 0.5 ms, so that a race among ranks that start together is over at once; grows to `longest` seconds, so
    that waiting for minutes costs next to nothing. Each pause is shortened at random by up to half: ranks that started
    in step would otherwise keep meeting at the lock.
    """
    pause = SHORTEST
    while True:
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads waiters out; nothing secret about it
        pause = min(pause * _GROWTH, longest)
