"""The offload region of examples/: slots, strides, offsets and overflow as vLLM's workers expect, across processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ranks as ranks_module
from offload_main import EXAMPLE, load_example
from ranks import RankCrew, RankError

import aioshm

torch = pytest.importorskip("torch")
SharedOffloadRegion = load_example().SharedOffloadRegion

CHUNKS, SLOT, ROW = 7, 1000, 4096  # three slots and 1096 bytes of padding
WORKERS = 3


@pytest.fixture
def facts(name) -> dict[str, Any]:
    """The facts that all ranks of the test's engine pass; each adds its rank."""
    return {
        "engine_id": name,
        "num_chunks": CHUNKS,
        "kv_bytes_per_chunk": ROW,
        "cpu_page_size": SLOT,
        "num_workers": WORKERS,
        "scheduler": True,
        "timeout": 100.0,
    }


@pytest.fixture
def region_path(name) -> Path:
    return Path(f"/dev/shm/aioshm-{os.geteuid()}-offload-{name}")


@pytest.fixture
def workers(ranks, monkeypatch) -> RankCrew:
    """Rank processes that run `offload_main`."""
    monkeypatch.setattr(ranks_module, "_MAIN", Path(__file__).with_name("offload_main.py"))
    return ranks


@contextlib.asynccontextmanager
async def entered(facts: dict[str, Any], **options: Any) -> AsyncIterator[tuple[list[Any], Any]]:
    """All ranks as tasks of one loop: the workers, and the scheduler."""
    crew = [SharedOffloadRegion(**facts, **options, rank=rank) for rank in (*range(WORKERS), None)]
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*map(stack.enter_async_context, crew))
        yield crew[:-1], crew[-1]


def offset(region: Any, view: Any) -> int:
    return view.data_ptr() - region.base_tensor.data_ptr()


def test_successive_views_of_a_slot(run, facts):
    async def main():
        async with entered(facts) as (workers, scheduler):
            rows = scheduler.get_memoryview()
            for rank, region in enumerate(workers):
                for first, width in ((0, 600), (600, 150), (750, 250)):
                    view = region.get_view(width)
                    assert (view.shape, view.stride(), view.dtype) == ((CHUNKS, width), (ROW, 1), torch.int8)
                    assert offset(region, view) == rank * SLOT + first
                    view[CHUNKS - 1, width - 1] = -rank - 1
                    assert rows[CHUNKS - 1, rank * SLOT + first + width - 1] == 255 - rank
            assert (scheduler.total_size_bytes, scheduler.num_chunks) == (CHUNKS * ROW, CHUNKS)

    run(main())


def test_an_overflow_leaves_the_cursor_alone(run, facts):
    async def main():
        async with entered(facts) as (workers, _):
            region = workers[1]
            region.get_view(900)
            for width in (101, SLOT, 1 << 40):
                with pytest.raises(ValueError, match="900 of 1000 bytes are dealt out, 100 remain"):
                    region.get_view(width)
            assert offset(region, region.get_view(100)) == SLOT + 900
            with pytest.raises(ValueError, match="0 remain"):
                region.get_view(1)

    run(main())


def test_canonical_views_are_the_same_for_all(run, facts):
    async def main():
        async with entered(facts, slots="canonical") as (workers, scheduler):
            for first, width in ((0, 2500), (2500, ROW - 2500)):
                views = [region.get_view(width) for region in workers]
                assert {offset(region, view) for region, view in zip(workers, views, strict=True)} == {first}
                assert {(*view.shape, *view.stride()) for view in views} == {(CHUNKS, width, ROW, 1)}
                views[0][2] = 5
                assert views[2][2].eq(5).all()
                assert scheduler.get_memoryview()[2, first] == 5
            with pytest.raises(ValueError, match="does not fit"):
                workers[0].get_view(1)

    run(main())


def test_replicated_slots_are_one(run, facts):
    async def main():
        async with entered(facts | {"kv_bytes_per_chunk": SLOT}, slots="replicated") as (workers, scheduler):
            views = [region.get_view(SLOT) for region in workers]
            assert {offset(region, view) for region, view in zip(workers, views, strict=True)} == {0}
            views[1][:] = 3
            assert bytes(scheduler.get_memoryview()) == bytes([3]) * (CHUNKS * SLOT)

    run(main())


def test_the_scheduler_sees_everything_without_a_copy(run, facts):
    async def main():
        async with entered(facts) as (_, scheduler):
            rows, base = scheduler.get_memoryview(), scheduler.base_tensor
            assert (rows.shape, rows.format, rows.readonly, rows.c_contiguous) == ((CHUNKS, ROW), "B", False, True)
            assert (base.shape, base.dtype) == ((CHUNKS * ROW,), torch.int8)
            assert torch.frombuffer(rows, dtype=torch.int8).data_ptr() == base.data_ptr()
            rows[3, 17] = 200
            assert base[3 * ROW + 17] == 200 - 256
            with pytest.raises(RuntimeError, match="the scheduler has no slot"):
                scheduler.get_view(1)

    run(main())


def test_processes_see_what_each_other_writes(run, facts, workers, region_path):
    """Workers without a loop, a scheduler with one; the name is gone from when all are there."""
    crew = workers.start_many(WORKERS)

    async def main():
        for rank, worker in enumerate(crew):
            worker.send("open", facts=facts | {"rank": rank})
        async with SharedOffloadRegion(**facts, rank=None) as scheduler:
            bases = [worker.answer()["base"] for worker in crew]
            assert not region_path.exists()
            rows = scheduler.get_memoryview()
            for rank, worker in enumerate(crew):
                for number, first in enumerate((0, 400)):
                    view = worker.ask("view", width=400)
                    assert view["address"] - bases[rank] == rank * SLOT + first
                    assert (view["shape"], view["strides"]) == ([CHUNKS, 400], [ROW, 1])
                    assert view["dtype"] == "torch.int8"
                    worker.ask("fill", view=number, chunk=4, value=10 * rank + number + 1)
                with pytest.raises(RankError, match="800 of 1000 bytes are dealt out, 200 remain"):
                    worker.ask("view", width=201)
            row = [
                b"".join(bytes([10 * rank + number]) * 400 for number in (1, 2)) + bytes(200) for rank in range(WORKERS)
            ]
            assert bytes(rows)[4 * ROW : 5 * ROW] == b"".join(row) + bytes(ROW - WORKERS * SLOT)
            assert not any(bytes(rows)[: 4 * ROW]) and not any(bytes(rows)[5 * ROW :])  # noqa: PT018 - one fact
            rows[6, 2 * SLOT + 400] = 77
            assert crew[2].ask("read", view=1, chunk=6) == {"values": [0, 77]}
            assert crew[1].ask("read", view=1, chunk=6) == {"values": [0]}
            crew[0].kill()
            assert rows[4, 0] == 1  # what it wrote is everybody's
        for worker in crew[1:]:
            assert worker.ask("cleanup") == {"mapped": []}

    run(main())
    assert not region_path.exists()


def test_threads_open_and_clean_up_without_a_loop(facts):
    facts |= {"scheduler": False}
    crew = [SharedOffloadRegion(**facts, rank=rank) for rank in range(WORKERS)]
    seen: dict[int, bool] = {}
    everybody = threading.Barrier(WORKERS)

    def work(rank: int) -> None:
        region = crew[rank].open()
        region.get_view(SLOT)[:] = rank + 1
        everybody.wait(30)
        with region.get_memoryview() as rows:
            seen[rank] = [rows[0, other * SLOT] for other in range(WORKERS)] == [1, 2, 3]
        region.cleanup()
        region.cleanup()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == dict.fromkeys(range(WORKERS), True)


def test_views_outlive_the_region(facts, caplog):
    region = SharedOffloadRegion(**facts | {"num_workers": 1, "scheduler": False}, rank=0).open()
    view = region.get_view(8)
    region.cleanup()
    view[:] = 9
    assert view.sum() == CHUNKS * 8 * 9
    assert "stay mapped" in caplog.text


def test_what_is_not_open_says_so(run, facts):
    facts |= {"num_workers": 1, "scheduler": False}

    def check(region):
        for use in (region.get_memoryview, lambda: region.get_view(1), lambda: region.base_tensor):
            with pytest.raises(RuntimeError, match="is not open"):
                use()

    async def main():
        region = SharedOffloadRegion(**facts, rank=0)
        check(region)
        region.cleanup()
        async with region:
            with pytest.raises(RuntimeError, match="entered with `async with`"):
                region.cleanup()
            region.get_view(1)
        check(region)

    run(main())
    region = SharedOffloadRegion(**facts, rank=0).open()
    region.cleanup()
    check(region)


def test_a_worker_that_never_comes(facts, region_path):
    with pytest.raises(aioshm.JoinTimeoutError, match="never came") as caught:
        SharedOffloadRegion(**facts | {"timeout": 0.2}, rank=1).open()
    assert caught.value.missing == (0, 2, 3)  # 3 is the scheduler
    assert not region_path.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": None, "scheduler": False}, "scheduler=True"),
        ({"rank": WORKERS}, "rank must be 0 to 2 or None, not 3"),
        ({"rank": -1}, "rank must be"),
        ({"kv_bytes_per_chunk": 3 * SLOT - 1}, "slots take 3000 bytes of each row, and kv_bytes_per_chunk is 2999"),
        ({"num_chunks": 0}, "num_blocks"),
        ({"cpu_page_size": 0}, "bytes_per_block"),
        ({"slots": "shared"}, "not 'shared'"),
        ({"engine_id": "a/b"}, "name must be"),
    ],
)
def test_facts_that_make_no_sense(facts, change, says):
    SharedOffloadRegion(**facts | {"rank": 0, "kv_bytes_per_chunk": 3 * SLOT})
    with pytest.raises(ValueError, match=says):
        SharedOffloadRegion(**facts | {"rank": 0} | change)


def test_the_program(name, region_path):
    command = [
        sys.executable,
        "-W",
        "error",
        str(EXAMPLE),
        "--workers=2",
        "--chunks=40",
        "--layers=3",
        f"--name={name}",
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=110, env=os.environ | {"PYTHONWARNINGS": "error"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{40 * 20480} bytes, 40 chunks: 240 of 240 pages right\n" in done.stdout
    assert "workers ended with [0, 0]\nleft behind: nothing\n" in done.stdout
    assert not region_path.exists()
