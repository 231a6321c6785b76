"""What the tests of the emulated machine share. Elsewhere they are skipped: they fill its pools, and swap."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _on_the_machine() -> None:
    if "AIOSHM_TEST_MACHINE" not in os.environ:  # set by `init`
        pytest.skip("for the emulated machine: nox -s vm")


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount hugetlbfs: `hugetlbfs("pagesize=2M")`."""
    mounted: list[Path] = []

    def mount(options: str = "pagesize=2M") -> Path:
        where = tmp_path / f"huge-{len(mounted)}"
        where.mkdir()
        subprocess.run(["mount", "-t", "hugetlbfs", "-o", options, "aioshm-test", str(where)], check=True)
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        left = list(where.iterdir())
        subprocess.run(["umount", str(where)], check=True)
        assert not left


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[int]:
    """Give the machine 64 MiB of swap, and say how much that is in bytes."""
    file, size = tmp_path / "swap", 64 * MIB
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, size)
    file.chmod(0o600)
    for command in ("mkswap", "swapon"):
        subprocess.run([command, str(file)], check=True, stdout=subprocess.DEVNULL)
    yield size - 4096  # less the page that says it is swap
    subprocess.run(["swapoff", str(file)], check=True)
    file.unlink()
