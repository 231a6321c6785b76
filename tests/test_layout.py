"""BlockLayout: no two cells share a byte, all stand where the order's name says, and nonsense is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies
from layouts import ORDERS, at_ease, cells, layouts

import aioshm
from aioshm import BlockLayout
from aioshm._open import _share

MIB = 1 << 20


def check_no_byte_is_shared(layout: BlockLayout) -> None:
    taken = sorted(cells(layout).values(), key=lambda cell: cell.start)
    assert taken[0].start == 0
    assert taken[-1].stop <= layout.size
    assert all(one.stop <= following.start for one, following in itertools.pairwise(taken))
    assert all(len(cell) == layout.bytes_per_block[rank] for (rank, _), cell in cells(layout).items())


def check_order_is_as_named(layout: BlockLayout) -> None:
    found = [where for where, _ in sorted(cells(layout).items(), key=lambda item: item[1].start)]
    assert found == sorted(found, key=None if layout.order == "rank-major" else lambda where: where[::-1])


def check_alignment(layout: BlockLayout) -> None:
    """What is padded begins at multiples, and no padding is longer than it must be."""
    parts = (
        [(layout.span(rank).start, layout.num_blocks * bytes_) for rank, bytes_ in enumerate(layout.bytes_per_block)]
        if layout.order == "rank-major"
        else [(layout.cell(0, block).start, sum(layout.bytes_per_block)) for block in range(layout.num_blocks)]
    )
    ends = [start for start, _ in parts[1:]] + [layout.size]
    for (start, length), end in zip(parts, ends, strict=True):
        assert start % layout.alignment == end % layout.alignment == 0
        assert 0 <= end - start - length < layout.alignment


def check_spans_and_chunks(layout: BlockLayout, data: Any) -> None:
    spans = [layout.span(rank) for rank in range(layout.local_world_size)]
    if layout.order == "rank-major":
        assert [byte for span in spans for byte in span] == list(range(layout.size))
    else:
        assert set(spans) == {range(layout.size)}
    for rank, span in enumerate(spans):
        stride = layout.block_stride(rank)
        limit = data.draw(strategies.integers(stride, stride * (layout.num_blocks + 1)))
        chunks = list(layout.chunks(rank, limit))
        assert [byte for chunk in chunks for byte in chunk] == list(span[: layout.num_blocks * stride])
        assert all(0 < len(chunk) <= limit and (chunk.start - span.start) % stride == 0 for chunk in chunks)
        assert all(len(chunk) > limit - stride for chunk in chunks[:-1])  # no smaller than they must be
        for block in range(layout.num_blocks):  # no cell is broken
            cell = layout.cell(rank, block)
            assert sum(cell.start in chunk and cell[-1] in chunk for chunk in chunks) == 1


@at_ease
@given(layouts, strategies.data())
def test_any_layout(layout, data):
    check_no_byte_is_shared(layout)
    check_order_is_as_named(layout)
    check_alignment(layout)
    check_spans_and_chunks(layout, data)
    for rank, block in cells(layout):
        assert layout.cell(rank, block).start == layout.rank_offset(rank) + block * layout.block_stride(rank)


def test_row_interleaved_by_hand():
    layout = BlockLayout(3, [3, 5], order="row-interleaved", alignment=16)
    assert (layout.local_world_size, layout.row_bytes, layout.size) == (2, 16, 48)
    assert [layout.cell(0, block) for block in range(3)] == [range(3), range(16, 19), range(32, 35)]
    assert [layout.cell(1, block) for block in range(3)] == [range(3, 8), range(19, 24), range(35, 40)]
    assert list(layout.chunks(1, 47)) == [range(32), range(32, 48)]


def test_rank_major_by_hand():
    layout = BlockLayout(3, [3, 5], order="rank-major", alignment=16)
    assert (layout.local_world_size, layout.size) == (2, 32)
    assert [layout.cell(0, block) for block in range(3)] == [range(3), range(3, 6), range(6, 9)]
    assert [layout.cell(1, block) for block in range(3)] == [range(16, 21), range(21, 26), range(26, 31)]
    assert [layout.span(rank) for rank in range(2)] == [range(16), range(16, 32)]
    assert list(layout.chunks(1, 14)) == [range(16, 26), range(26, 31)]


@pytest.mark.parametrize("page", [4096, 2 * MIB, 1 << 30])
@at_ease
@given(world=strategies.integers(1, 16), pages=strategies.integers(1, 8), short=strategies.integers(0, MIB))
def test_rank_major_spans_are_the_shares_that_the_ranks_populate(page, world, pages, short):
    border = max(page, 2 * MIB)
    layout = BlockLayout(1, pages * border - short, local_world_size=world, order="rank-major", alignment=border)
    mapping = SimpleNamespace(length=layout.size, page=page)
    for rank in range(world):
        request = SimpleNamespace(is_cohort=True, local_rank=rank, local_world_size=world)
        assert _share(request, mapping) == layout.span(rank)


def test_it_is_a_value():
    layout = BlockLayout(4, 8, local_world_size=2, order="row-interleaved", alignment=32)
    same = BlockLayout(np.int64(4), (8, 8), local_world_size=2, order="row-interleaved", alignment=32)
    assert layout == same
    assert len({layout, same}) == 1
    assert {type(value) for value in (same.num_blocks, *same.bytes_per_block, same.alignment)} == {int}
    assert repr(layout) == "BlockLayout(num_blocks=4, bytes_per_block=(8, 8), order='row-interleaved', alignment=32)"
    for twin in (eval(repr(layout)), pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert twin == layout
    for field, value in {"num_blocks": 5, "bytes_per_block": (8, 9), "order": "rank-major", "alignment": 1}.items():
        other = dataclasses.replace(layout, **{field: value})
        assert other != layout
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layout, field, value)


@pytest.mark.parametrize(
    ("facts", "error", "says"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks must be greater than 0"),
        ({"num_blocks": -1}, ValueError, "num_blocks"),
        ({"num_blocks": 4.0}, TypeError, "num_blocks must be an int, not float"),
        ({"num_blocks": True}, TypeError, "num_blocks"),
        ({"bytes_per_block": 0}, ValueError, "bytes_per_block must be greater"),
        ({"bytes_per_block": "88"}, TypeError, "bytes_per_block must be an int, not str"),
        ({"bytes_per_block": b"88"}, TypeError, "bytes_per_block must be an int, not bytes"),
        ({"bytes_per_block": {8, 9}}, TypeError, "bytes_per_block must be an int, not set"),
        ({"bytes_per_block": [8, 0]}, ValueError, r"bytes_per_block\[1\] must be greater"),
        ({"bytes_per_block": [8, None]}, TypeError, r"bytes_per_block\[1\]"),
        ({"bytes_per_block": [], "local_world_size": None}, ValueError, "at least one rank"),
        ({"bytes_per_block": [8, 8, 8]}, ValueError, "figures for 3 ranks, but local_world_size is 2"),
        ({"bytes_per_block": [8] * 1025, "local_world_size": None}, ValueError, "at most 1024, not 1025"),
        ({"local_world_size": None}, ValueError, "local_world_size must be given"),
        ({"local_world_size": 0}, ValueError, "local_world_size must be greater"),
        ({"local_world_size": 1 << 62}, ValueError, "at most 1024"),
        ({"local_world_size": 2.0}, TypeError, "local_world_size"),
        ({"order": "rank_major"}, ValueError, "'rank-major', 'row-interleaved', not 'rank_major'"),
        ({"order": None}, TypeError, "order"),
        ({"alignment": 0}, ValueError, "alignment must be greater"),
        ({"alignment": "4096"}, TypeError, "alignment"),
        ({"num_blocks": 1 << 60}, ValueError, "no address space"),
    ],
)
def test_facts_that_make_no_sense(facts, error, says):
    good = {"num_blocks": 4, "bytes_per_block": 8, "local_world_size": 2, "order": "rank-major", "alignment": 1}
    BlockLayout(**good)
    with pytest.raises(error, match=says):
        BlockLayout(**(good | facts))


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_blocks_and_limits_that_are_none(order):
    layout = BlockLayout(4, 8, local_world_size=2, order=order)
    for method in (layout.rank_offset, layout.block_stride, layout.span, lambda rank: layout.chunks(rank, 99)):
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=f"rank must be 0 to 1 in this layout, not {rank}"):
                method(rank)
        with pytest.raises(TypeError, match="rank must be an int"):
            method(0.0)
    for block in (-1, 4):
        with pytest.raises(ValueError, match=f"block must be 0 to 3 in this layout, not {block}"):
            layout.cell(0, block)
    stride = layout.block_stride(0)
    with pytest.raises(ValueError, match=f"max_bytes must be at least the {stride} bytes"):
        layout.chunks(0, stride - 1)


def test_arithmetic_takes_neither_torch_nor_numpy():
    code = (
        "import sys, aioshm; aioshm.BlockLayout(4, 8, local_world_size=2, order='rank-major').span(1); "
        "aioshm.BlockCursor; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert aioshm.BlockLayout.__module__ == aioshm.BlockCursor.__module__ == "aioshm"
