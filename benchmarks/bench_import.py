"""What importing costs: `import aioshm` beside `import anyio`, and what a program pays that goes on to use it.

Every value is one fresh interpreter, so that nothing was imported before. Where valgrind is installed the instructions
are counted as well (less those of an interpreter that imports nothing): they hardly vary, where times do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from harness import Column, Figures, Outcome, parse_arguments, publish, take_turns

STATEMENTS = ("import anyio", "import aioshm", "from aioshm import open_region", "import asyncio")

# Those that a library must not load unasked.
HEAVY = ("torch", "numpy")

# Without `-S`, what a .pth file of the environment starts (coverage, editable installs) would be measured too. What
# every interpreter has loaded by then is loaded first.
_BEFORE = """
import site, sys, time
sys.path[:] = {path!r}
before = len(sys.modules)
started = time.perf_counter()
"""
_AFTER = """
seconds = time.perf_counter() - started
print(seconds, len(sys.modules) - before, sum(name in sys.modules for name in {heavy!r}))
"""


def timed(statement: str) -> Figures:
    done = subprocess.run(
        [sys.executable, "-S", "-c", _script(statement)], check=True, capture_output=True, text=True, env=_environment()
    )
    seconds, modules, heavy = done.stdout.split()
    return {"seconds": float(seconds), "modules": float(modules), "heavy": float(heavy)}


def count_instructions(statement: str) -> int | None:
    """Return the instructions of an interpreter that runs `statement`, its start included; None without valgrind."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return None
    command = [valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    done = subprocess.run(
        [*command, sys.executable, "-S", "-c", _script(statement)],
        check=True,
        capture_output=True,
        text=True,
        env=_environment(),
    )
    counted = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    return int(counted[1].replace(",", "")) if counted else None


def _script(statement: str) -> str:
    return _BEFORE.format(path=[entry for entry in sys.path if entry]) + statement + _AFTER.format(heavy=HEAVY)


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}


def main() -> None:
    arguments = parse_arguments(__doc__, mib=None, rounds=21)
    contenders = {statement: lambda statement=statement: timed(statement) for statement in STATEMENTS}
    values = take_turns(contenders, arguments.rounds)
    floor = count_instructions("pass")
    for statement in STATEMENTS if floor is not None else ():
        counted = count_instructions(statement)
        if counted is not None:
            values[statement]["instructions"] = [float(counted - floor)]
    outcome = Outcome(
        "Import",
        {"rounds": arguments.rounds},
        [
            Column("seconds", "ms", 1e3),
            Column("instructions", "million instructions", 1e-6, 1),
            Column("modules", "modules", 1, 0),
            Column("heavy", " and ".join(HEAVY), 1, 0),
        ],
        values,
    )
    for statement in ("import aioshm", "from aioshm import open_region"):
        for key in ("seconds", "instructions") if floor is not None else ("seconds",):
            outcome.compare(f"{key}, `{statement}` over `import anyio`", statement, "import anyio", key)
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
