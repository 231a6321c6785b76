"""The emulated machine: boots Debian's kernel under qemu and runs this Python and the tests in it.

It has what the host may lack: cgroup v2 with the memory controller, two NUMA nodes, hugetlbfs with pages in its pools,
a disk for file cache and swap. Nothing of it needs root. The first disk holds the interpreter at its own path, the
environment and the tests; the kernel mounts it by itself, as NVMe and ext4 are built into it, so there is no initrd.
The second one takes what the machine leaves behind, as a tar archive.

    python machine.py [--probe] [--junit FILE] [--limit SECONDS] [ARGUMENT OF PYTEST ...]

The exit status is pytest's, or 70 where the machine did not get to its end. With --probe nothing is run: it prints why
the machine cannot be had here, and nothing where it can.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
LOST = 70  # EX_SOFTWARE of sysexits.h; pytest has none above 5

MIB = 1 << 20
NODE = 1536 * MIB
LARGE_NODE = 2560 * MIB  # with room for a page of 1 GiB beside what the tests take

# Nobody asks for these in the machine: what development needs, and packages of other environments.
_LEFT_OUT = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*", "pip", "setuptools"),
    *("*.a", "*.pyi", "site-packages", "dist-packages", ".hypothesis", ".pytest_cache"),
)


class UnavailableError(Exception):
    """The machine cannot be had here."""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, usage="see the top of this file")
    parser.add_argument("--probe", action="store_true", help="only say why the machine cannot be had, if it cannot")
    parser.add_argument("--junit", type=Path, help="where the machine's JUnit file goes")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which the machine is switched off")
    options, arguments = parser.parse_known_args()
    try:
        tools, kernel = find_tools(), find_kernel()
    except UnavailableError as error:
        print(f"no emulated machine: {error}")
        return 0 if options.probe else LOST
    if options.probe:
        return 0
    with tempfile.TemporaryDirectory(prefix="aioshm-machine-") as scratch:
        disk, results = Path(scratch, "disk"), Path(scratch, "results")
        started = time.monotonic()
        make_disk(disk, pytest_command(arguments), tools)
        make_empty(results, 16 * MIB)
        print(f"machine: disk made in {time.monotonic() - started:.1f} s", flush=True)
        ended = boot(machine_command(tools["qemu-system-x86_64"], kernel, disk, results), options.limit)
        print(f"machine: {time.monotonic() - started:.1f} s")
        status = take_results(results, options.junit)
    if status is None:
        print(f"machine: {'went off before its end' if ended else f'switched off after {options.limit:.0f} s'}")
        return LOST
    return status


def find_tools() -> dict[str, str]:
    """Return where the programs are that this takes.

    Raises:
        UnavailableError: One is missing, or this host is too small, or no x86_64.
    """
    if platform.machine() != "x86_64":
        raise UnavailableError(f"it runs this host's programs, and emulates x86_64, not {platform.machine()}")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    packages = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs", "busybox": "busybox-static"}
    found = {tool: shutil.which(tool, path=path) for tool in packages}
    missing = [packages[tool] for tool, where in found.items() if where is None]
    if missing:
        raise UnavailableError(f"install {' '.join(missing)}")
    if memory_available() < 2 * NODE + 1024 * MIB:
        raise UnavailableError(f"it takes {2 * NODE // MIB} MiB of memory, and there are {memory_available() // MIB}")
    return {tool: where for tool, where in found.items() if where is not None}


def find_kernel() -> Path:
    """Return the newest of Debian's cloud kernels in the cache, fetched by apt where there is none.

    Raises:
        UnavailableError: There is none, and apt has none either.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioshm-machine"
    if not list(cache.glob("vmlinuz-*")):
        cache.mkdir(parents=True, exist_ok=True)
        try:
            _fetch_kernel(cache)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise UnavailableError(f"apt has no kernel for it: {said.strip()}") from error
    kernels = list(cache.glob("vmlinuz-*"))
    if not kernels:
        raise UnavailableError("apt has no kernel for it: linux-image-cloud-amd64 depends on none")
    return max(kernels, key=lambda kernel: [int(number) for number in re.findall(r"\d+", kernel.name)])


def _fetch_kernel(cache: Path) -> None:
    say = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    described = say(["apt-cache", "depends", "linux-image-cloud-amd64"]).stdout
    for package in re.findall(r"Depends: (linux-image-\S+)", described)[:1]:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            say(["apt-get", "download", "-qq", package], cwd=scratch)
            (archive,) = Path(scratch).glob("*.deb")
            say(["dpkg-deb", "-x", archive, scratch])
            for kernel in Path(scratch).glob("boot/vmlinuz-*"):
                kernel.rename(cache / kernel.name)  # last, and in one step: a cache is whole or is not there


def pytest_command(arguments: Iterable[str]) -> str:
    """Return the shell command that runs the tests in the machine."""
    pytest = [sys.executable, "-m", "pytest", f"--rootdir={TESTS.parent}", "--junitxml=/results/junit.xml"]
    pytest += ["--timeout=300", f"--color={'yes' if sys.stdout.isatty() else 'no'}"]
    # Loaded whether they are used or not, which takes 10 s here.
    pytest += [f"-pno:{plugin}" for plugin in ("hypothesispytest", "anyio", "cacheprovider")]
    return f"cd {shlex.quote(str(TESTS))} && {shlex.join([*pytest, *arguments])}\n"


def make_disk(disk: Path, command: str, tools: dict[str, str]) -> None:
    """Make the first disk: this interpreter, its environment and the tests at their own paths, `init`, `command`."""
    with tempfile.TemporaryDirectory(dir=disk.parent) as scratch:
        root = Path(scratch)
        for folder in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "var/tmp"):
            (root / folder).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        shutil.copy2(tools["busybox"], root / "bin/busybox")
        (root / "bin/sh").symlink_to("busybox")
        shutil.copy2(HERE / "init", root / "init")
        (root / "init").chmod(0o755)
        (root / "command").write_text(command, encoding="utf-8")
        (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
        for source in (*python_parts(), TESTS, TESTS.parent / "pyproject.toml"):
            copy(source, root)
        for library in shared_libraries([Path(sys.executable), Path(tools["busybox"]), *root.rglob("*.so*")]):
            copy(library, root)
        # No journal, and no time spent on tables that nobody will fill: the disk is thrown away.
        make_empty(disk, 3072 * MIB)
        subprocess.run(
            [tools["mke2fs"], "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", root, disk], check=True
        )


def make_empty(disk: Path, size: int) -> None:
    with disk.open("wb") as file:
        file.truncate(size)


def python_parts() -> Iterator[Path]:
    """Yield the files and folders that make up this interpreter and its environment."""
    yield Path(sysconfig.get_path("stdlib"))
    yield Path(sysconfig.get_path("purelib"))
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        yield from Path(prefix, "bin").glob("python*")
        yield from Path(prefix, "lib").glob("libpython*.so*")
        yield from Path(prefix).glob("pyvenv.cfg")


def copy(source: Path, root: Path) -> None:
    """Copy a file or folder to its own path under `root`: times as they are, for compiled files go by them."""
    target = root / str(source.absolute()).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=_LEFT_OUT, dirs_exist_ok=True)
    elif not target.exists():
        shutil.copy2(source, target, follow_symlinks=not is_link_of_folder(source))


def is_link_of_folder(source: Path) -> bool:
    """Whether it is a link that is kept: python3 beside python3.11, and not one to a library somewhere else."""
    return source.is_symlink() and source.parent.name == "bin"


def shared_libraries(programs: Iterable[Path]) -> list[Path]:
    """Return the libraries of this host that the programs and extension modules need."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout  # some need none
    return [Path(path) for path in sorted(set(re.findall(r"(?:=> |^\t)(/\S+) \(", said, re.MULTILINE)))]


def machine_command(qemu: str, kernel: Path, disk: Path, results: Path) -> list[str]:
    """Return qemu's command line: two processors, each with a memory node of its own, and two disks."""
    node = LARGE_NODE if memory_available() > 2 * LARGE_NODE + 2048 * MIB else NODE
    gigantic = "hugepagesz=1G hugepages=1" if node == LARGE_NODE else ""
    append = "root=/dev/nvme0n1 rw init=/init console=ttyS0 quiet panic=-1 mitigations=off"
    append += f" {gigantic} hugepagesz=2M hugepages=64"
    command = [qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", f"{2 * node // MIB}M"]
    for index in range(2):
        command += ["-object", f"memory-backend-ram,id=memory{index},size={node // MIB}M"]
        command += ["-numa", f"node,memdev=memory{index},cpus={index}"]
    for index, image in enumerate((disk, results)):
        command += ["-drive", f"file={image},format=raw,if=none,cache=unsafe,id=disk{index}"]
        command += ["-device", f"nvme,drive=disk{index},serial=disk{index}"]
    command += ["-kernel", str(kernel), "-append", append]
    return [*command, "-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]


def memory_available() -> int:
    """Return how many bytes this host has to give."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def boot(command: list[str], limit: float) -> bool:
    """Run the machine, pass on what it prints, and return whether it went off by itself within `limit` seconds."""
    deadline = time.monotonic() + limit
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert machine.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(machine.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if not selector.select(left):
                    continue
                data = os.read(machine.stdout.fileno(), 1 << 16)
                if not data:
                    return True
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        return False
    finally:
        machine.kill()
        machine.wait()
        machine.stdout.close()


def take_results(results: Path, junit: Path | None) -> int | None:
    """Return pytest's exit status, and keep its JUnit file; None: the machine never got that far."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(results, "r:") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    found[Path(member.name).name] = file.read()
    except tarfile.ReadError:  # cut short; an empty disk reads as an empty archive
        return None
    if junit is not None and "junit.xml" in found:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_bytes(found["junit.xml"])
    return int(found["status"]) if "status" in found else None


if __name__ == "__main__":
    sys.exit(main())
