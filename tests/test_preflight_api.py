"""`aioshm.preflight`: the verdict and the figures of `open_region`, before it; and nothing is allocated by asking."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tree import V1_UNLIMITED, V2, Tree

import aioshm
from aioshm import _cgroup, _host, _libc, _preflight
from aioshm._cgroup import memory_levels
from aioshm._host import FileSystem, read_pool
from aioshm._preflight import largest_size, memory_required

MIB, GIB = 1 << 20, 1 << 30
HUGE = 2 * MIB
ROOMY = FileSystem("/dev/shm", "tmpfs", 4096, 0, 0)  # no limit of its own


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A made `/` that is read in place of the real one, and a file system without limit; nothing else is in it."""
    tree = Tree(tmp_path)
    root = str(tmp_path)
    monkeypatch.setattr(_cgroup, "own_memory_levels", lambda: memory_levels(root))
    for name in ("read_memory", "read_shmem_enabled"):
        monkeypatch.setattr(_host, name, functools.partial(getattr(_host, name), root=root))
    monkeypatch.setattr(_host, "read_pool", lambda page, *_: read_pool(page, root))
    put_file_system(monkeypatch, ROOMY)
    return tree


def put_file_system(monkeypatch: pytest.MonkeyPatch, file_system: FileSystem) -> None:
    monkeypatch.setattr(_host, "read_file_system", lambda directory: file_system)


def put_inside(tree: Tree) -> None:
    """Put the process into the group `engine` of a pod."""
    tree.inside("0::/pod/engine")
    tree.mount(V2, version=2)


def ask(run: Any, size: int, **options: Any) -> aioshm.PreflightReport:
    report: aioshm.PreflightReport = run(aioshm.preflight(size, **options))
    return report


def fail(run: Any, name: str, size: int, **options: Any) -> BaseException:
    """Open, and return the error it raises."""

    async def main() -> BaseException:
        with pytest.raises(aioshm.AioshmError) as caught:
            async with aioshm.open_region(name, size, **options):
                pass  # pragma: no cover
        return caught.value

    error: BaseException = run(main())
    return error


class TestLevels:
    def test_all_of_them_own_group_first_and_the_host_last(self, run, tree):
        put_inside(tree)
        tree.v2(f"{V2}/pod/engine", "max", 70 * MIB)
        tree.v2(f"{V2}/pod", GIB, 100 * MIB, f"inactive_file {60 * MIB}\n")
        tree.meminfo(total=8 * GIB, available=6 * GIB)
        report = ask(run, 950 * MIB)
        assert [(each.level.removeprefix(str(tree.root)), each.limit, each.usage) for each in report.memory] == [
            (f"{V2}/pod/engine", None, 70 * MIB),
            (f"{V2}/pod", GIB, 100 * MIB),
            ("host", 8 * GIB, 2 * GIB),
        ]
        assert [each.reclaimable for each in report.memory] == [0, 60 * MIB, 0]
        assert [each.available for each in report.memory] == [None, GIB - 40 * MIB, 6 * GIB]
        assert [each.verdict for each in report.memory] == ["fits", "reclaim", "fits"]
        assert report.fits

    def test_the_sentinel_of_v1_is_no_limit(self, run, tree):
        tree.inside("4:memory:/a")
        tree.mount("/sys/fs/cgroup/memory", version=1)
        tree.v1("/sys/fs/cgroup/memory/a", V1_UNLIMITED, 5)
        (level,) = ask(run, 1).memory
        assert (level.limit, level.usage, level.available) == (None, 5, None)

    def test_a_level_that_cannot_be_read_is_left_out(self, run, tree):
        put_inside(tree)
        tree.v2(f"{V2}/pod", 100, 1)
        assert len(ask(run, 1).memory) == 1

    def test_each_level_has_a_verdict_of_its_own_and_the_tightest_is_the_problem(self, run, tree):
        put_inside(tree)
        tree.v2(f"{V2}/pod/engine", 200 * MIB, 0)
        tree.v2(f"{V2}/pod", 300 * MIB, 150 * MIB)
        tree.meminfo(total=8 * GIB, available=6 * GIB)
        report = ask(run, 250 * MIB, allocation_name="CPU KV cache", hint="Lower it.")
        assert [each.verdict for each in report.memory] == ["short", "short", "fits"]
        (problem,) = report.problems
        assert isinstance(problem, aioshm.InsufficientMemoryError)
        assert (problem.level, problem.required) == (f"{tree.root}{V2}/pod", report.memory_required)
        assert report.memory_required == memory_required(250 * MIB)
        assert str(problem).endswith("container or pod. Lower it.")

    def test_the_warning_is_the_one_that_is_logged(self, run, tree, caplog):
        put_inside(tree)
        tree.v2(f"{V2}/pod", 500 * MIB, 450 * MIB, f"inactive_file {400 * MIB}\n")
        report = ask(run, 300 * MIB, allocation_name="CPU KV cache")
        assert report.fits
        assert report.error() is None
        assert report.warning is not None
        assert report.warning.startswith(
            "CPU KV cache: 308.6 MiB required, which fits only after reclaim in memory level"
        )
        assert ask(run, 10 * MIB).warning is None
        assert ask(run, 600 * MIB).warning is None
        assert caplog.records == []

    def test_where_nothing_is_known_nothing_stands_in_the_way(self, run, tree):
        report = ask(run, 1 << 50)
        assert (report.fits, report.memory, report.largest) == (True, (), None)
        assert (report.directory.total, report.directory.free) == (None, None)


class TestLargest:
    @given(st.integers(0, 1 << 45), st.sampled_from([4096, HUGE]))
    def test_of_memory(self, available, page):
        largest = largest_size(available, page)
        assert largest % page == 0
        assert largest == 0 or memory_required(largest) <= available
        assert memory_required(largest + page) > available

    def test_the_tightest_of_space_and_memory(self, run, tree, monkeypatch):
        put_inside(tree)
        tree.v2(f"{V2}/pod", 500 * MIB, 100 * MIB)
        assert ask(run, GIB).largest == largest_size(400 * MIB, 4096)
        put_file_system(monkeypatch, FileSystem("/dev/shm", "tmpfs", 4096, 64 * MIB, 40 * MIB + 1))
        assert ask(run, GIB).largest == 40 * MIB

    def test_of_a_pool_it_is_whole_pages_and_no_memory_is_counted(self, run, tree, monkeypatch):
        put_inside(tree)
        tree.v2(f"{V2}/pod", 1, 1)
        tree.pool(HUGE, free=5, reserved=1, overcommit=3, surplus=2)
        put_file_system(monkeypatch, FileSystem("/huge", "hugetlbfs", HUGE, 0, 0))
        report = ask(run, 4 * HUGE + 1)
        assert (report.fits, report.allocated, report.memory_required, report.largest) == (True, 5 * HUGE, 0, 5 * HUGE)
        assert [each.verdict for each in report.memory] == ["fits"]
        pool = report.huge_pages
        assert (pool.page, pool.pool_free, pool.pool_reserved, pool.pool_surplus) == (HUGE, 5 * HUGE, HUGE, 2 * HUGE)
        assert (report.directory.kind, report.directory.total, report.directory.free) == ("hugetlbfs", None, 5 * HUGE)
        (problem,) = ask(run, 5 * HUGE + 1).problems
        assert isinstance(problem, aioshm.InsufficientSpaceError)


class TestReport:
    def test_all_that_stands_in_the_way_is_told_in_the_order_of_open_region(self, run, tree, monkeypatch):
        put_inside(tree)
        tree.v2(f"{V2}/pod", 10 * MIB, 0)
        put_file_system(monkeypatch, FileSystem("/dev/shm", "tmpfs", 4096, 20 * MIB, 15 * MIB))
        report = ask(run, 16 * MIB)
        assert [type(each) for each in report.problems] == [
            *(aioshm.InsufficientSpaceError, aioshm.InsufficientMemoryError),
        ]
        assert not report.fits

    def test_where_aioshm_does_not_work_that_is_the_problem(self, run, monkeypatch):
        monkeypatch.setattr(_libc, "SUPPORTED", False)
        monkeypatch.delattr(os, "O_PATH")
        monkeypatch.delattr(os, "O_TMPFILE")
        report = ask(run, 1)
        assert [type(each) for each in report.problems] == [aioshm.UnsupportedPlatformError]
        assert (report.directory.kind, report.largest) == (None, 0)

    def test_the_error_is_new_each_time(self, run, tmp_path):
        report = ask(run, 1, directory=tmp_path / "missing")
        errors = [report.error(), report.error()]
        assert errors[0] is not errors[1]
        for error in errors:
            assert isinstance(error, aioshm.UnsuitableDirectoryError)
            with pytest.raises(aioshm.UnsuitableDirectoryError):
                raise error
        assert report.problems[0].__traceback__ is None

    @pytest.mark.parametrize("size", [1, 1 << 55])
    def test_it_goes_through_json_and_pickle(self, run, size):
        report = ask(run, size, hint="Lower it.")
        assert json.loads(report.to_json()) == json.loads(report.to_json(indent=1)) == report.to_dict()
        facts = report.to_dict()
        assert set(facts) == {field.name for field in dataclasses.fields(report)} | {"fits"}
        assert facts["fits"] is (size == 1)
        assert facts["memory"][-1]["level"] == "host"
        assert facts["memory"][-1]["available"] > 0
        for told, problem in zip(facts["problems"], report.problems, strict=True):
            assert (told["error"], told["message"]) == (type(problem).__name__, str(problem))
            assert told["hint"] == "Lower it."
        again = pickle.loads(pickle.dumps(report))
        assert again.to_dict() == facts

    def test_it_cannot_be_changed(self, run):
        report = ask(run, 1)
        for part in (report, report.directory, report.huge_pages, *report.memory):
            with pytest.raises(dataclasses.FrozenInstanceError):
                part.size = 1

    @pytest.mark.parametrize(
        ("size", "options", "error"),
        [
            (0, {}, ValueError),
            (-1, {}, ValueError),
            (1.5, {}, TypeError),
            (1, {"directory": ""}, ValueError),
            (1, {"directory": 3}, TypeError),
            (1, {"allocation_name": None}, TypeError),
            (1, {"hint": 3}, TypeError),
        ],
    )
    def test_bad_arguments(self, run, size, options, error):
        with pytest.raises(error):
            ask(run, size, **options)


async def until(there: threading.Event) -> None:
    while not there.is_set():  # noqa: ASYNC110 - it is set in another thread
        await asyncio.sleep(0.001)


class TestOffTheLoop:
    @pytest.fixture
    def held(self, monkeypatch):
        """Hold the look in its thread until told to go on; yields what says that it is there, and what lets it go."""
        there, go_on = threading.Event(), threading.Event()
        real = _preflight.read_memory_figures

        def hold(*arguments):
            there.set()
            assert go_on.wait(30)
            return real(*arguments)

        monkeypatch.setattr(_preflight, "read_memory_figures", hold)
        yield there, go_on
        go_on.set()

    def test_the_loop_runs_on_meanwhile(self, run, held):
        there, go_on = held

        async def main():
            task = asyncio.create_task(aioshm.preflight(1))
            await until(there)
            assert not task.done()
            assert {thread.name for thread in threading.enumerate()} >= {"aioshm-preflight-0"}
            go_on.set()
            assert (await task).fits

        run(main())

    def test_cancelled_it_is_through_before_the_cancellation_goes_on(self, run, held):
        there, go_on = held

        async def main():
            task = asyncio.create_task(aioshm.preflight(1))
            await until(there)
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "aioshm-preflight-0" not in {thread.name for thread in threading.enumerate()}

        run(main())
