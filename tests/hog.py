"""A process that takes memory step by step until told to stop: run as a script, it says what it has, line by line."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable

MIB = 1 << 20


class Hog:
    """Takes `most` bytes in steps of 1 MiB, `pause` seconds apart, from when `go` is called."""

    def __init__(self, *, most: int, pause: float, preexec: Callable[[], None]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(most // MIB), str(pause)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=preexec,  # noqa: PLW1509 - it writes one small file, and holds no lock
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # up

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it, wait until it is gone, and with it what it took."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(steps: int, pause: float) -> None:
    print("up", os.getpid(), flush=True)
    sys.stdin.readline()
    taken = []
    for _ in range(steps):
        step = mmap.mmap(-1, MIB)
        step.write(b"\1" * MIB)
        taken.append(step)
        if pause:
            time.sleep(pause)
    sys.stdin.readline()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
