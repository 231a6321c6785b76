"""A forked child has no part in the region: closed there, and the parent lives and dies as if there were no child.

The programs fork in processes of their own: this one has threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cancelling import NOTHING, held

import aioshm

MIB = 1 << 20
SIZE = 4 * MIB

_PRELUDE = """
import asyncio, gc, os, sys, threading, warnings
import aioshm
from pathlib import Path

warnings.simplefilter("error")
name, size = sys.argv[1], 4 << 20

def held(path):
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass
    return [link for link in links if path in link]

def in_child(look):
    # Fork, run `look` there, and return its exit status: 0 where it raised nothing.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            look()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run_program(text: str, name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + text, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_region_is_closed_in_the_child_and_open_in_the_parent(name, path):
    run_program(
        """
async def main():
    async with aioshm.open_region(name, size) as region:
        view = region.buffer
        view[0] = 1

        def look():
            assert region.closed
            assert not held(region.path)
            for use in (lambda: region.buffer, region.array, region.tensor):
                try:
                    use()
                except aioshm.RegionClosedError:
                    continue
                raise AssertionError(use)
            assert view[0] == 1, "views stay valid in the child"
            view[1] = 2

        assert in_child(look) == 0
        assert not region.closed
        assert view[1] == 2
        del view
        assert region.buffer[1] == 2
        assert os.path.exists(region.path)
        assert len(held(region.path)) == 1

asyncio.run(main())
""",
        name,
    )
    assert not path.exists()


def test_the_child_may_close_and_end_as_it_likes(name, path):
    """Also by unwinding, by collecting the region, and by the interpreter's ordinary end."""
    run_program(
        """
kept = []

async def main():
    context = aioshm.open_region(name, size)
    region = await context.__aenter__()
    kept.append((context, region))
    return region.path

path = asyncio.run(main())
pid = os.fork()
if pid == 0:
    context, region = kept.pop()
    asyncio.run(region.aclose())
    asyncio.run(context.__aexit__(None, None, None))
    del context, region
    gc.collect()
    assert os.path.exists(path)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert os.path.exists(path)
context, region = kept.pop()
assert not region.closed
region.buffer[0] = 1
asyncio.run(context.__aexit__(None, None, None))
""",
        name,
    )
    assert not path.exists()


def test_the_child_can_open_the_region_itself(name, path):
    run_program(
        """
async def main():
    async with aioshm.open_region(name, size) as region:
        region.buffer[0] = 1

        def look():
            async def join():
                async with aioshm.open_region(name, size) as joined:
                    assert not joined.created
                    assert joined.buffer[0] == 1
                    assert len(held(joined.path)) == 1
                    joined.buffer[0] = 2
            asyncio.run(join())

        assert in_child(look) == 0
        assert region.buffer[0] == 2
        assert os.path.exists(region.path)

asyncio.run(main())
""",
        name,
    )
    assert not path.exists()


_DIES_WITH_CHILD = """
async def main():
    async with aioshm.open_region(name, size) as region:
        view = region.buffer  # a mapping that the child inherits keeps the description it was made from
        inside(region)

def inside(region):
    if os.fork():
        os.wait()  # until the test kills this process
    else:
        print(os.getpid(), flush=True)
        sys.stdin.read()  # until the test lets the child go
        os._exit(0)

asyncio.run(main())
"""


@pytest.fixture
def dying_parent(name) -> Iterator[Callable[[], None]]:
    """A process with the region open and a living child that was forked then; call it to kill the parent."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + _DIES_WITH_CHILD, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())

    def kill() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        os.kill(child, 0)  # alive

    yield kill
    process.kill()
    # The child ends when its stdin does, and only then does its stdout.
    process.communicate(timeout=10)


def test_a_child_does_not_keep_its_dead_parent_alive(run, name, path: Path, dying_parent):
    dying_parent()
    assert path.exists()

    async def main():
        async with aioshm.open_region(name, SIZE, timeout=5) as region:
            assert region.created, "the leftover was taken for a living region"
            assert region.report.recycled
        assert held(path) == NOTHING

    run(main())


def test_no_fork_comes_between_forgetting_a_descriptor_and_closing_it(name, path):
    """Forked there, the child would have a description that nobody knows of, and with it our locks."""
    run_program(
        """
from aioshm import _locks

class SlowOs:
    # The module's `os`, with a close that another thread forks before.
    def __getattr__(self, attribute):
        return getattr(os, attribute)

    def close(self, fd):
        if forker.ident is None:
            forker.start()
            forked.wait(0.5)  # for ever, if the fork has to wait for us
        os.close(fd)

def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, and that is the point
        status.append(in_child(lambda: held(path) and sys.exit("the child has the descriptor")))
    forked.set()

status, forked, path = [], threading.Event(), ""
forker = threading.Thread(target=fork)

async def main():
    global path
    async with aioshm.open_region(name, size) as region:
        path = region.path
        _locks.os = SlowOs()

asyncio.run(main())
forker.join()
assert status == [0]
""",
        name,
    )


def test_programs_that_are_started_get_no_descriptor(run, name, path):
    async def main():
        async with aioshm.open_region(name, SIZE):
            text = subprocess.run(
                ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False
            ).stdout
            assert str(path) not in text

    run(main())


def test_the_resource_tracker_is_never_involved(name, path):
    """CPython's tracker unlinks what an exiting client has attached: everyone's region, and then warns of a leak."""
    output = run_program(
        """
import multiprocessing
from multiprocessing import resource_tracker

assert "multiprocessing.shared_memory" not in sys.modules

def join(name, size):
    registered = []
    resource_tracker.register = lambda *what: registered.append(what)

    async def main():
        async with aioshm.open_region(name, size) as region:
            assert not region.created
            region.buffer[0] = 5
    asyncio.run(main())
    assert not registered

async def main():
    registered = []
    async with aioshm.open_region(name, size) as region:
        assert resource_tracker._resource_tracker._fd is None, "a tracker was started"
        child = multiprocessing.get_context("fork").Process(target=join, args=(name, size))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert region.buffer[0] == 5
        assert os.path.exists(region.path), "the child's exit took the region away"
    assert resource_tracker._resource_tracker._fd is None
    print("done")

asyncio.run(main())
""",
        name,
    )
    assert output == "done\n"
    assert not path.exists()


def test_the_exit_of_a_client_leaves_the_region_to_the_others(ranks, name, path):
    first, second = ranks.start_many(2)
    first.open(SIZE)
    second.open(SIZE)
    first.ask("write", offset=0, text="alive")
    second.kill()
    assert path.exists()
    third = ranks.start()
    assert third.open(SIZE)["created"] is False
    assert third.ask("read", offset=0, length=5)["text"] == "alive"
    assert third.end() == 0
    assert path.exists()
    assert first.end() == 0
    assert not path.exists()
