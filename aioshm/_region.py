"""The handle of an open region: views of its memory, and the way out."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _views
from ._errors import RegionClosedError
from ._guard import guard_for
from ._log import log
from ._mapping import Mapping
from ._populate import Populate, run_populate
from ._report import OpenReport
from ._request import Request, check_span
from ._tenancy import Tenancy
from ._threads import wait_through
from ._units import mib

if TYPE_CHECKING:
    import numpy
    import numpy.typing
    import torch


class Region:
    """Shared host memory that is really there, open in this process.

    Made by `open_region`, not by hand. Every process that has the region open sees the same bytes; nothing orders
    their reads and writes but what they agree on among themselves.

    Attributes:
        report: What opening it did and obtained.
    """

    report: OpenReport

    def __init__(self, request: Request, tenancy: Tenancy, mapping: Mapping) -> None:
        self._request = request
        self._tenancy = tenancy
        self._mapping = mapping
        self._closed = False
        self._closing: asyncio.Event | None = None

    @property
    def name(self) -> str:
        """What it was opened as."""
        return self._request.name

    @property
    def path(self) -> str:
        """Its file: `{directory}/aioshm-{euid}-{name}`."""
        return self._request.path

    @property
    def size(self) -> int:
        """Its bytes, exactly as asked for."""
        return self._request.size

    @property
    def created(self) -> bool:
        """Whether this process made it; False where it joined."""
        return self._tenancy.seat.role == "creator"

    @property
    def local_rank(self) -> int | None:
        """This process's rank among those of the host; None without a cohort."""
        return self._request.local_rank if self._request.is_cohort else None

    @property
    def local_world_size(self) -> int | None:
        """How many ranks the cohort has on this host; None without a cohort."""
        return self._request.local_world_size if self._request.is_cohort else None

    @property
    def closed(self) -> bool:
        """Whether it was closed, or, in a forked child, never was open here."""
        return self._closed or not self._tenancy.held

    @property
    def buffer(self) -> memoryview:
        """The whole region as a writable memoryview of unsigned bytes, a new one each time.

        Raises:
            RegionClosedError: The region was closed.
        """
        return _views.buffer(self._open_mapping())

    def array(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: numpy.typing.DTypeLike | None = None,
        *,
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> numpy.ndarray[Any, numpy.dtype[Any]]:
        """Return a zero-copy, writable NumPy view.

        It stays valid after the region closes, and keeps the memory mapped.

        Args:
            shape: Lengths of the dimensions; None: one dimension, from `offset` to the end.
            dtype: Type of the elements; None: uint8.
            offset: Byte at which it starts, a multiple of the item size.
            strides: Bytes from one element to the next, per dimension; None: C order without gaps.

        Returns:
            The view.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: It would reach beyond the region, the offset or strides make no sense, or the dtype holds Python
                objects.
            RegionClosedError: The region was closed.
            ImportError: NumPy is not installed (`pip install 'aioshm[numpy]'`).
        """
        return _views.array(self._open_mapping(), shape, dtype, offset, strides)

    def tensor(
        self,
        shape: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a zero-copy torch view on the CPU.

        It stays valid after the region closes, and keeps the memory mapped.

        Args:
            shape: Lengths of the dimensions; None: one dimension, from `offset` to the end.
            dtype: Type of the elements; None: torch.uint8.
            offset: Byte at which it starts, a multiple of the item size.
            strides: Elements (as torch counts, not bytes) from one element to the next, per dimension; None:
                contiguous.

        Returns:
            The view.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: It would reach beyond the region, the offset or strides make no sense, or the dtype is
                quantized.
            RegionClosedError: The region was closed.
            ImportError: torch is not installed (`pip install 'aioshm[torch]'`).
        """
        return _views.tensor(self._open_mapping(), shape, dtype, offset, strides)

    async def populate(self, offset: int = 0, length: int | None = None) -> None:
        """Make a part of a region that was opened with `populate=False` resident and mapped here.

        What the bytes hold stays as it is, so any process may do it at any time. Whole pages are populated, huge ones
        where they can be had, and so a little more than was asked for.

        Args:
            offset: First byte.
            length: Bytes; None: to the end.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The part does not lie within the region.
            InsufficientSpaceError: The file system is full. After this and all below, what was populated stays.
            InsufficientMemoryError: The guard saw no room for more, or a control group may not have more hugetlb pages.
            HugePagesUnavailableError: The region was opened with `huge_pages="require"`, and the kernel gave none.
            RegionClosedError: The region was closed, before or meanwhile.
            OSError: Whatever else the kernel says.

        Cancellation:
            Felt within one chunk, a few milliseconds; what was populated before stays.
        """
        mapping = self._open_mapping()
        span = check_span(offset, length, self.size)
        work = Populate(
            self._request,
            mapping,
            self._tenancy.seat.description.fd,
            span=span,
            collapse=self._request.huge_pages != "off",
            guard=guard_for(self._request, self._tenancy.seat.description.fd, mapping.page),
        )
        with self._tenancy.populating(work):
            await run_populate(work, self._request)
        if self.closed:
            raise RegionClosedError(name=self.name)

    async def aclose(self) -> None:
        """Close the region: leave it, and give its memory back unless views of it are alive. Twice is fine.

        The last process to leave removes the name. Views made before stay valid; the memory goes when the last
        of them does, and a warning is logged that says how much stays.

        Cancellation:
            Felt when it is all done.
        """
        if not self._tenancy.held:
            self._closed = True
            return
        if self._closing is not None:  # another task is at it
            await wait_through(self._closing)
            return
        self._closed = True
        self._closing = asyncio.Event()
        try:
            await self._tenancy.give_back()
        finally:
            self._closing.set()
            self._tell_closed()

    def _tell_closed(self) -> None:
        what = self._request.allocation_name
        log.info("%s: %s %s", what, "removed" if self._tenancy.removed else "released", self.path)
        if self._mapping.still_mapped:
            log.warning(
                "%s: %s MiB of %s stay mapped until the last view of them (memoryview, array or tensor) goes",
                what,
                mib(self._mapping.length),
                self.path,
            )

    def _open_mapping(self) -> Mapping:
        if self.closed:
            raise RegionClosedError(name=self.name)
        return self._mapping

    def __repr__(self) -> str:
        state = "closed" if self.closed else "created" if self.created else "joined"
        return f"<aioshm.Region {self.name!r}: {mib(self.size)} MiB, {state}>"

    def __del__(self) -> None:
        if not self.closed:
            warnings.warn(f"unclosed region {self.path}", ResourceWarning, source=self, stacklevel=2)
            self._tenancy.give_back_now()


Region.__module__ = "aioshm"
