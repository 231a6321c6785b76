"""What users write must type-check: this file is read by mypy, and imported by nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import assert_type

import aioshm


async def opens(names: list[str]) -> None:
    opening = aioshm.open_region("kv", 1 << 30, local_rank=0, local_world_size=8, hint=None, timeout=None)
    assert_type(opening, AbstractAsyncContextManager[aioshm.Region, bool | None])
    async with opening as region:
        assert_type(region, aioshm.Region)
        assert_type(region.buffer, memoryview)
        assert_type(region.local_rank, int | None)
        assert_type(region.report.huge_share, float | None)
        assert_type(region.report.nodes, Mapping[int, int] | None)
        await region.populate(0, 4096)
        await region.aclose()
    for name in names:
        async with aioshm.open_region(name, 1, huge_pages="require", memory_policy="warn", on_progress=show):
            pass
        async with aioshm.open_region(name, 1, numa="interleave"), aioshm.open_region(name, 1, numa=[0, 1]):
            pass


async def asks() -> None:
    report = await aioshm.preflight(1 << 30, directory="/dev/shm", hint=None)
    assert_type(report, aioshm.PreflightReport)
    assert_type(report.largest, int | None)
    assert_type(report.error(), aioshm.AioshmError | None)
    for level in report.memory:
        assert_type(level, aioshm.MemoryLevelReport)
        assert_type(level.available, int | None)


def show(progress: aioshm.Progress) -> None:
    assert_type(progress.rate, float)


def loads() -> Callable[[aioshm.Region], Awaitable[None]]:
    return aioshm.load_from("/models/a.safetensors", offset=4096, on_progress=show)


async def launched() -> None:
    cohort = aioshm.Cohort.from_env()
    async with aioshm.open_region(cohort.region_name("kv"), 1 << 20, **cohort.ranks, initialize=loads()):
        pass


def facts(error: aioshm.InsufficientMemoryError) -> tuple[str, int]:
    assert_type(error.available, int)
    as_standard: MemoryError = error
    return str(as_standard), error.required
