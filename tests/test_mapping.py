"""The mapping: aligned, kept out of core files, gone at once where nothing shows it, and never gone under a view."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from cancelling import NOTHING, held

import aioshm
from aioshm import _libc
from aioshm._mapping import Mapping, round_up, unmap

MIB = 1 << 20
HUGE = 2 * MIB


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path.unlink()
    os.ftruncate(fd, 8 * MIB)
    yield fd
    os.close(fd)


def mapped(mapping_path: Path) -> list[range]:
    """Return the addresses at which the file is mapped now."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(mapping_path) in line:
            start, end = line.split(" ")[0].split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


def flags_of(address: int) -> list[str]:
    """Return the VmFlags of the mapping that begins at `address`: proc(5), smaps."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]
    raise LookupError(hex(address))


@pytest.mark.parametrize("size", [1, 4096, HUGE - 1, HUGE, 3 * HUGE + 17])
def test_it_is_aligned_and_exactly_as_long_as_its_pages(fd, path, size):
    taken = []
    for _ in range(4):  # the kernel's own choice may be aligned by chance
        mapping = Mapping(fd, size=size, page=4096)
        assert mapping.address % HUGE == 0
        assert mapping.length == round_up(size, 4096)
        assert len(mapping.anchor()) == size
        taken.append(mapping)
    # Neighbours may be shown as one: what counts is that no byte of the reservations is left.
    assert sum(map(len, mapped(path))) == 4 * round_up(size, 4096)
    for mapping in taken:
        unmap(mapping.release())
    assert not mapped(path)


def test_a_page_of_the_file_system_that_is_larger_is_the_alignment(fd, path):
    mapping = Mapping(fd, size=MIB, page=4 * MIB)
    assert mapping.address % (4 * MIB) == 0
    assert mapping.length == 4 * MIB
    unmap(mapping.release())


def test_reservations_leave_no_address_space_behind(fd):
    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _libc.PAGE

    before = address_space()
    for size in range(1, 50):  # odd sizes: newer kernels align whole huge pages by themselves
        unmap(Mapping(fd, size=HUGE + size * 4096, page=4096).release())
    assert address_space() - before < HUGE


def test_a_mapping_that_cannot_be_made_leaves_nothing(path):
    before = Path("/proc/self/statm").read_text().split()[0]
    reading = os.open("/proc/self/stat", os.O_RDONLY)
    with pytest.raises(OSError, match="mmap") as caught:
        Mapping(reading, size=64 * MIB, page=4096)
    os.close(reading)
    assert caught.value.errno in (errno.ENODEV, errno.EACCES)
    after = Path("/proc/self/statm").read_text().split()[0]
    assert (int(after) - int(before)) * _libc.PAGE < 64 * MIB


def test_it_stays_out_of_core_files(fd):
    mapping = Mapping(fd, size=MIB, page=4096)
    assert "dd" in flags_of(mapping.address)
    unmap(mapping.release())


def test_without_views_release_hands_over_the_addresses(fd, path):
    mapping = Mapping(fd, size=MIB, page=4096)
    address = mapping.address
    assert mapping.release() == range(address, address + MIB)
    assert not mapping.still_mapped
    assert mapping.release() == range(0), "a second release must not hand over what may be another's by now"
    with pytest.raises(ValueError, match="released"):
        _ = mapping.address
    unmap(range(address, address + MIB))
    assert not mapped(path)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("page", "rate", "pieces"),
    [
        pytest.param(4096, 11 * GIB, [32 * MIB] * 32 + [5 * 4096], id="small pages"),
        pytest.param(4096, 500 * GIB, [size * MIB for size in (32, 64, 128, 256, 512)], id="huge pages"),
        pytest.param(GIB, 4000 * GIB, [GIB, GIB], id="a hugetlbfs of 1 GiB"),
    ],
)
def test_unmapped_in_pieces_that_take_a_few_milliseconds(monkeypatch, page, rate, pieces):
    """munmap(2) keeps the mmap lock to its end, and a loop that allocates waits for it."""
    clock, unmapped = [0.0], []

    def munmap(address: int, length: int) -> None:
        unmapped.append(range(address, address + length))
        clock[0] += length / rate

    monkeypatch.setattr(_libc, "munmap", munmap)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    unmap(range(64 * GIB, 64 * GIB + sum(pieces)), page)
    assert [len(piece) for piece in unmapped] == pieces
    assert unmapped[0].start == 64 * GIB
    assert all(one.stop == next_.start for one, next_ in itertools.pairwise(unmapped))


def test_pieces_get_smaller_again_where_small_pages_come(monkeypatch):
    clock, lengths = [0.0], []

    def munmap(address: int, length: int) -> None:
        lengths.append(length // MIB)
        clock[0] += length / (500 * GIB if address < 4 * GIB else 11 * GIB)

    monkeypatch.setattr(_libc, "munmap", munmap)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    unmap(range(3 * GIB, 8 * GIB))
    assert lengths[-1] == 32
    assert sum(lengths) == 5 * 1024


def test_views_that_are_gone_are_no_views(fd, path):
    mapping = Mapping(fd, size=MIB, page=4096)
    view = memoryview(mapping.anchor())
    del view
    addresses = mapping.release()
    assert len(addresses) == MIB
    assert not mapping.still_mapped
    unmap(addresses)
    assert not mapped(path)


def test_a_view_keeps_the_memory_and_the_last_one_unmaps_it(fd, path):
    mapping = Mapping(fd, size=MIB, page=4096)
    view = memoryview(mapping.anchor()).cast("B")
    part = view[100:200]
    view[150] = 42
    assert mapping.release() == range(0)
    assert mapping.still_mapped
    del view
    assert mapping.still_mapped
    assert part[50] == 42
    assert os.pread(fd, 1, 150) == b"\x2a"
    part.release()
    assert not mapping.still_mapped
    assert not mapped(path)


def test_the_anchor_dies_by_reference_count_alone(fd):
    """A cycle would leave GiB to the garbage collector, whenever it comes."""
    gc.disable()
    try:
        mapping = Mapping(fd, size=MIB, page=4096)
        watch = weakref.ref(mapping.anchor())
        unmap(mapping.release())
        assert watch() is None
        mapping = Mapping(fd, size=MIB, page=4096)
        view = memoryview(mapping.anchor())
        mapping.release()
        del view
        assert not mapping.still_mapped
    finally:
        gc.enable()


def test_a_dropped_mapping_with_a_view_is_unmapped_once(fd, path, monkeypatch):
    """The finalizer of the first life is off: by then the addresses may show another file."""
    calls = []
    munmap = _libc.munmap
    monkeypatch.setattr(_libc, "munmap", lambda address, length: calls.append(address) or munmap(address, length))
    mapping = Mapping(fd, size=MIB, page=4096, alignment=4096)
    calls.clear()
    address = mapping.address
    view = memoryview(mapping.anchor())
    mapping.release()
    del mapping, view
    gc.collect()
    assert calls == [address]


_READS_AT_EXIT = """
import asyncio, atexit, sys
import aioshm

views = []
atexit.register(lambda: print(views[0][4095], flush=True))  # first in, last out: after all finalizers

async def main():
    async with aioshm.open_region(sys.argv[1], 4096) as region:
        views.append(region.buffer)
        views[0][4095] = 42

asyncio.run(main())
"""


def test_views_are_readable_to_the_very_end_of_the_interpreter(name):
    done = subprocess.run(
        [sys.executable, "-c", _READS_AT_EXIT, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_a_failed_open_gives_the_memory_back_although_its_error_is_held(run, name, path, monkeypatch):
    """The traceback of an error holds every frame, and in them whatever refers to the memory."""
    madvise = _libc.try_madvise
    advised = []

    def breaks(address, length, advice):
        advised.append(address)
        return errno.EIO if len(advised) > 3 else madvise(address, length, advice)

    monkeypatch.setattr(_libc, "try_madvise", breaks)

    async def main():
        try:
            async with aioshm.open_region(name, 16 * MIB, threads=1):
                pytest.fail("was opened")
        except OSError as error:
            return error

    gc.disable()
    try:
        error = run(main())
        assert error.errno == errno.EIO
        assert error.__traceback__ is not None
        assert held(path) == NOTHING
    finally:
        gc.enable()
