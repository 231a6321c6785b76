"""Zero-copy NumPy and torch views of a mapping: the only module that imports either, and only when asked.

Both are made from the mapping's anchor itself. From a memoryview they would work until somebody calls its `release()`,
which succeeds under a living torch tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import numpy.typing
    import torch

    from ._mapping import Mapping


def buffer(mapping: Mapping) -> memoryview:
    """Return the mapping as a writable memoryview of unsigned bytes."""
    return memoryview(mapping.anchor()).cast("B")


def array(
    mapping: Mapping,
    shape: int | Sequence[int] | None,
    dtype: numpy.typing.DTypeLike | None,
    offset: int,
    strides: Sequence[int] | None,
) -> numpy.ndarray[Any, numpy.dtype[Any]]:
    """Return a NumPy view; see `Region.array`."""
    try:
        import numpy
    except ModuleNotFoundError as error:
        raise ImportError("array() needs NumPy, which is not installed: pip install 'aioshm[numpy]'") from error

    kind = numpy.dtype(numpy.uint8 if dtype is None else dtype)
    if kind.hasobject:
        raise ValueError(f"dtype {kind} holds Python objects: pointers of this process, which mean nothing to another")
    dimensions = _dimensions(shape, kind.itemsize, mapping.size, offset)
    steps = tuple(strides) if strides is not None else _contiguous(dimensions, kind.itemsize)
    _check(dimensions, steps, kind.itemsize, offset, mapping.size)
    # The memoryview is dropped at once: NumPy's base becomes the anchor behind it.
    return numpy.ndarray(dimensions, kind, memoryview(mapping.anchor()), offset, steps)


def tensor(
    mapping: Mapping,
    shape: int | Sequence[int] | None,
    dtype: torch.dtype | None,
    offset: int,
    strides: Sequence[int] | None,
) -> torch.Tensor:
    """Return a torch view; see `Region.tensor`."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ImportError("tensor() needs torch, which is not installed: pip install 'aioshm[torch]'") from error

    kind = torch.uint8 if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {type(kind).__name__}")
    if str(kind).startswith("torch.q"):  # as_strided of what has no quantizer ends in a segmentation fault
        raise ValueError(f"dtype {kind} is quantized: a tensor of it takes a scale, which bytes alone do not have")
    dimensions = _dimensions(shape, kind.itemsize, mapping.size, offset)
    steps = tuple(strides) if strides is not None else _contiguous(dimensions, 1)
    _check(dimensions, tuple(step * kind.itemsize for step in steps), kind.itemsize, offset, mapping.size)
    count = (mapping.size - offset) // kind.itemsize
    if not count:  # torch makes no tensor from nothing
        return torch.empty(dimensions, dtype=kind)
    return torch.frombuffer(mapping.anchor(), dtype=kind, count=count, offset=offset).as_strided(dimensions, steps)


def _dimensions(shape: int | Sequence[int] | None, itemsize: int, size: int, offset: int) -> tuple[int, ...]:
    if not itemsize:
        raise ValueError("elements of a dtype without a size cannot be counted")
    if operator.index(offset) < 0 or offset % itemsize:
        raise ValueError(f"offset {offset} must be a multiple of the item size, {itemsize} bytes, and not negative")
    if offset > size:
        raise ValueError(f"offset {offset} lies beyond the region's {size} bytes")
    if shape is None:
        return ((size - offset) // itemsize,)
    dimensions = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
    if any(length < 0 for length in dimensions):
        raise ValueError(f"shape {dimensions} has a negative dimension")
    return dimensions


def _contiguous(dimensions: Sequence[int], step: int) -> tuple[int, ...]:
    return tuple(step * math.prod(dimensions[index + 1 :]) for index in range(len(dimensions)))


def _check(dimensions: Sequence[int], steps: Sequence[int], itemsize: int, offset: int, size: int) -> None:
    """Refuse a view of which any byte lies outside the region (steps in bytes)."""
    if len(steps) != len(dimensions):
        raise ValueError(f"{len(steps)} strides were given for {len(dimensions)} dimensions")
    if any(step < 0 for step in steps):
        raise ValueError("negative strides are not supported")
    if 0 in dimensions:
        return
    end = offset + sum((length - 1) * step for length, step in zip(dimensions, steps, strict=True)) + itemsize
    if end > size:
        raise ValueError(f"a view of shape {tuple(dimensions)} at offset {offset} ends at byte {end} of {size}")
