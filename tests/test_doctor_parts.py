"""The parts of `aioshm doctor` that decide, on made findings: bars, rows, remedies, the size of a sample."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioshm
from aioshm._host import Node
from aioshm._leftovers import Found
from aioshm.cli._diagnosis import diagnose, find_remedy, tell_time
from aioshm.cli._examination import Examination
from aioshm.cli._sheet import Bar, make_rows
from aioshm.cli._trial import HugePageTrial, Sample, choose_sample_size

MIB, GIB = 1 << 20, 1 << 30
HUGE = 2 * MIB

REPORT = aioshm.PreflightReport(
    size=8 * GIB,
    allocated=8 * GIB,
    memory_required=8 * GIB + 24 * MIB,
    largest=12 * GIB + 5,
    directory=aioshm.DirectoryReport(
        path="/dev/shm", kind="tmpfs", mount_point="/dev/shm", page=4096, total=16 * GIB, free=13 * GIB
    ),
    memory=(
        aioshm.MemoryLevelReport(level="/pod", limit=None, usage=GIB, reclaimable=0, verdict="fits"),
        aioshm.MemoryLevelReport(level="host", limit=32 * GIB, usage=4 * GIB, reclaimable=GIB, verdict="fits"),
    ),
    huge_pages=aioshm.HugePagesReport(
        page=HUGE, mount_option="never", shmem_enabled="never", pool_free=None, pool_reserved=None, pool_surplus=None
    ),
    warning=None,
    problems=(),
)
FOUND = Examination(
    size=8 * GIB,
    report=REPORT,
    leftovers=(),
    swap_free=0,
    nodes=(Node(0, 16 * GIB, 3 * GIB), Node(1, 16 * GIB, 9 * GIB)),
    cpus=8,
    quota=None,
    threads=8,
    memlock=8 * MIB,
    huge_pages=HugePageTrial("collapse", None, 0),
    sample=Sample(512 * MIB, 0.05, 8, 512 * MIB),
    untried=None,
)
SHORT = aioshm.InsufficientSpaceError(
    allocation_name="the region", directory="/dev/shm", required=8 * GIB, available=GIB
)


def change(found: Examination = FOUND, *, report: dict[str, Any] | None = None, **changed: Any) -> Examination:
    return dataclasses.replace(found, report=dataclasses.replace(found.report, **(report or {})), **changed)


def texts(found: Examination) -> list[tuple[bool | None, str]]:
    return [(finding.held, finding.text) for finding in diagnose(found)]


def rows(found: Examination, label: str) -> list[tuple[str, str]]:
    return [(row.mark, f"{row.text} {row.amount}".rstrip()) for row in make_rows(found) if row.label == label]


class TestBar:
    sizes = st.integers(0, 1 << 50)

    @given(sizes, sizes, sizes, sizes)
    def test_it_is_always_as_wide(self, limit, used, reclaimable, required):
        cells = Bar(limit, used, min(used, reclaimable), required).cells(20)
        assert sum(cells.values()) == 20
        assert min(cells.values()) >= 0

    @pytest.mark.parametrize(
        ("bar", "cells"),
        [
            (Bar(100, 0, 0, 0), [0, 0, 0, 20]),
            (Bar(100, 50, 20, 0), [6, 4, 0, 10]),
            (Bar(100, 50, 20, 25), [6, 4, 5, 5]),
            (Bar(100, 50, 20, 60), [6, 2, 12, 0]),  # a part of what can be reclaimed makes room
            (Bar(100, 50, 20, 500), [6, 0, 14, 0]),
            (Bar(100, 150, 0, 10), [20, 0, 0, 0]),
            (Bar(0, 5, 0, 5), [20, 0, 0, 0]),
        ],
    )
    def test_what_it_shows(self, bar, cells):
        assert list(bar.cells(20).values()) == cells


class TestVerdict:
    def test_it_fits(self):
        assert texts(FOUND) == [(True, "8 GiB fit.")]

    def test_it_fits_after_reclaim(self):
        ((held, text),) = texts(change(report={"warning": "..."}))
        assert held
        assert text.startswith("8 GiB fit once the kernel has dropped caches or swapped")

    def test_nobody_asked_about_a_size(self):
        assert texts(change(size=None)) == [
            (True, "A region can stand in /dev/shm."),
            (None, "The largest region that fits right now: 12288 MiB."),
        ]

    def test_it_does_not_fit(self):
        found = change(report={"problems": (SHORT,)})
        assert texts(found) == [(False, str(SHORT)), (None, "The largest region that fits right now: 12288 MiB.")]

    def test_the_largest_is_not_rounded_up(self):
        found = change(report={"largest": 5 * MIB - 4096, "problems": (SHORT,)})
        assert texts(found)[-1] == (None, "The largest region that fits right now: 4 MiB.")
        found = change(report={"largest": 0, "problems": (SHORT,)})
        assert texts(found) == [(False, str(SHORT))]

    def test_leftovers_are_told_once(self):
        left = Found(path="", name="kv", user=0, device=0, inode=0, size=GIB, resident=GIB, state="leftover")
        found = change(leftovers=(left,))
        assert texts(found)[1:] == [(None, "1 region of dead processes (kv) takes 1 GiB: aioshm gc frees it.")]
        found = change(leftovers=(left,) * 4, report={"directory": dataclasses.replace(REPORT.directory, path="/a b")})
        assert texts(found)[1:] == [
            (None, "4 regions of dead processes (kv, kv, kv, ...) take 4 GiB: aioshm gc --directory '/a b' frees them.")
        ]
        told = aioshm.InsufficientSpaceError(**{**vars(SHORT), "reclaimable_leftovers": GIB})
        found = change(leftovers=(left,), report={"problems": (told,), "largest": 0})
        assert texts(found) == [(False, str(told))]


class TestHugePages:
    @pytest.mark.parametrize(
        ("code", "setting", "words"),
        [
            (errno.EINVAL, "deny", "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
            (errno.EINVAL, "never", "Linux 6.1 or newer, or mount -o remount,huge=within_size /dev/shm"),
            (errno.ENOMEM, "never", "echo 1 > /proc/sys/vm/compact_memory"),
            (errno.EAGAIN, None, "echo 1 > /proc/sys/vm/compact_memory"),
        ],
    )
    def test_what_to_set_where_there_are_none(self, code, setting, words):
        facts = dataclasses.replace(REPORT.huge_pages, shmem_enabled=setting)
        found = change(huge_pages=HugePageTrial(None, "no reason", code), report={"huge_pages": facts})
        assert words in (find_remedy(found) or "")
        ((mark, text),) = rows(found, "huge pages")
        assert mark == "tight"
        assert text.startswith("none: no reason")

    @pytest.mark.parametrize(
        ("way", "words"),
        [("collapse", "2 MiB pages work, made by MADV_COLLAPSE"), ("mount", "2 MiB pages work, given by the mount")],
    )
    def test_how_they_were_obtained(self, way, words):
        ((mark, text),) = rows(change(huge_pages=HugePageTrial(way, None, 0)), "huge pages")
        assert mark == "ok"
        assert text.startswith(words)
        assert find_remedy(change(huge_pages=HugePageTrial(way, None, 0))) is None

    def test_only_a_part_of_them(self):
        found = change(sample=Sample(512 * MIB, 0.05, 8, 128 * MIB))
        assert (find_remedy(found) or "").startswith("Huge pages for 25% of the sample only")

    def test_a_pool(self):
        facts = dataclasses.replace(
            REPORT.huge_pages, mount_option=None, pool_free=10 * HUGE, pool_reserved=HUGE, pool_surplus=0
        )
        where = dataclasses.replace(REPORT.directory, kind="hugetlbfs", total=None, free=9 * HUGE)
        found = change(huge_pages=HugePageTrial("hugetlbfs", None, 0), report={"huge_pages": facts, "directory": where})
        assert rows(found, "huge pages") == [
            ("ok", "2 MiB pages work; pool: 20 MiB free, 2 MiB reserved, 0 B surplus"),
        ]
        assert rows(found, "directory") == [("ok", "/dev/shm: hugetlbfs, 18 MiB in the pool")]
        assert find_remedy(found) is None
        assert "hugepages-2048kB/nr_hugepages" in (find_remedy(change(found, report={"problems": (SHORT,)})) or "")
        group = aioshm.InsufficientMemoryError(
            allocation_name="the region",
            level="/pod",
            required=8 * GIB,
            limit=GIB,
            usage=0,
            reclaimable=0,
            huge_page=HUGE,
        )
        limited = change(found, report={"problems": (group,)})
        assert rows(limited, "directory") == [("bad", "/dev/shm: hugetlbfs, 18 MiB in the pool")]
        assert find_remedy(limited) is None, "the pool is not what is short"

    def test_untried(self):
        found = change(huge_pages=None, sample=None, untried="there is too little room to try it")
        assert rows(found, "huge pages")[0][1].startswith("not tried: there is too little room")
        assert rows(found, "speed") == [("fact", "not measured: there is too little room to try it")]
        assert find_remedy(found) is None


class TestRows:
    def test_levels(self):
        assert rows(FOUND, "memory") == [
            ("ok", "/pod: no limit, 1 GiB in use"),
            ("ok", "host 29 GiB of 32 GiB free, 1 GiB by reclaim"),
        ]
        marks = {"fits": "ok", "reclaim": "tight", "short": "bad"}
        for verdict, mark in marks.items():
            level = dataclasses.replace(REPORT.memory[1], verdict=verdict)
            assert rows(change(report={"memory": (level,)}), "memory")[0][0] == mark

    def test_the_directory(self):
        assert rows(FOUND, "directory") == [("ok", "/dev/shm: tmpfs, huge=never 13 GiB of 16 GiB free")]
        assert rows(change(report={"problems": (SHORT,)}), "directory")[0][0] == "bad"
        where = dataclasses.replace(REPORT.directory, total=None, free=None, mount_point="/dev")
        assert rows(change(report={"directory": where}), "directory") == [
            ("ok", "/dev/shm: tmpfs, huge=never, mounted at /dev, no limit of its own")
        ]

    def test_the_rest(self):
        assert rows(FOUND, "swap") == [("fact", "none")]
        assert rows(change(swap_free=GIB), "swap") == [("fact", "1 GiB free")]
        assert rows(change(swap_free=None), "swap") == []
        assert rows(FOUND, "NUMA") == [("fact", "2 nodes (0: 3 GiB of 16 GiB free, 1: 9 GiB of 16 GiB free)")]
        assert rows(change(nodes=()), "NUMA") == []
        assert rows(FOUND, "processors") == [("fact", "8 in the affinity mask, no CPU quota: populates with 8 threads")]
        assert rows(change(quota=1.5, threads=1), "processors") == [
            ("fact", "8 in the affinity mask, a CPU quota of 1.5: populates with 1 thread")
        ]
        assert rows(FOUND, "memlock")[0][1].startswith("8 MiB")
        assert rows(change(memlock=None), "memlock")[0][1].startswith("unlimited")

    @pytest.mark.parametrize(
        ("size", "time"),
        [(GIB, "100 ms"), (64 * GIB, "6.4 s"), (512 * GIB, "51 s"), (16 << 40, "27 min")],
    )
    def test_the_time_that_it_takes(self, size, time):
        assert tell_time(change(size=size)) == (
            f"10 GiB/s with 8 threads, measured on 512 MiB: {dict_size(size)} would take about {time}"
        )
        assert tell_time(change(size=None)) == "10 GiB/s with 8 threads, measured on 512 MiB"


def dict_size(size: int) -> str:
    return {GIB: "1 GiB", 64 * GIB: "64 GiB", 512 * GIB: "512 GiB", 16 << 40: "16 TiB"}[size]


@pytest.mark.parametrize(
    ("threads", "page", "room", "size"),
    [
        (1, 4096, None, 64 * MIB),
        (4, 4096, 64 * GIB, 256 * MIB),
        (64, 4096, 64 * GIB, GIB),
        (4, 4096, 256 * MIB, 64 * MIB),
        (4, 4096, 15 * MIB, 2 * MIB),
        (4, 4096, 7 * MIB, 0),
        (1, GIB, 8 * GIB, GIB),
        (1, GIB, 3 * GIB, 0),
    ],
)
def test_a_sample_takes_a_quarter_of_the_room_at_the_most(threads, page, room, size):
    assert choose_sample_size(threads, page, room) == size
