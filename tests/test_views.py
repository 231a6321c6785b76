"""Views of a region: zero-copy, within bounds, and readable for as long as they live, whatever happens around them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cancelling import NOTHING, held
from conftest import loop_factory
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import aioshm

try:
    import torch
except ImportError:
    torch = None

MIB = 1 << 20
SIZE = MIB + 5  # not whole pages, not whole elements

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


@pytest.fixture
def in_region(run, name) -> Callable[[Callable[[aioshm.Region], Any]], Any]:
    """Call a function with an open region of SIZE bytes, and return what it returns once the region is closed."""

    def call(function: Callable[[aioshm.Region], Any]) -> Any:
        async def main():
            async with aioshm.open_region(name, SIZE) as region:
                return function(region)

        return run(main())

    return call


def test_all_views_show_the_same_bytes(in_region):
    def look(region):
        view, array = region.buffer, region.array()
        assert (view.nbytes, view.format, view.readonly, view.ndim) == (SIZE, "B", False, 1)
        assert (array.shape, array.dtype, array.flags.writeable, array.flags.owndata) == (
            (SIZE,),
            np.uint8,
            True,
            False,
        )
        view[SIZE - 1] = 7
        assert array[SIZE - 1] == 7
        array[0] = 9
        assert view[0] == 9
        assert region.buffer is not view
        assert region.buffer[0] == 9

    in_region(look)


@needs_torch
def test_a_tensor_shows_them_too(in_region):
    def look(region):
        tensor, view = region.tensor(), region.buffer
        assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == ((SIZE,), torch.uint8, "cpu")
        tensor[5] = 3
        assert view[5] == 3
        floats = region.tensor((4, 8), torch.float32, offset=128)
        floats[3, 7] = 1.5
        assert region.array((4, 8), np.float32, offset=128)[3, 7] == 1.5
        assert floats.data_ptr() == tensor.data_ptr() + 128
        assert floats.is_contiguous()

    in_region(look)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "strides", "expected"),
    [
        (None, None, 0, None, ((SIZE,), (1,))),
        (None, "f8", 0, None, ((SIZE // 8,), (8,))),
        (None, "f8", 16, None, (((SIZE - 16) // 8,), (8,))),
        (None, None, SIZE, None, ((0,), (1,))),
        (10, "i2", 2, None, ((10,), (2,))),
        (np.int64(10), "i2", 0, None, ((10,), (2,))),
        ((2, 3, 4), "f4", 4, None, ((2, 3, 4), (48, 16, 4))),
        ((), "i4", 8, None, ((), ())),
        ((3, 0, 2), "i4", 0, None, ((3, 0, 2), (0, 8, 4))),
        ((5, 4), "u1", 1, (100, 2), ((5, 4), (100, 2))),
        ((5, 4), "u1", 0, (0, 0), ((5, 4), (0, 0))),  # broadcast
        ((2,), "u1", 4, (SIZE - 5,), ((2,), (SIZE - 5,))),  # to the very last byte
        (3, [("a", "i4"), ("b", "u2")], 12, None, ((3,), (6,))),
        (SIZE, "S1", 0, None, ((SIZE,), (1,))),
    ],
)
def test_array_shapes_offsets_and_strides(in_region, shape, dtype, offset, strides, expected):
    def look(region):
        array = region.array(shape, dtype, offset=offset, strides=strides)
        assert (array.shape, array.strides) == expected or (0 in array.shape and array.shape == expected[0])
        assert array.dtype == np.dtype(dtype or "u1")
        whole = region.array()
        if array.size:
            assert array.ctypes.data == whole.ctypes.data + offset
            assert np.shares_memory(array, whole)

    in_region(look)


@pytest.mark.parametrize("what", ["array", "tensor"])
@pytest.mark.parametrize(
    ("shape", "kind", "offset", "strides"),
    [
        (SIZE + 1, "uint8", 0, None),
        (SIZE, "uint8", 1, None),
        (SIZE // 4 + 1, "float32", 0, None),
        ((1 << 40, 1 << 40), "uint8", 0, None),
        (-1, "uint8", 0, None),
        ((4, -1), "uint8", 0, None),
        (1, "uint8", -1, None),
        (1, "uint8", SIZE, None),
        (0, "uint8", SIZE + 1, None),
        (1, "float32", 2, None),  # not aligned
        ((2,), "uint8", 0, (SIZE,)),
        ((2, 2), "uint8", 0, (SIZE - 1, 1)),
        ((2,), "uint8", 8, (-1,)),
        ((2, 2), "uint8", 0, (1,)),
        ((2,), "uint8", 0, (1 << 62,)),
    ],
)
def test_what_is_out_of_bounds_is_refused(in_region, what, shape, kind, offset, strides):
    if what == "tensor" and torch is None:
        pytest.skip("torch is not installed")

    def look(region):
        dtype = np.dtype(kind) if what == "array" else getattr(torch, kind)
        with pytest.raises(ValueError, match=r"region|dimension|offset|strides|view"):
            getattr(region, what)(shape, dtype, offset=offset, strides=strides)

    in_region(look)
    gc.collect()


@pytest.mark.parametrize("what", ["array", "tensor"])
@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [((2.0,), {}), (("4",), {}), (((2.0,),), {}), ((4,), {"offset": 1.0}), ((4,), {"offset": None})],
)
def test_what_is_no_number_is_refused(in_region, what, arguments, keywords):
    if what == "tensor" and torch is None:
        pytest.skip("torch is not installed")

    def look(region):
        with pytest.raises(TypeError):
            getattr(region, what)(*arguments, **keywords)

    in_region(look)


@pytest.mark.parametrize("dtype", ["O", [("a", "i4"), ("b", "O")], "S", "V0"])
def test_dtypes_that_make_no_sense_in_shared_memory_are_refused(in_region, dtype):
    """An object is a pointer of this process: read by another, it crashes."""

    def look(region):
        with pytest.raises(ValueError, match="dtype"):
            region.array(1, dtype)

    in_region(look)


@needs_torch
def test_tensor_dtypes(in_region):
    def look(region):
        for kind in (torch.quint8, torch.qint32, torch.quint4x2):  # torch itself crashes on a view of these
            with pytest.raises(ValueError, match="quantized"):
                region.tensor(4, kind)
        with pytest.raises(TypeError, match=r"torch\.dtype"):
            region.tensor(4, "float32")
        for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64):
            assert region.tensor((2, 2), kind, offset=16).dtype == kind
        assert region.tensor((3, 2), torch.int16, strides=(10, 5)).stride() == (10, 5)  # elements, as torch counts
        assert region.tensor((), torch.int32).shape == ()
        assert region.tensor(None, torch.float64, offset=SIZE - SIZE % 8).shape == (0,)
        assert region.tensor((0, 4), offset=SIZE).shape == (0, 4)

    in_region(look)


KINDS = ["buffer", "array", pytest.param("tensor", marks=needs_torch)]


def make_view(region: aioshm.Region, kind: str) -> Any:
    return region.buffer if kind == "buffer" else getattr(region, kind)()


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_outlives_the_region_and_a_warning_says_so(run, name, path, caplog, kind):
    async def main():
        async with aioshm.open_region(name, SIZE, allocation_name="the cache") as region:
            view = make_view(region, kind)
            view[SIZE - 1] = 77
        return view

    with caplog.at_level(logging.WARNING, "aioshm"):
        view = run(main())
    (record,) = caplog.records
    assert "the cache" in record.getMessage()
    assert "stay mapped" in record.getMessage()
    # The name and the descriptor went at once.
    assert held(path) == {**NOTHING, "mappings": 1}
    assert view[SIZE - 1] == 77
    view[0] = 1
    part = view[10:20]
    del view
    assert part[0] == 0
    del part
    assert held(path) == NOTHING


def test_without_views_nothing_is_warned_of(run, name, caplog):
    async def main():
        async with aioshm.open_region(name, SIZE) as region:
            region.array()[3] = region.buffer[4]

    with caplog.at_level(logging.WARNING, "aioshm"):
        run(main())
    assert not caplog.records


def test_a_released_memoryview_takes_nothing_from_under_an_array(in_region):
    """The array is made from what the memoryview is made from, not from the memoryview."""

    def look(region):
        view = region.buffer
        return region.array(), view, view[2:4]

    array, view, part = in_region(look)
    part.release()
    view.release()
    del view, part
    array[:] = 5
    assert array[-1] == 5


@needs_torch
def test_a_released_memoryview_takes_nothing_from_under_a_tensor(in_region):
    def look(region):
        view = region.buffer
        return region.tensor(), view

    tensor, view = in_region(look)
    view.release()
    del view
    gc.collect()
    tensor.fill_(5)
    assert tensor[-1] == 5


def _is_fine(view: Any, model: bytearray, where: range) -> bool:
    return bytes(np.asarray(view)) == bytes(model[where.start : where.stop : where.step])


def make_machine(name: str, path: Any) -> type[RuleBasedStateMachine]:
    """Return a machine that does to views what users do, in any order; memory gone under a view is a crash."""
    size = 3 * 4096

    class Views(RuleBasedStateMachine):
        @initialize()
        def start(self):
            self.runner = asyncio.Runner(loop_factory=loop_factory())
            self.context = aioshm.open_region(name, size)
            self.region = self.runner.run(self.context.__aenter__())
            self.model = bytearray(size)
            self.views: list[tuple[Any, range]] = []

        def pick(self, data) -> int:
            return data.draw(strategies.integers(0, len(self.views) - 1))

        @precondition(lambda self: not self.region.closed)
        @rule(data=strategies.data())
        def make(self, data):
            start = data.draw(strategies.integers(0, size))
            stop = data.draw(strategies.integers(start, size))
            where = range(start, stop)
            kind = data.draw(strategies.sampled_from(["buffer", "array", *(["tensor"] if torch else [])]))
            view = (
                self.region.buffer[start:stop]
                if kind == "buffer"
                else getattr(self.region, kind)(stop - start, offset=start)
            )
            self.views.append((view, where))

        @precondition(lambda self: self.views)
        @rule(data=strategies.data())
        def take_a_part(self, data):
            view, where = self.views[self.pick(data)]
            part = data.draw(strategies.slices(len(where)).filter(lambda part: part.step is None or part.step > 0))
            self.views.append((view[part], where[part]))

        @precondition(lambda self: self.views)
        @rule(data=strategies.data())
        def convert(self, data):
            view, where = self.views[self.pick(data)]
            if isinstance(view, memoryview):
                other = np.asarray(view)
            elif isinstance(view, np.ndarray):
                other = torch.from_numpy(view) if torch and data.draw(strategies.booleans()) else memoryview(view)
            else:
                other = view.numpy()
            self.views.append((other, where))

        @precondition(lambda self: self.views)
        @rule(data=strategies.data())
        def drop(self, data):
            del self.views[self.pick(data)]

        @precondition(lambda self: any(isinstance(view, memoryview) for view, _ in self.views))
        @rule(data=strategies.data())
        def release(self, data):
            index = data.draw(
                strategies.sampled_from([i for i, (view, _) in enumerate(self.views) if isinstance(view, memoryview)])
            )
            with contextlib.suppress(BufferError):  # an array was made from it
                self.views[index][0].release()
                del self.views[index]

        @precondition(lambda self: any(where for _, where in self.views))
        @rule(data=strategies.data(), value=strategies.integers(0, 255))
        def write(self, data, value):
            index = data.draw(strategies.sampled_from([i for i, (_, where) in enumerate(self.views) if where]))
            view, where = self.views[index]
            at = data.draw(strategies.integers(0, len(where) - 1))
            view[at] = value
            self.model[where[at]] = value

        @rule()
        def close(self):
            self.runner.run(self.region.aclose())

        @rule()
        def collect(self):
            gc.collect()

        @precondition(lambda self: not self.region.closed)
        @rule()
        def populate(self):
            self.runner.run(self.region.populate())

        @invariant()
        def every_view_shows_what_was_written(self):
            for view, where in self.views:
                assert _is_fine(view, self.model, where)

        @invariant()
        def mapped_as_long_as_it_should(self):
            # An empty view may be of nothing: NumPy and torch need no memory to show none.
            if self.region.closed and not self.views:
                assert held(path) == NOTHING
            if self.region.closed and any(where for _, where in self.views):
                assert held(path) == {**NOTHING, "mappings": 1}

        def teardown(self):
            if hasattr(self, "runner"):
                self.views.clear()
                self.runner.run(self.context.__aexit__(None, None, None))
                self.runner.close()
                assert held(path) == NOTHING

    return Views


def test_no_sequence_of_calls_takes_memory_from_under_a_view(name, path):
    gc.collect()
    gc.freeze()  # what torch alone has is a tenth of a second for every collection
    try:
        run_state_machine_as_test(
            make_machine(name, path),
            settings=settings(max_examples=50, stateful_step_count=30, deadline=None, database=None),
        )
    finally:
        gc.unfreeze()
