"""Where each rank's bytes of each block stand in a region: arithmetic, and the views that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ._columns import BlockCursor, Columns, check_region
from ._locks import MAX_RANKS
from ._mapping import round_up
from ._request import check_count, check_index, check_size, check_word

if TYPE_CHECKING:
    import numpy
    import torch

    from ._region import Region

Order = Literal["rank-major", "row-interleaved"]


@dataclass(frozen=True, init=False)
class BlockLayout:
    """The places of `num_blocks` blocks in a region, of which every rank has its own bytes.

    A rank's bytes of one block are a *cell*, `w{rank}b{block}` here. Two orders:

        "rank-major"       w0b0 w0b1 w0b2 … | w1b0 w1b1 w1b2 … |
        "row-interleaved"  w0b0 w1b0 … | w0b1 w1b1 … | w0b2 w1b2 … |

    In rank-major order a rank is one contiguous span, which can be bound to its NUMA node and pinned by itself. The
    spans are exactly the shares that the ranks populate where the ranks are equal and those of the cohort, the region
    has just `size` bytes, and the spans are whole huge pages (`alignment=2 << 20` sees to it, or a hugetlbfs
    directory's page size where that is larger); otherwise borders differ. In row-interleaved order a block is one row,
    with the ranks side by side: what goes to disk or over a wire in one piece.

    A layout is an immutable value: equal ones hash alike, and it pickles. Its ranks need not be all of the cohort's: a
    scheduler that maps the region may be the cohort's last rank, and none of the layout's. All processes must use
    the same layout; nothing in the region tells which.

    Attributes:
        num_blocks: How many blocks there are.
        bytes_per_block: Bytes of one cell, for each rank.
        order: `"rank-major"` or `"row-interleaved"`.
        alignment: Bytes to whose multiples rank spans (rank-major) or rows are padded, at the bars above. Cells are
            not padded.

    Example:
        ```python
        layout = aioshm.BlockLayout(4096, 2 << 20, local_world_size=8, order="row-interleaved")
        async with aioshm.open_region("kv", layout.size, local_rank=rank, local_world_size=8) as region:
            kv = layout.tensor(region)  # this rank's part of every block: (4096, 2 << 20)
        ```
    """

    num_blocks: int
    bytes_per_block: tuple[int, ...]
    order: Order
    alignment: int

    def __init__(
        self,
        num_blocks: int,
        bytes_per_block: int | Sequence[int],
        *,
        local_world_size: int | None = None,
        order: Order,
        alignment: int = 1,
    ) -> None:
        """Check the facts; no memory is touched.

        Args:
            num_blocks: How many blocks there are.
            bytes_per_block: Bytes that a rank has of one block: one figure for all ranks, or one for each (the stages
                of a pipeline may differ).
            local_world_size: How many ranks share the blocks; not needed where `bytes_per_block` has a figure for each.
            order: `"rank-major"` or `"row-interleaved"`.
            alignment: Bytes; any positive number. Rank spans or rows, as `order` says, begin at multiples of it, and
                the last one is padded as well.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument has a value that makes no sense, or they contradict each other.
        """
        facts = {
            "num_blocks": check_count("num_blocks", num_blocks),
            "bytes_per_block": _cells(bytes_per_block, local_world_size),
            "order": check_word("order", order, Order),
            "alignment": check_count("alignment", alignment),
        }
        for field, value in facts.items():
            object.__setattr__(self, field, value)
        check_size(self.size)

    @property
    def local_world_size(self) -> int:
        """How many ranks share the blocks."""
        return len(self.bytes_per_block)

    @property
    def size(self) -> int:
        """Bytes that a region must have; it may have more."""
        if self.order == "rank-major":
            return sum(map(self._span_bytes, self.bytes_per_block))
        return self.num_blocks * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one block of all ranks, the padding included; ValueError in rank-major order, which has no rows."""
        self._check_rows()
        return round_up(sum(self.bytes_per_block), self.alignment)

    def rank_offset(self, rank: int) -> int:
        """Return the byte of the region at which the rank's first cell begins; ValueError: there is no such rank."""
        before = self.bytes_per_block[: self._rank(rank)]
        return sum(map(self._span_bytes, before)) if self.order == "rank-major" else sum(before)

    def block_stride(self, rank: int) -> int:
        """Return the bytes from one cell of the rank to its next; ValueError: there is no such rank."""
        width = self.bytes_per_block[self._rank(rank)]
        return width if self.order == "rank-major" else self.row_bytes

    def cell(self, rank: int, block: int) -> range:
        """Return the bytes of the region that are the rank's part of the block.

        Raises:
            ValueError: There is no such rank or block.
        """
        number = check_index("block", block)
        if not 0 <= number < self.num_blocks:
            raise ValueError(f"block must be 0 to {self.num_blocks - 1} in this layout, not {number}")
        start = self.rank_offset(rank) + number * self.block_stride(rank)
        return range(start, start + self.bytes_per_block[rank])

    def span(self, rank: int) -> range:
        """Return the bytes of the region that a process must pin, or bind to a node, to have all cells of the rank.

        In rank-major order the span ends where the next rank's begins, its padding included: the spans lie end to end
        and fill `size`. In row-interleaved order every rank is in every row, and the span is all of `size` for each.

        Raises:
            ValueError: There is no such rank.
        """
        start = self.rank_offset(rank)
        if self.order == "rank-major":
            return range(start, start + self._span_bytes(self.bytes_per_block[rank]))
        return range(self.size)

    def chunks(self, rank: int, max_bytes: int) -> Iterator[range]:
        """Cut the rank's span into pieces that break no cell, for calls that cannot take all of it at once.

        Args:
            rank: Whose span; in row-interleaved order the pieces are the same for every rank.
            max_bytes: Bytes that a piece may have; as many whole cells (rank-major) or rows (row-interleaved) go into
                each as it can take.

        Returns:
            The pieces as bytes of the region, in ascending order and without gaps. The padding that follows the last
            cell of a rank-major span is in none of them, that of a row is a part of it. Borders are multiples of a page
            only where cells or rows are.

        Raises:
            ValueError: Not even one cell or row is as small as `max_bytes`, or there is no such rank.
        """
        stride, limit = self.block_stride(rank), check_count("max_bytes", max_bytes)
        if limit < stride:
            raise ValueError(f"max_bytes must be at least the {stride} bytes from one block to the next, not {limit}")
        start = self.span(rank).start
        end, step = start + self.num_blocks * stride, limit // stride * stride
        return (range(at, min(at + step, end)) for at in range(start, end, step))

    def tensor(self, region: Region, rank: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the cells of one rank as a zero-copy torch view. It stays valid after the region closes, as all do.

        Args:
            region: Where the blocks are, open, of at least `size` bytes.
            rank: Whose cells, any rank's; None: those of the region's own local rank.
            dtype: A type of one byte, such as torch.int8; None: torch.uint8. `view(dtype)` of the result gives wider
                ones, where offset and strides are multiples of their size.

        Returns:
            The view, of shape `(num_blocks, bytes_per_block[rank])` and strides `(block_stride(rank), 1)`.

        Raises:
            ValueError: The region is too small, there is no such rank, or the dtype is wider than a byte.
            RegionClosedError: The region was closed.
            ImportError: torch is not installed (`pip install 'aioshm[torch]'`).
        """
        return self._columns(self._rank_of(region, rank)).tensor(region, dtype)

    def array(self, region: Region, rank: int | None = None) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        """Return the cells of one rank as a zero-copy, writable NumPy view of uint8; else as `tensor`."""
        return self._columns(self._rank_of(region, rank)).array(region)

    def canonical_tensor(self, region: Region, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return all ranks' cells as one zero-copy torch view, the same whichever rank asks: a row per block.

        Args:
            region: Where the blocks are, open, of at least `size` bytes.
            dtype: A type of one byte, as for `tensor`.

        Returns:
            The view, contiguous, of shape `(num_blocks, row_bytes)`: all cells of a block and its padding.

        Raises:
            ValueError: The order is rank-major, which has no rows; or as `tensor`.
            RegionClosedError: The region was closed.
            ImportError: torch is not installed (`pip install 'aioshm[torch]'`).
        """
        check_region(region, self.size)
        return self._all_columns().tensor(region, dtype)

    def rows(self, region: Region) -> memoryview:
        """Return all blocks of all ranks for a secondary tier to read and write: `rows[block]` is no copy.

        Args:
            region: Where the blocks are, open, of at least `size` bytes.

        Returns:
            A writable memoryview of unsigned bytes, C-contiguous, of shape `(num_blocks, row_bytes)`.

        Raises:
            ValueError: The region is too small, or the order is rank-major: a block has no row there, but each rank has
                `rank_rows`.
            RegionClosedError: The region was closed.
        """
        check_region(region, self.size)
        return self._all_columns().matrix(region)

    def rank_rows(self, region: Region, rank: int | None = None) -> memoryview:
        """Return all blocks of one rank, in rank-major order, for a secondary tier to read and write.

        Args:
            region: Where the blocks are, open, of at least `size` bytes.
            rank: Whose cells, any rank's; None: those of the region's own local rank.

        Returns:
            A writable memoryview of unsigned bytes, C-contiguous, of shape `(num_blocks, bytes_per_block[rank])`.

        Raises:
            ValueError: The region is too small, there is no such rank, or the order is row-interleaved: a memoryview
                has no gaps to skip the other ranks with, but `rows` has them all and `array` has one.
            RegionClosedError: The region was closed.
        """
        if self.order != "rank-major":
            raise ValueError("in row-interleaved order a rank has no rows of its own: take `rows`, `array` or `tensor`")
        return self._columns(self._rank_of(region, rank)).matrix(region)

    def cursor(self, region: Region, rank: int | None = None) -> BlockCursor:
        """Return what deals out one rank's cells piece by piece: the same piece of every cell, as for one layer.

        Args:
            region: Where the blocks are, of at least `size` bytes.
            rank: Whose cells, any rank's; None: those of the region's own local rank.

        Raises:
            ValueError: The region is too small, or there is no such rank.
        """
        return BlockCursor(region, self._columns(self._rank_of(region, rank)))

    def canonical_cursor(self, region: Region) -> BlockCursor:
        """Return what deals out whole rows piece by piece: the same views for every rank that takes the same widths.

        Args:
            region: Where the blocks are, of at least `size` bytes.

        Raises:
            ValueError: The region is too small, or the order is rank-major, which has no rows.
        """
        check_region(region, self.size)
        return BlockCursor(region, self._all_columns())

    def _columns(self, rank: int) -> Columns:
        return Columns(self.num_blocks, self.rank_offset(rank), self.bytes_per_block[rank], self.block_stride(rank))

    def _all_columns(self) -> Columns:
        return Columns(self.num_blocks, 0, self.row_bytes, self.row_bytes)

    def _span_bytes(self, width: int) -> int:
        return round_up(self.num_blocks * width, self.alignment)

    def _rank(self, rank: int) -> int:
        number = check_index("rank", rank)
        if not 0 <= number < self.local_world_size:
            raise ValueError(f"rank must be 0 to {self.local_world_size - 1} in this layout, not {number}")
        return number

    def _rank_of(self, region: Region, rank: int | None) -> int:
        check_region(region, self.size)
        chosen = region.local_rank if rank is None else rank
        if chosen is None:
            raise ValueError(f"rank must be given: region {region.name!r} was opened without one")
        return self._rank(chosen)

    def _check_rows(self) -> None:
        if self.order != "row-interleaved":
            raise ValueError("in rank-major order a block is no row: its cells stand apart, rank by rank")


def _cells(bytes_per_block: object, local_world_size: object) -> tuple[int, ...]:
    """Return the bytes of one cell for each rank."""
    world = None if local_world_size is None else check_count("local_world_size", local_world_size)
    if isinstance(bytes_per_block, Sequence) and not isinstance(bytes_per_block, (str, bytes, bytearray, memoryview)):
        cells = tuple(check_count(f"bytes_per_block[{rank}]", width) for rank, width in enumerate(bytes_per_block))
        if not cells:
            raise ValueError("bytes_per_block must have a figure for at least one rank")
        if world not in {None, len(cells)}:
            raise ValueError(f"bytes_per_block has figures for {len(cells)} ranks, but local_world_size is {world}")
    else:
        width = check_count("bytes_per_block", bytes_per_block)
        if world is None:
            raise ValueError("local_world_size must be given where bytes_per_block is one figure for all ranks")
        cells = (width,) * min(world, MAX_RANKS + 1)
    if len(cells) > MAX_RANKS:
        raise ValueError(f"local_world_size must be at most {MAX_RANKS}, not {world or len(cells)}")
    return cells


BlockLayout.__module__ = "aioshm"
