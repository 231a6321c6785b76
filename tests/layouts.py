"""Layouts for property tests, and their cells."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings, strategies

from aioshm import BlockLayout

ORDERS = ("rank-major", "row-interleaved")
ROOM = 64 << 10  # no layout drawn here takes more

# Neither a deadline nor a verdict on speed: the machine may be busy with other tests.
at_ease = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

layouts = strategies.builds(
    BlockLayout,
    strategies.integers(1, 9),
    strategies.lists(strategies.integers(1, 50), min_size=1, max_size=6),
    order=strategies.sampled_from(ORDERS),
    alignment=strategies.integers(1, 100),
)


def cells(layout: BlockLayout) -> dict[tuple[int, int], range]:
    numbers = itertools.product(range(layout.local_world_size), range(layout.num_blocks))
    return {(rank, block): layout.cell(rank, block) for rank, block in numbers}
