"""Opening, joining and leaving, as the README tells it."""

from __future__ import annotations

import aioshm

MIB = 1 << 20


def test_open_makes_the_region_and_leaving_removes_it(run, name, path):
    async def main():
        async with aioshm.open_region(name, 4 * MIB) as region:
            assert region.created
            assert not region.closed
            assert region.name == name
            assert region.size == 4 * MIB
            assert region.path == str(path)
            assert path.stat().st_size == 4 * MIB
            assert path.stat().st_blocks * 512 == 4 * MIB
            assert bytes(region.buffer) == bytes(4 * MIB)
        assert region.closed
        assert not path.exists()

    run(main())


def test_joiner_sees_what_the_creator_wrote_and_keeps_the_name_alive(run, name, path):
    async def main():
        async with aioshm.open_region(name, MIB) as first:
            first.buffer[10:15] = b"hello"
            async with aioshm.open_region(name, MIB) as second:
                assert not second.created
                assert bytes(second.buffer[10:15]) == b"hello"
                await first.aclose()
                assert path.exists()
                assert bytes(second.buffer[10:15]) == b"hello"
        assert not path.exists()

    run(main())


def test_ranks_of_several_processes_share_one_region(ranks, name, path):
    first, second = ranks.start_many(2)
    made = first.open(2 * MIB)
    joined = second.open(2 * MIB)
    assert (made["created"], joined["created"]) == (True, False)
    assert made["inode"] == joined["inode"]
    second.ask("write", offset=MIB, text="from the second")
    assert first.ask("read", offset=MIB, length=15)["text"] == "from the second"
    first.ask("close")
    assert path.exists()
    second.ask("close")
    assert not path.exists()
    assert first.end() == second.end() == 0
