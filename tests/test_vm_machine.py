"""The runner of the emulated machine: what it finds, what it boots with, and what it makes of how the machine ended."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from vm import machine

MIB = 1 << 20


def leave(disk: Path, **files: bytes) -> None:
    """Be the machine, and leave files on its second disk."""
    machine.make_empty(disk, MIB)
    with disk.open("r+b") as device, tarfile.open(fileobj=device, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name.replace('_', '.')}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def test_the_status_and_the_junit_file_come_back(tmp_path):
    leave(tmp_path / "disk", status=b"1\n", junit_xml=b"<testsuites/>")
    assert machine.take_results(tmp_path / "disk", tmp_path / "made/junit.xml") == 1
    assert (tmp_path / "made/junit.xml").read_bytes() == b"<testsuites/>"


def test_a_machine_that_left_nothing_is_no_success(tmp_path):
    disk = tmp_path / "disk"
    machine.make_empty(disk, MIB)
    assert machine.take_results(disk, None) is None
    leave(disk, junit_xml=b"<testsuites/>")
    assert machine.take_results(disk, None) is None
    leave(disk, status=b"0\n", junit_xml=b"." * 4096)
    os.truncate(disk, 2048)
    assert machine.take_results(disk, None) is None


def test_what_the_machine_prints_is_passed_on_until_it_goes_off(capfdbinary):
    assert machine.boot([sys.executable, "-c", "print('one', flush=True); print('two')"], 30)
    assert capfdbinary.readouterr().out == b"one\ntwo\n"


def test_a_machine_that_goes_on_for_ever_is_switched_off(capfdbinary):
    started = time.monotonic()
    assert not machine.boot([sys.executable, "-c", "import time; print('on', flush=True); time.sleep(600)"], 2)
    assert time.monotonic() - started < 60
    assert capfdbinary.readouterr().out in (b"on\n", b"")


@pytest.mark.parametrize(("available", "node", "gigantic"), [(32768, 2560, True), (5000, 1536, False)])
def test_the_machine_is_as_large_as_the_host_allows(monkeypatch, tmp_path, available, node, gigantic):
    monkeypatch.setattr(machine, "memory_available", lambda: available * MIB)
    command = machine.machine_command("qemu", tmp_path / "vmlinuz", tmp_path / "disk", tmp_path / "results")
    assert command[command.index("-m") + 1] == f"{2 * node}M"
    assert sum(f"size={node}M" in argument for argument in command) == 2
    assert ("hugepagesz=1G hugepages=1" in command[command.index("-append") + 1]) == gigantic


@pytest.mark.parametrize(
    ("lacks", "package"),
    [("qemu-system-x86_64", "qemu-system-x86"), ("mke2fs", "e2fsprogs"), ("busybox", "busybox-static")],
)
def test_a_missing_program_is_named_by_its_package(monkeypatch, lacks, package):
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool == lacks else f"/usr/bin/{tool}")
    with pytest.raises(machine.UnavailableError, match=f"^install {package}$"):
        machine.find_tools()


def test_a_host_with_too_little_memory_is_told_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool, path: f"/usr/bin/{tool}")
    monkeypatch.setattr(machine, "memory_available", lambda: 2048 * MIB)
    with pytest.raises(machine.UnavailableError, match="3072 MiB of memory, and there are 2048"):
        machine.find_tools()


def test_the_newest_kernel_of_the_cache_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "aioshm-machine").mkdir()
    for version in ("6.1.0-9", "6.1.0-57", "5.10.0-99"):
        (tmp_path / f"aioshm-machine/vmlinuz-{version}-cloud-amd64").touch()
    assert machine.find_kernel().name == "vmlinuz-6.1.0-57-cloud-amd64"


def test_without_a_kernel_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt
    with pytest.raises(machine.UnavailableError, match=r"^apt has no kernel for it: .*apt-cache"):
        machine.find_kernel()
    (tmp_path / "apt-cache").write_text("#!/bin/sh\necho 'E: No packages found' >&2; exit 100\n")
    (tmp_path / "apt-cache").chmod(0o755)
    with pytest.raises(machine.UnavailableError, match=r"^apt has no kernel for it: E: No packages found$"):
        machine.find_kernel()


def test_the_tests_that_are_for_it_are_skipped_elsewhere():
    if "AIOSHM_TEST_MACHINE" in os.environ:
        pytest.skip("this is the machine")
    reasons = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(machine.HERE / "test_numa.py")],
        capture_output=True,
        text=True,
        check=True,
        cwd=machine.TESTS,
    ).stdout
    assert "for the emulated machine: nox -s vm" in reasons
    assert re.search(r"\d+ skipped in", reasons)
