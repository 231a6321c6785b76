"""The rooms: imports point down only, and each outside library has one place. Read off the syntax trees."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aioshm

PACKAGE = Path(aioshm.__file__).parent

# As drawn in docs/design.md: a module imports from rooms below its own only.
ROOMS = [
    {"_backoff", "_files", "_libc", "_log", "_report", "_units"},
    {"_errors"},
    {"_cgroup", "_locks", "_mapping", "_progress", "_threads"},
    {"_bell", "_host", "_request", "_views"},
    {"_leftovers", "_pace", "_worth"},
    {"_preflight", "_rendezvous", "_roster"},
    {"_guard", "_numa", "_pages", "_room"},
    {"_populate"},
    {"_tenancy"},
    {"_region"},
    {"_open"},
    {"_cohort", "_columns", "_loading", "_picture"},
    {"_layout"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LONG = {"_errors.py"}  # one class per failure, and each says all that it knows
THIRD_PARTY = {
    "aiofiles": {"_loading"},
    "anyio": {"_threads"},
    "bitmath": {"cli"},
    "click": {"cli"},
    "numpy": {"_views"},
    "rich": {"cli"},
    "torch": {"_views"},
}


def modules() -> dict[str, list[Path]]:
    """Return the files of each module; `cli` is one."""
    found: dict[str, list[Path]] = {path.stem: [path] for path in PACKAGE.glob("*.py")}
    return {**found, "cli": sorted(PACKAGE.glob("cli/*.py"))}


def imports(path: Path, *, typing_too: bool = True) -> Iterator[str]:
    """Yield what a file imports, as absolute names; without `typing_too` not what only type checkers see."""
    tree = ast.parse(path.read_text())
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types.update(inner for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree):
        if node in for_types and not typing_too:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(("aioshm", *path.relative_to(PACKAGE).parts[: -node.level])) if node.level else ""
            stem = ".".join(filter(None, (base, node.module)))
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def room_of(module: str) -> int:
    return next(number for number, room in enumerate(ROOMS) if module in room)


def inside(name: str) -> str | None:
    """Return the module of ours that an absolute name means, or None."""
    parts = name.split(".")
    if parts[0] != "aioshm":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in modules() else "__init__"


def test_every_module_has_a_room():
    assert set(modules()) == set().union(*ROOMS)


# Their annotations name what is made above them.
TYPES_ONLY = {"_columns", "_request"}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module):
    for path in modules()[module]:
        for name in imports(path, typing_too=module != "__init__" and module not in TYPES_ONLY):
            target = inside(name)
            if target is not None and target != module:
                assert room_of(target) < room_of(module), f"{path.name} imports {name}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_each_outside_library_has_its_place(module):
    for path in modules()[module]:
        for name in imports(path, typing_too=False):
            library = name.split(".")[0]
            if library not in sys.stdlib_module_names and library != "aioshm":
                assert module in THIRD_PARTY[library], f"{path.name} imports {library}"


@pytest.mark.parametrize("module", sorted(set(modules()) - {"_threads", "cli"}))
def test_only_one_module_starts_threads(module):
    for path in modules()[module]:
        for name in imports(path):
            assert name not in ("concurrent.futures.ThreadPoolExecutor", "_thread") or module == "_loading"
        tree = ast.parse(path.read_text())
        made = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert "threading.Thread" not in made


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_every_file_says_what_it_owns_and_is_not_long(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 350 or path.name in LONG
