"""As `initialize` a file is loaded once, or there is no region; and nothing of a load keeps the memory mapped."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import pytest
from cancelling import NOTHING, held
from reading import DATA, SIZE, watched_reads

import aioshm


def test_all_ranks_have_what_one_of_them_loaded(run, name, file, reads):
    async def rank(number: int) -> tuple[bool, bool]:
        options = {"local_rank": number, "local_world_size": 3, "initialize": aioshm.load_from(file)}
        async with aioshm.open_region(name, SIZE, **options) as region:
            return region.created, bytes(region.buffer) == DATA + bytes(SIZE - len(DATA))

    async def main():
        return await asyncio.gather(*map(rank, range(3)))

    assert sorted(run(main())) == [(False, True), (False, True), (True, True)]
    assert sum(reads.sizes) == len(DATA)


@pytest.mark.parametrize("end", ["short", "large"])
def test_a_failed_load_is_the_creators_error_and_the_others_lose_a_peer(run, name, path, file, end):
    load = aioshm.load_from(file, length=SIZE if end == "short" else None, offset=SIZE if end == "large" else 0)

    async def rank(number: int) -> None:
        options = {"local_rank": number, "local_world_size": 3, "initialize": load}
        async with aioshm.open_region(name, SIZE, **options):
            pytest.fail("half a region was given out")

    async def main():
        errors = await asyncio.gather(*map(rank, range(3)), return_exceptions=True)
        assert held(path) == NOTHING
        return sorted(type(error).__name__ for error in errors)

    own = "ShortFileError" if end == "short" else "ValueError"
    assert sorted(run(main())) == sorted(["PeerLostError", "PeerLostError", own])


def test_without_a_cohort_each_that_waits_tries_itself(run, name, path, file, reads):
    def break_down(number: int) -> None:
        if number in (2, 4):  # the second read of each of the first two that try
            raise OSError(errno.EIO, "Input/output error")

    async def one() -> bytes:
        async with aioshm.open_region(name, SIZE, initialize=aioshm.load_from(file)) as region:
            return bytes(region.buffer)

    async def main():
        reads.before = break_down
        return await asyncio.gather(one(), one(), one(), return_exceptions=True)

    results = run(main())
    assert sum(isinstance(result, OSError) and result.filename == str(file) for result in results) == 2
    assert DATA + bytes(SIZE - len(DATA)) in results
    assert held(path) == NOTHING


@pytest.mark.parametrize("end", ["loaded", "short", "shrunk"])
def test_nothing_of_it_keeps_the_memory_mapped(run, name, path, file, caplog, end):
    async def main():
        try:
            async with aioshm.open_region(name, SIZE, threads=1) as region:
                with watched_reads() as reads:
                    if end == "shrunk":
                        reads.before = lambda number: os.truncate(file, 1)
                    await aioshm.load_from(file, length=SIZE if end == "short" else None)(region)
        except aioshm.ShortFileError as error:
            assert error.shrank == (end == "shrunk")  # noqa: PT017 - its traceback is what might keep the memory
            assert held(path) == NOTHING
        assert held(path) == NOTHING

    with caplog.at_level(logging.INFO, "aioshm"):
        run(main())
    assert ("loaded 5.0 MiB from" in caplog.text) == (end == "loaded")
    assert "removed" in caplog.text
    assert "stay mapped" not in caplog.text
