"""Where memory is getting short, what is being populated is not mapped: no OOM killer takes us for the largest."""

from __future__ import annotations

import pytest
from cgroups import start_in
from memory_maps import collapse_works, mapped, mapped_by

import aioshm
from aioshm._populate import Populate

MIB = 1 << 20
SIZE = 128 * MIB

pytestmark = pytest.mark.root


@pytest.fixture
def stopped(memory_group, ranks, name, path):
    """A rank that has populated it all, and stands there, in a group with so much memory."""

    def start(limit, **options):
        rank = start_in(ranks, memory_group(limit=limit))
        rank.ask("stop_at", point="populated")
        rank.send("open", name=name, size=SIZE, options={"threads": 1, **options})
        rank.wait_stopped()
        assert path.stat().st_blocks * 512 == SIZE
        return rank

    return start


@pytest.mark.parametrize("huge_pages", ["require", "off"])
@pytest.mark.parametrize(("limit", "is_mapped"), [(192 * MIB, False), (2048 * MIB, True)], ids=["crowded", "roomy"])
def test_it_is_not_where_memory_is_getting_short(stopped, name, limit, is_mapped, huge_pages):
    if huge_pages == "require" and not collapse_works():
        pytest.skip("this kernel gives no huge pages")
    rank = stopped(limit, huge_pages=huge_pages)
    before = mapped_by(rank.pid, name, "Rss")
    assert before == SIZE if is_mapped else before <= 32 * MIB
    rank.resume()
    assert rank.answer()["report"]["populated"] == SIZE
    assert mapped_by(rank.pid, name, "Rss") == SIZE
    rank.ask("close")


def test_without_a_guard_they_are(stopped, name):
    rank = stopped(limit=192 * MIB, memory_policy="ignore", huge_pages="off")
    assert mapped_by(rank.pid, name, "Rss") == SIZE
    rank.resume()
    rank.answer()
    rank.ask("close")


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("huge_pages", ["try", "off"])
def test_when_all_of_it_is_there_it_is_mapped(run, name, monkeypatch, threads, huge_pages):
    """Also what one thread populates while another has found nothing left to do."""
    monkeypatch.setattr("aioshm._guard._LITTLE", 1 << 60)
    monkeypatch.setattr("aioshm._guard.Guard.crowded", property(lambda _: True, lambda *_: None), raising=False)

    async def main():
        async with aioshm.open_region(name, SIZE + 4096, threads=threads, huge_pages=huge_pages) as region:
            assert mapped(region, "Rss") == SIZE + 4096
            assert region.report.populated == SIZE + 4096

    run(main())


def test_what_it_held_before_is_still_there(run, name, monkeypatch):
    """A part that is populated a second time, which others may write to meanwhile."""
    monkeypatch.setattr("aioshm._guard.Guard.crowded", property(lambda _: True, lambda *_: None), raising=False)
    unmapped = []
    unmap = Populate._unmap
    monkeypatch.setattr(Populate, "_unmap", lambda *args: unmapped.append(unmap(*args)))

    async def main():
        async with aioshm.open_region(name, 8 * MIB, populate=False) as region:
            region.buffer[:] = bytes(range(256)) * (8 * MIB // 256)
            await region.populate()
            assert region.buffer == bytes(range(256)) * (8 * MIB // 256)

    run(main())
    assert unmapped
