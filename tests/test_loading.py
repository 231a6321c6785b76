"""A file gets into a region byte by byte as it is, straight and off the loop, or there is a clear error."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cancelling import NOTHING, held
from reading import DATA, MIB, SIZE

import aioshm
from aioshm import _loading

FILL = 0xA5


@pytest.fixture
def in_region(run, name) -> Callable[..., Any]:
    """Await a function with an open region that is full of FILL, and return what it returns."""

    def call(function: Callable[[aioshm.Region], Any]) -> Any:
        async def main() -> Any:
            async with aioshm.open_region(name, SIZE, threads=1) as region:
                region.buffer[:] = bytes([FILL]) * SIZE
                return await function(region)

        return run(main())

    return call


def untouched(region: aioshm.Region) -> bool:
    return bytes(region.buffer) == bytes([FILL]) * SIZE


@pytest.mark.parametrize(
    ("offset", "file_offset", "length"),
    [
        (0, 0, None),
        (0, 0, len(DATA)),
        (SIZE - len(DATA), 0, None),
        (7, 5, 3 * MIB + 1),
        (0, len(DATA) - 1, None),
        (SIZE - 1, 17, 1),
        (4096, MIB, MIB),
        (SIZE, 0, 0),
        (0, len(DATA), 0),
        (3, 2 * MIB + 1, None),
    ],
)
def test_the_bytes_asked_for_get_where_they_should_and_no_others(in_region, file, offset, file_offset, length):
    async def load(region):
        await aioshm.load_from(file, offset=offset, file_offset=file_offset, length=length)(region)
        return bytes(region.buffer) == expected

    part = DATA[file_offset:] if length is None else DATA[file_offset : file_offset + length]
    expected = bytes([FILL]) * offset + part + bytes([FILL]) * (SIZE - offset - len(part))
    assert in_region(load)


def test_it_goes_straight_into_the_region_through_a_thread_of_its_own(in_region, file, reads):
    class NotToBeUsed(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the default executor was used")

    async def load(region):
        asyncio.get_running_loop().set_default_executor(NotToBeUsed())
        tracemalloc.start()
        try:
            await aioshm.load_from(file)(region)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert in_region(load) < MIB // 2
    assert sum(reads.sizes) == len(DATA)
    assert len(reads.sizes) > 2
    assert reads.threads == {"aioshm-load_0"}


def test_a_relative_path_is_taken_from_where_the_call_was_made(in_region, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    load = aioshm.load_from(file.name)
    monkeypatch.chdir("/")

    async def twice(region):
        await load(region)
        file.write_bytes(DATA[::-1])
        await load(region)
        return bytes(region.buffer[: len(DATA)]) == DATA[::-1]

    assert in_region(twice)


def test_it_can_be_sent_to_another_process(in_region, file):
    load = pickle.loads(pickle.dumps(aioshm.load_from(file, length=1000, offset=1)))

    async def loaded(region):
        await load(region)
        return bytes(region.buffer[1:1001])

    assert in_region(loaded) == DATA[:1000]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"path": 3}, TypeError, "path must be a str or os.PathLike, not int"),
        ({"path": b"x"}, TypeError, "not bytes"),
        ({"path": ""}, ValueError, "path of a file"),
        ({"path": "a\0b"}, ValueError, "path of a file"),
        ({"offset": -1}, ValueError, "offset must not be negative, and is -1"),
        ({"file_offset": 1.0}, TypeError, "file_offset must be an int, not float"),
        ({"file_offset": -7}, ValueError, "file_offset"),
        ({"length": True}, TypeError, "length must be an int, not bool"),
        ({"length": -1}, ValueError, "length"),
        ({"on_progress": 1}, TypeError, "on_progress must be callable or None, not int"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_call(arguments, error, match):
    with pytest.raises(error, match=match):
        aioshm.load_from(**{"path": "/nowhere", **arguments})


@pytest.mark.parametrize(
    ("arguments", "required", "available"),
    [
        ({"length": len(DATA) + 1}, len(DATA) + 1, len(DATA)),
        ({"file_offset": len(DATA)}, 1, 0),
        ({"file_offset": len(DATA) + 9, "length": 2}, 2, 0),
        ({"file_offset": 5, "length": len(DATA) - 4}, len(DATA) - 4, len(DATA) - 5),
    ],
)
def test_a_short_file_is_seen_before_a_byte_is_written(in_region, file, arguments, required, available):
    async def load(region):
        with pytest.raises(EOFError, match=f"{required} bytes are needed .* and {available} are there") as caught:
            await aioshm.load_from(file, **arguments)(region)
        assert untouched(region)
        return caught.value

    error = in_region(load)
    assert isinstance(error, aioshm.ShortFileError)
    facts = (error.path, error.file_offset, error.required, error.available, error.shrank)
    assert facts == (str(file), arguments.get("file_offset", 0), required, available, False)


@pytest.mark.parametrize("arguments", [{"offset": SIZE - len(DATA) + 1}, {"offset": SIZE, "length": 1}])
def test_what_does_not_fit_is_refused_before_a_byte_is_written(in_region, file, arguments):
    async def load(region):
        with pytest.raises(ValueError, match=f"do not fit into the region from byte {arguments['offset']} on"):
            await aioshm.load_from(file, **arguments)(region)
        assert untouched(region)

    in_region(load)


def test_what_is_no_file_is_refused_and_not_waited_for(in_region, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # nobody writes: to open it would last for ever, or until this comes
    rescue = threading.Timer(20, lambda: os.close(os.open(fifo, os.O_RDWR)))

    async def load(region):
        cases = {fifo: errno.ESPIPE, tmp_path: errno.EISDIR, tmp_path / "no": errno.ENOENT, "/dev/null": errno.ESPIPE}
        for path, code in cases.items():
            with pytest.raises(OSError, match=str(path)) as caught:
                await aioshm.load_from(path)(region)
            assert (caught.value.errno, caught.value.filename) == (code, str(path))
        assert untouched(region)

    rescue.start()
    in_region(load)
    assert not rescue.finished.is_set()
    rescue.cancel()
    rescue.join()


def test_a_file_that_shrinks_while_it_is_read(in_region, file, reads):
    def shrink(number: int) -> None:
        if number == 2:
            os.truncate(file, reads.sizes[0] + 5)

    async def load(region):
        reads.before = shrink
        with pytest.raises(aioshm.ShortFileError, match="shrank while it was read") as caught:
            await aioshm.load_from(file)(region)
        return caught.value

    error = in_region(load)
    assert (error.required, error.available, error.shrank) == (len(DATA), reads.sizes[0] + 5, True)


def test_a_read_error_names_the_file(in_region, file, reads):
    def break_down(number: int) -> None:
        if number == 3:
            raise OSError(errno.EIO, "Input/output error")

    async def load(region):
        reads.before = break_down
        with pytest.raises(OSError, match="Input/output error") as caught:
            await aioshm.load_from(file)(region)
        return caught.value

    error = in_region(load)
    assert (error.errno, error.filename) == (errno.EIO, str(file))


@pytest.mark.root
def test_a_full_file_system_under_an_unpopulated_region(run, name, file, small_tmpfs):
    directory = small_tmpfs(mib=8)

    async def main():
        async with aioshm.open_region(name, SIZE, directory=directory, populate=False, hint="Buy more.") as region:
            (directory / "other").write_bytes(bytes(6 * MIB))
            with pytest.raises(aioshm.InsufficientSpaceError, match=f"{directory}.* Buy more.") as caught:
                await aioshm.load_from(file)(region)
            assert caught.value.required > caught.value.available
            (directory / "other").unlink()

    run(main())


@pytest.mark.parametrize("closing", ["before", "meanwhile"])
def test_a_region_that_is_closed(run, name, path, file, reads, closing):
    async def main():
        reading, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def wait(_: int) -> None:
            loop.call_soon_threadsafe(reading.set)
            assert go_on.wait(30)

        async with aioshm.open_region(name, SIZE, threads=1) as region:
            if closing == "before":
                await region.aclose()
                go_on.set()
            reads.before = wait
            task = asyncio.create_task(aioshm.load_from(file)(region))
            if closing == "meanwhile":
                await reading.wait()
                await region.aclose()
                assert held(path)["mappings"]  # the thread is in it
                go_on.set()
            with pytest.raises(aioshm.RegionClosedError):
                await task
        assert held(path) == NOTHING
        assert len(reads.sizes) == (closing == "meanwhile")

    run(main())


def test_progress_is_told_while_it_lasts_and_at_the_end(in_region, file, reads):
    seen: list[aioshm.Progress] = []
    some = threading.Event()

    def tell(progress: aioshm.Progress) -> None:
        seen.append(progress)
        if progress.done:
            some.set()

    async def load(region):
        reads.before = lambda number: number == 1 or some.wait(30)  # the ticker comes between the first and the second
        await aioshm.load_from(file, offset=2, file_offset=3, on_progress=tell)(region)

    in_region(load)
    done = [progress.done for progress in seen]
    total = len(DATA) - 3
    assert done[0] == 0
    assert done[-1] == total
    assert reads.sizes[0] in done
    assert done == sorted(done)
    assert {progress.total for progress in seen} == {total}


def test_no_progress_is_told_of_what_failed(in_region, file):
    seen: list[aioshm.Progress] = []

    async def load(region):
        with pytest.raises(aioshm.ShortFileError):
            await aioshm.load_from(file, length=SIZE, on_progress=seen.append)(region)

    in_region(load)
    assert seen == []


def test_reads_follow_the_speed_of_the_file():
    size, slow, fast = MIB, [], []
    for _ in range(20):
        size = _loading._adapt(size, size, size / (10 * MIB))  # 10 MiB/s
        slow.append(size)
    assert slow[0] == MIB // 2
    assert slow[-1] == _loading._SMALLEST_READ
    for _ in range(20):
        size = _loading._adapt(size, size, size / (64 << 30))
        fast.append(size)
    assert fast[:2] == [_loading._SMALLEST_READ * 2, _loading._SMALLEST_READ * 4]
    assert fast[-1] == _loading._LARGEST_READ
    assert _loading._adapt(MIB, 1, 0.0) == 2 * MIB  # a clock that stood still


def test_aiofiles_is_imported_by_who_loads_only():
    code = (
        "import sys, aioshm; aioshm.open_region; assert 'aiofiles' not in sys.modules; "
        "aioshm.load_from; assert 'aiofiles' in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
