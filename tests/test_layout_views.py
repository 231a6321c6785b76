"""Views of a BlockLayout: each is the memory itself, at the cells it names and nowhere else; a cursor ends in time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from layouts import ORDERS, ROOM, at_ease, cells, layouts

import aioshm
from aioshm import BlockLayout

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def in_region(run, name) -> Callable[[Callable[[aioshm.Region], Any]], Any]:
    """Call a function with an open region of ROOM bytes, and return what it returns."""

    def call(function: Callable[[aioshm.Region], Any], **options: Any) -> Any:
        async def main():
            async with aioshm.open_region(name, ROOM, **options) as region:
                return function(region)

        return run(main())

    return call


def pattern(layout: BlockLayout, region: aioshm.Region) -> None:
    """Give every cell a value of its own, through plain arithmetic only; padding gets 255."""
    region.buffer[: layout.size] = b"\xff" * layout.size
    for value, cell in enumerate(cells(layout).values()):
        region.buffer[cell.start : cell.stop] = bytes([value]) * len(cell)


def check_views(
    layout: BlockLayout, region: aioshm.Region, make: Callable[[int], Any], address: Callable[[Any], int]
) -> None:
    """Views of `make(rank)` show each rank its cells, where they are."""
    pattern(layout, region)
    base = region.array().ctypes.data
    for rank in range(layout.local_world_size):
        view = make(rank)
        assert tuple(view.shape) == (layout.num_blocks, layout.bytes_per_block[rank])
        for block in range(layout.num_blocks):
            assert address(view[block]) == base + layout.cell(rank, block).start
            assert set(np.asarray(view[block]).tolist()) == {rank * layout.num_blocks + block}
        view[:] = 254
    covered = sum(map(len, cells(layout).values()))
    assert region.buffer[: layout.size].tolist().count(254) == covered  # and nothing but its cells


def test_arrays_are_the_cells(in_region):
    @at_ease
    @given(layouts)
    def check(region, layout):
        check_views(layout, region, lambda rank: layout.array(region, rank), lambda row: row.ctypes.data)

    in_region(check)


@needs_torch
def test_tensors_are_the_cells(in_region):
    @at_ease
    @given(layouts)
    def check(region, layout):
        check_views(layout, region, lambda rank: layout.tensor(region, rank), lambda row: row.data_ptr())

    in_region(check)


@needs_torch
def test_tensor_strides_and_dtypes(in_region):
    import torch

    layout = BlockLayout(4, [8, 16], order="row-interleaved", alignment=32)

    def look(region):
        tensor = layout.tensor(region, 1, torch.int8)
        assert (tensor.dtype, tensor.stride()) == (torch.int8, (32, 1))
        assert layout.tensor(region, 1).dtype == layout.canonical_tensor(region).dtype == torch.uint8
        assert tensor.view(torch.bfloat16).shape == (4, 8)
        for dtype in (torch.float16, torch.int64):
            with pytest.raises(ValueError, match=rf"one byte, not {dtype}: use view"):
                layout.tensor(region, 1, dtype)
        with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, not str"):
            layout.tensor(region, 1, "int8")
        rows = layout.canonical_tensor(region, torch.int8)
        assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((4, 32), torch.int8, True)
        assert rows.data_ptr() == region.tensor().data_ptr()
        tensor[2, 5] = 77
        assert rows[2, 8 + 5] == 77

    in_region(look)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_for_a_secondary_tier(in_region, order):
    layout = BlockLayout(5, [3, 4], order=order, alignment=8)

    def look(region):
        pattern(layout, region)
        if order == "row-interleaved":
            found = {None: (layout.rows(region), range(layout.size), layout.row_bytes)}
        else:
            found = {
                rank: (layout.rank_rows(region, rank), layout.span(rank), layout.bytes_per_block[rank])
                for rank in (0, 1)
            }
        for rank, (rows, span, width) in found.items():
            assert (rows.shape, rows.format, rows.readonly, rows.c_contiguous) == ((5, width), "B", False, True)
            assert np.asarray(rows).ctypes.data == region.array().ctypes.data + span.start
            assert rows[3, 0] == layout.num_blocks * (rank or 0) + 3
            rows[4, width - 1] = 99
            assert region.buffer[span.start + 5 * width - 1] == 99

    in_region(look)


def test_the_rank_is_the_regions_own_unless_given(in_region):
    layout = BlockLayout(2, 8, local_world_size=2, order="rank-major")
    takes = [layout.array, layout.rank_rows, layout.cursor]

    def alone(region):
        for take in takes:
            with pytest.raises(ValueError, match=r"rank must be given: region '.*' was opened without one"):
                take(region)

    in_region(alone)
    ends = BlockLayout(2, 8, local_world_size=1, order="rank-major")

    def in_cohort(region):
        assert ends.array(region).ctypes.data == ends.array(region, 0).ctypes.data

    in_region(in_cohort, local_rank=0, local_world_size=1)


def test_a_region_too_small_or_closed(in_region):
    big = BlockLayout(ROOM + 1, 1, local_world_size=1, order="row-interleaved")
    fits = BlockLayout(ROOM, 1, local_world_size=1, order="row-interleaved")

    def look(region):
        for take in (
            big.rows,
            big.canonical_cursor,
            lambda region: big.array(region, 0),
            lambda region: big.cursor(region, 0),
        ):
            with pytest.raises(ValueError, match=rf"takes {ROOM + 1} bytes, and region '.*' has {ROOM}"):
                take(region)
        return region, fits.cursor(region, 0)

    region, cursor = in_region(look)
    for take in (fits.rows, lambda region: fits.array(region, 0), lambda _: cursor.next_array(1)):
        with pytest.raises(aioshm.RegionClosedError):
            take(region)
    assert (cursor.used, cursor.remaining) == (0, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_cursor_deals_out_pieces_and_stops_at_the_end(in_region, order):
    layout = BlockLayout(3, [40, 24], order=order, alignment=64)

    def look(region):
        base, cursor = region.array().ctypes.data, layout.cursor(region, 1)
        for first, width in ((0, 8), (8, 12)):
            view = cursor.next_array(width)
            assert (view.shape, view.strides) == ((3, width), (layout.block_stride(1), 1))
            assert view.ctypes.data == base + layout.rank_offset(1) + first
        for width in (5, 1 << 70):
            with pytest.raises(ValueError, match="20 of 24 bytes are dealt out, 4 remain"):
                cursor.next_array(width)
            assert (cursor.used, cursor.remaining) == (20, 4)
        for width, error in ((0, ValueError), (-4, ValueError), (1.0, TypeError), (True, TypeError)):
            with pytest.raises(error, match="bytes_per_block must be"):
                cursor.next_array(width)
        assert repr(cursor) == "<aioshm.BlockCursor: 20 of 24 bytes per block dealt out>"
        last = cursor.next_array(4)
        assert last[2].ctypes.data == base + layout.cell(1, 2).stop - 4
        assert cursor.remaining == 0

    in_region(look)


@needs_torch
def test_a_cursor_deals_out_tensors(in_region):
    import torch

    layout = BlockLayout(3, [40, 24], order="row-interleaved", alignment=96)

    def look(region):
        base = region.tensor().data_ptr()
        cursor, mine, yours = layout.cursor(region, 1), layout.canonical_cursor(region), layout.canonical_cursor(region)
        with pytest.raises(ValueError, match="one byte"):
            cursor.next_view(8, torch.float64)
        with pytest.raises(ValueError, match="does not fit"):
            cursor.next_view(25)
        assert cursor.used == 0
        view = cursor.next_view(24, torch.int8)
        assert (view.shape, view.stride(), view.dtype) == ((3, 24), (96, 1), torch.int8)
        assert view.data_ptr() == base + 40
        for first, width in ((0, 50), (50, 46)):  # whole rows, their padding too
            one, other = mine.next_view(width), yours.next_view(width)
            assert one.data_ptr() == other.data_ptr() == base + first
            assert one.stride() == (96, 1)
        assert mine.remaining == 0

    in_region(look)


def test_what_has_no_rows_says_so(in_region):
    major, rows = (BlockLayout(4, 8, local_world_size=2, order=order) for order in ORDERS)

    def look(region):
        for take in (major.rows, major.canonical_tensor, major.canonical_cursor, lambda _: major.row_bytes):
            with pytest.raises(ValueError, match="in rank-major order a block is no row"):
                take(region)
        with pytest.raises(ValueError, match="a rank has no rows of its own"):
            rows.rank_rows(region, 0)

    in_region(look)
