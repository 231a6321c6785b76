"""What an open tells: progress on the loop, the report, and a line in the log per step."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
import logging
import subprocess
import sys
import threading
import time

import pytest
from cancelling import held

import aioshm
from aioshm import _libc, _progress
from aioshm._progress import Ticker

MIB = 1 << 20
SIZE = 64 * MIB


@pytest.fixture
def slow_kernel(monkeypatch) -> None:
    """Makes every chunk take as long as on a machine that has to compact memory first."""
    madvise = _libc.try_madvise

    def slow(address, length, advice):
        if advice == _libc.MADV_POPULATE_WRITE:
            time.sleep(0.01)
        return madvise(address, length, advice)

    monkeypatch.setattr(_libc, "try_madvise", slow)


def test_progress_is_told_on_the_loop_now_and_then_and_at_the_end(run, name, slow_kernel):
    async def main():
        told = []
        here = threading.current_thread()
        loop = asyncio.get_running_loop()

        def listen(progress):
            assert threading.current_thread() is here
            assert asyncio.get_running_loop() is loop
            told.append((time.monotonic(), progress))

        async with aioshm.open_region(name, SIZE, threads=1, on_progress=listen):
            opened = len(told)
        assert len(told) == opened, "told after the open"
        return told

    told = run(main())
    times, progresses = zip(*told, strict=True)
    assert len(progresses) > 3
    assert all(isinstance(progress, aioshm.Progress) for progress in progresses)
    assert {progress.total for progress in progresses} == {SIZE}
    done = [progress.done for progress in progresses]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == SIZE
    assert done[-2] < SIZE or done.count(SIZE) <= 2
    elapsed = [progress.elapsed for progress in progresses]
    assert elapsed == sorted(elapsed)
    assert 0 < progresses[-1].rate < 1 << 60
    assert progresses[0].rate == 0
    # At most ten a second, and one at either end.
    between = [after - before for before, after in itertools.pairwise(times[:-1])]
    assert min(between) > _progress._INTERVAL / 2
    assert len(times) <= (times[-1] - times[0]) / _progress._INTERVAL + 3


def test_every_process_counts_its_own(run, name):
    async def main():
        told = {"first": [], "second": []}
        async with (
            aioshm.open_region(name, SIZE, on_progress=told["first"].append),
            aioshm.open_region(name, SIZE, on_progress=told["second"].append),
        ):
            pass
        for progresses in told.values():
            assert (progresses[0].done, progresses[-1].done) == (0, SIZE)

    run(main())


def test_a_later_populate_tells_of_its_part(run, name):
    async def main():
        told = []
        async with aioshm.open_region(name, SIZE, populate=False, huge_pages="off", on_progress=told.append) as region:
            assert told == [], "there was nothing to populate"
            await region.populate(4 * MIB, 8 * MIB)
            assert {progress.total for progress in told} == {8 * MIB}
            assert told[-1].done == 8 * MIB

    run(main())


def test_an_exception_in_the_callback_is_logged_once_and_breaks_nothing(run, name, slow_kernel, caplog):
    async def main():
        calls = []

        def listen(progress):
            calls.append(progress)
            if len(calls) == 2:
                raise ZeroDivisionError("a broken progress bar")

        async with aioshm.open_region(name, SIZE, threads=1, allocation_name="the cache", on_progress=listen) as region:
            assert region.report.populated == SIZE
        assert len(calls) == 2

    with caplog.at_level(logging.ERROR, "aioshm"):
        run(main())
    (record,) = caplog.records
    assert record.name == "aioshm"
    assert "on_progress" in record.getMessage()
    assert "the cache" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_nothing_is_told_after_a_cancellation(run, name, slow_kernel):
    async def main():
        told = []
        started = asyncio.Event()

        def listen(progress):
            told.append(progress)
            if len(told) == 2:
                started.set()

        async def work():
            async with aioshm.open_region(name, SIZE, threads=1, on_progress=listen):
                pytest.fail("was opened")

        task = asyncio.create_task(work())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        so_far = len(told)
        await asyncio.sleep(3 * _progress._INTERVAL)
        assert len(told) == so_far
        assert told[-1].done < SIZE

    run(main())


def test_a_failed_open_does_not_tell_of_an_end(run, name, monkeypatch):
    async def main():
        told = []
        monkeypatch.setattr(_libc, "try_madvise", lambda *_: errno.EIO)
        with pytest.raises(OSError, match="POPULATE_WRITE"):
            async with aioshm.open_region(name, SIZE, on_progress=told.append):
                pytest.fail("was opened")
        assert [progress.done for progress in told] == [0]

    run(main())


def test_a_ticker_leaves_no_timer(run):
    async def main():
        calls = []
        with pytest.raises(LookupError), Ticker(calls.append, lambda: 0, 1, what="a test"):
            raise LookupError
        assert len(calls) == 1
        await asyncio.sleep(2 * _progress._INTERVAL)
        assert len(calls) == 1

    run(main())


@pytest.mark.parametrize("populate", [True, False])
def test_the_figures_of_the_report_add_up(run, name, populate):
    async def main():
        size = 6 * MIB + 1
        async with (
            aioshm.open_region(name, size, populate=populate) as first,
            aioshm.open_region(name, size, populate=populate) as second,
        ):
            pass
        for region, role in ((first, "creator"), (second, "joiner")):
            report = region.report
            assert (report.role, report.recycled, report.size) == (role, False, size)
            assert report.allocated == 6 * MIB + 4096
            assert report.populated == (report.allocated if populate else 0)
            assert report.threads >= 1 if populate else report.threads == 0
            seconds = {key: value for key, value in dataclasses.asdict(report).items() if key.endswith("_seconds")}
            total = seconds.pop("total_seconds")
            assert sum(seconds.values()) == pytest.approx(total, abs=1e-6)
            assert min(seconds.values()) >= 0
            assert report.rate * report.populate_seconds == pytest.approx(report.populated)
        assert first.report.preflight_seconds > second.report.preflight_seconds
        assert second.report.huge_share is None, "a joiner cannot know"
        if populate:
            assert first.report.huge % (2 * MIB) == 0
            assert 0 <= first.report.huge_share <= 1
            assert first.report.small_page_reason is not None, "its last page is a small one"
        else:
            assert first.report.huge_share is None

    run(main())


def test_every_step_is_logged_with_what_the_memory_is_for(run, name, path, caplog):
    """In order, on the logger `aioshm`, and nothing else at the level of everyday."""

    async def main():
        path.write_bytes(b"left over")
        path.chmod(0o700)
        async with (
            aioshm.open_region(name, SIZE, allocation_name="CPU KV cache"),
            aioshm.open_region(name, SIZE, allocation_name="CPU KV cache"),
        ):
            pass
        assert held(path)["names"] is False

    with caplog.at_level(logging.DEBUG, "aioshm"):
        run(main())
    assert {record.name for record in caplog.records} == {"aioshm"}
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert all("CPU KV cache" in line for _, line in lines)
    expected = [
        ("INFO", "left by a process that died"),  # recycled
        ("DEBUG", "MiB fit"),  # preflight
        ("INFO", "created"),
        ("INFO", "populated 64.0 MiB"),
        ("INFO", "joined"),
        ("INFO", "mapped 64.0 MiB"),
        ("INFO", "released"),
        ("INFO", "removed"),
    ]
    assert len(lines) == len(expected), lines
    for (level, line), (wanted_level, words) in zip(lines, expected, strict=True):
        assert level == wanted_level, line
        assert words in line
    (created,) = [line for _, line in lines if "created" in line]
    assert str(path) in created
    populated = next(line for _, line in lines if "populated" in line)
    assert "GiB/s" in populated
    assert "% in huge pages" in populated


def test_taking_over_a_stub_is_logged(run, name, path, caplog):
    async def main():
        path.touch(0o600)
        async with aioshm.open_region(name, MIB, allocation_name="CPU KV cache") as region:
            assert region.created

    with caplog.at_level(logging.INFO, "aioshm"):
        run(main())
    (line,) = [record.getMessage() for record in caplog.records if "took over" in record.getMessage()]
    assert "CPU KV cache" in line
    assert str(path) in line


def test_a_cancelled_close_is_logged_too(run, name, path, caplog):
    async def main():
        region = await aioshm.open_region(name, MIB, allocation_name="CPU KV cache").__aenter__()
        view = region.buffer
        closing = asyncio.create_task(region.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        del view

    with caplog.at_level(logging.INFO, "aioshm"):
        run(main())
    lines = [record.getMessage() for record in caplog.records]
    assert any("removed" in line for line in lines)
    assert any("stay mapped" in line for line in lines)


def test_a_program_that_sets_up_no_logging_reads_nothing(name):
    """A library's warning goes to stderr by logging's last resort where nobody handles it."""
    program = (
        "import asyncio, sys, aioshm\n"
        "async def main():\n"
        "    async with aioshm.open_region(sys.argv[1], 4096) as region:\n"
        "        return region.buffer\n"
        "view = asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
