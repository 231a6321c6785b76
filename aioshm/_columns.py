"""The same bytes of every block as a view of two dimensions, and the cursor that deals such views out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._request import check_count

if TYPE_CHECKING:
    import numpy
    import torch

    from ._region import Region


@dataclass(frozen=True)
class Columns:
    """`width` bytes of each of `num_blocks` blocks: the first at `offset`, each next one `stride` bytes further on."""

    num_blocks: int
    offset: int
    width: int
    stride: int

    def part(self, first: int, width: int) -> Columns:
        """Return `width` of the columns, from the column `first` on."""
        return Columns(self.num_blocks, self.offset + first, width, self.stride)

    def tensor(self, region: Region, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a torch view of shape `(num_blocks, width)`, of a dtype of one byte."""
        if dtype is not None:
            itemsize = getattr(dtype, "itemsize", None)
            if itemsize is None:
                raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
            if itemsize != 1:
                raise ValueError(f"dtype must be of one byte, not {dtype}: use view({dtype}) of the tensor of bytes")
        return region.tensor((self.num_blocks, self.width), dtype, offset=self.offset, strides=(self.stride, 1))

    def array(self, region: Region) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        """Return a NumPy view of shape `(num_blocks, width)`, of uint8."""
        return region.array((self.num_blocks, self.width), offset=self.offset, strides=(self.stride, 1))

    def matrix(self, region: Region) -> memoryview:
        """Return a memoryview of shape `(num_blocks, width)`; only where no gap lies between one block and the next."""
        stop = self.offset + self.num_blocks * self.width
        return region.buffer[self.offset : stop].cast("B", (self.num_blocks, self.width))


class BlockCursor:
    """Deals out views of successive pieces of every block: the first bytes of each, then the next ones, and so on.

    Made by `BlockLayout.cursor` and `BlockLayout.canonical_cursor`, not by hand. It belongs to one region of one
    process, and to one thread at a time; it keeps no view alive.
    """

    def __init__(self, region: Region, columns: Columns) -> None:
        self._region = region
        self._columns = columns
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of each block dealt out so far."""
        return self._used

    @property
    def remaining(self) -> int:
        """Bytes of each block still to be had."""
        return self._columns.width - self._used

    def next_view(self, bytes_per_block: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the next piece of every block as a zero-copy torch view.

        Args:
            bytes_per_block: Bytes of each block that the piece has.
            dtype: A type of one byte, such as torch.int8; None: torch.uint8.

        Returns:
            The view, of shape `(num_blocks, bytes_per_block)`, with the layout's stride from one block to the next.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The blocks have fewer bytes left, or the dtype is wider than a byte.
            RegionClosedError: The region was closed.
            ImportError: torch is not installed (`pip install 'aioshm[torch]'`). After any of them the cursor is where
                it was.
        """
        part = self._next(bytes_per_block)
        view = part.tensor(self._region, dtype)
        self._used += part.width
        return view

    def next_array(self, bytes_per_block: int) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        """Return the next piece of every block as a zero-copy, writable NumPy view of uint8; else as `next_view`."""
        part = self._next(bytes_per_block)
        view = part.array(self._region)
        self._used += part.width
        return view

    def _next(self, bytes_per_block: int) -> Columns:
        width = check_count("bytes_per_block", bytes_per_block)
        if width > self.remaining:
            raise ValueError(
                f"a view of {width} bytes per block does not fit: {self._used} of {self._columns.width} bytes are "
                f"dealt out, {self.remaining} remain"
            )
        return self._columns.part(self._used, width)

    def __repr__(self) -> str:
        return f"<aioshm.BlockCursor: {self._used} of {self._columns.width} bytes per block dealt out>"


def check_region(region: Region, size: int) -> None:
    """Refuse a region that has not all the bytes a layout takes."""
    if region.size < size:
        raise ValueError(f"the layout takes {size} bytes, and region {region.name!r} has {region.size}")


BlockCursor.__module__ = "aioshm"
