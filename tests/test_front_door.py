"""The front door: what is public, what it calls itself, and what importing it loads."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import aioshm

SOURCE = ast.parse(Path(aioshm.__file__).read_text())


def test_all_is_sorted_and_is_what_type_checkers_see():
    assert aioshm.__all__ == sorted(aioshm.__all__)
    seen = [
        alias.asname
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if alias.name == alias.asname
    ]
    assert sorted(seen) == aioshm.__all__


@pytest.mark.parametrize("name", aioshm.__all__)
def test_every_public_name_is_there_documented_and_calls_itself_aioshms(name):
    value = getattr(aioshm, name)
    assert value.__module__ == "aioshm"
    assert value.__qualname__ == name
    assert inspect.getdoc(value)


def test_what_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        aioshm.nothing  # noqa: B018 - the access is the test


def test_dir_names_what_is_public():
    assert set(aioshm.__all__) <= set(dir(aioshm))


@pytest.mark.parametrize("statement", ["import aioshm", "from aioshm import *", "import aioshm; aioshm.open_region"])
def test_importing_loads_neither_torch_nor_numpy(statement):
    code = f"{statement}\nimport sys\nprint(*sorted({{'torch', 'numpy', 'asyncio', 'aiofiles'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = {"import aioshm": set(), "import aioshm; aioshm.open_region": {"asyncio"}}
    assert set(done.stdout.split()) <= allowed.get(statement, {"asyncio", "aiofiles"})
