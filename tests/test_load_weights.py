"""`examples/load_weights.py`: ranks share the tensors of a safetensors file that one of them loaded."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

PROGRAM = Path(__file__).parents[1] / "examples" / "load_weights.py"

pytestmark = pytest.mark.examples


def run_example(*options: str) -> tuple[int, str]:
    """Run it to its end with warnings as errors; return its exit status and what it said on stdout, then on stderr."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(PROGRAM), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it started is killed with it
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        with process:
            try:
                said = "".join(process.communicate(timeout=110))
            except BaseException:
                process.kill()
                raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def test_all_ranks_share_what_one_of_them_loaded(name):
    status, said = run_example("--ranks=3", f"--name={name}")
    assert status == 0, said
    lines = re.findall(r"^rank (\d): (\w+), (\d) tensors, identical: True, shared: True$", said, re.MULTILINE)
    assert sorted(rank for rank, _, _ in lines) == ["0", "1", "2"]
    assert sorted(role for _, role, _ in lines) == ["created", "joined", "joined"]
    assert {count for _, _, count in lines} == {"6"}
    loaders = re.findall(r"^rank (\d): loaded (\d+) of \2 bytes of small.safetensors$", said, re.MULTILINE)
    assert [rank for rank, _ in loaders] == [rank for rank, role, _ in lines if role == "created"]
    assert "3 of 3 ranks right, left behind: nothing\n" in said
    assert "stay mapped" not in said


def test_a_file_that_is_cut_meanwhile_is_the_error_of_one_and_costs_the_others_a_peer(name, tmp_path):
    """And the program says so: none of the ranks was right."""
    code = (
        "import sys, pathlib, load_weights\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "load_weights.make_weights(path)\n"
        "digest = load_weights.digest\n"
        "def digest_and_cut(tensors):\n"
        "    digested = digest(tensors)\n"
        "    path.write_bytes(b'')\n"
        "    return digested\n"
        "load_weights.digest = digest_and_cut\n"
        "print(load_weights.share(path, sys.argv[2], 2), 'right')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "cut.safetensors"), name],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.stdout == "0 right\n", done.stderr
    assert done.stderr.count("ShortFileError: ") == 1, done.stderr
    assert done.stderr.count("PeerLostError: ") == 1, done.stderr
