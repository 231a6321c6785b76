"""What an open did and what it obtained, for logs, metrics and people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["creator", "joiner"]


@dataclass(frozen=True, kw_only=True)
class OpenReport:
    """What one `open_region` did. Times are seconds, sizes are bytes.

    Attributes:
        role: `"creator"` made the region, `"joiner"` found it made.
        recycled: Whether a leftover of dead processes had to be removed first.
        size: Bytes asked for.
        allocated: Bytes the file takes: `size` in whole pages.
        populated: Bytes made resident and mapped by this process: all, its share in a cohort, or 0 with
            `populate=False`.
        huge: Of `populated`, bytes the kernel backs with huge pages; None where that is not known: with
            `huge_pages="off"`, and for a joiner without a cohort, which maps what the creator obtained.
        nodes: Of `populated`, bytes per NUMA node, as `{0: 1073741824, 1: 1073741824}`; None where the kernel does not
            tell. One page of each 2 MiB is asked for: with huge pages that is exact, with small ones a sample.
        threads: Threads that populated.
        wait_seconds: From the call until this process was creator or joiner.
        preflight_seconds: Looking whether it fits, and sizing the file; next to nothing for a joiner.
        populate_seconds: Mapping and populating.
        initialize_seconds: The creator's `initialize`, the wait for the other ranks before it included; else next to
            nothing.
        release_seconds: Waiting until every rank of the cohort was ready, and mapping the others' shares where that is
            cheap; next to nothing without a cohort.
        total_seconds: From the call until the region was ready.
        small_page_reason: Why part of it has small pages, as far as the kernel says; None where nothing has.
    """

    role: Role
    recycled: bool
    size: int
    allocated: int
    populated: int
    huge: int | None
    nodes: Mapping[int, int] | None = field(hash=False)
    threads: int
    wait_seconds: float
    preflight_seconds: float
    populate_seconds: float
    initialize_seconds: float
    release_seconds: float
    total_seconds: float
    small_page_reason: str | None

    @property
    def rate(self) -> float:
        """Bytes populated per second; 0.0 where nothing was."""
        return self.populated / self.populate_seconds if self.populate_seconds > 0 else 0.0

    @property
    def huge_share(self) -> float | None:
        """The part of what was populated that has huge pages, 0.0 to 1.0; None where it is not known."""
        return None if self.huge is None or not self.populated else self.huge / self.populated


OpenReport.__module__ = "aioshm"
