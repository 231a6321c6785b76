"""Bad arguments are refused at the call, each by its name, before anything is touched; also under `python -O`.

Run as a script it makes every refusal of the table below once, watched by an audit hook, and prints what came of it.
"""

from __future__ import annotations

import decimal
import inspect
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import aioshm
from aioshm import _request

MIB = 1 << 20


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"/dev/shm"


class Text(str):
    __slots__ = ()


# Field, value, error, what the message must name.
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("name", "", ValueError, "name must be"),
    ("name", "a/b", ValueError, "'a/b'"),
    ("name", "/", ValueError, "name must be"),
    ("name", "/etc/passwd", ValueError, "name must be"),
    ("name", "..", ValueError, "name must be"),
    ("name", "../x", ValueError, "name must be"),
    ("name", "a..b", ValueError, "name must be"),
    ("name", "a\0b", ValueError, "name must be"),
    ("name", "a\n", ValueError, "name must be"),
    ("name", "\na", ValueError, "name must be"),
    ("name", "a b", ValueError, "name must be"),
    ("name", "k\u00f6", ValueError, "name must be"),
    ("name", "\u0661", ValueError, "name must be"),  # a digit, but not of ASCII
    ("name", "\ud800", ValueError, "name must be"),
    ("name", "a" * 201, ValueError, "name must be"),
    ("name", b"kv", TypeError, "name must be a str, not bytes"),
    ("name", None, TypeError, "name must be a str, not NoneType"),
    ("name", 7, TypeError, "name must be a str, not int"),
    ("name", pathlib.PurePath("kv"), TypeError, "name must be a str"),
    ("size", 0, ValueError, "size must be greater than 0, not 0"),
    ("size", -1, ValueError, "size must be greater than 0, not -1"),
    ("size", -(1 << 70), ValueError, "size must be greater than 0"),
    ("size", (1 << 56) + 1, ValueError, "no address space"),
    ("size", 1 << 63, ValueError, "no address space"),
    ("size", 1 << 64, ValueError, "no address space"),
    ("size", 10**30, ValueError, "no address space"),
    ("size", 10**5000, ValueError, "no address space"),  # more digits than Python prints
    ("size", -(10**5000), ValueError, "size must be greater than 0"),
    ("size", True, TypeError, "size must be an int, not bool"),
    ("size", False, TypeError, "size must be an int, not bool"),
    ("size", 1.0, TypeError, "size must be an int, not float"),
    ("size", math.inf, TypeError, "size must be an int, not float"),
    ("size", math.nan, TypeError, "size must be an int, not float"),
    ("size", decimal.Decimal(4096), TypeError, "size must be an int, not Decimal"),
    ("size", "4096", TypeError, "size must be an int, not str"),
    ("size", None, TypeError, "size must be an int, not NoneType"),
    ("directory", "", ValueError, "directory must be the path"),
    ("directory", "/dev/shm\0x", ValueError, "directory must be the path"),
    ("directory", "/dev/\ud800", ValueError, "directory must be the path"),
    ("directory", b"/dev/shm", TypeError, "directory must be a str or os.PathLike, not bytes"),
    ("directory", BytesPath(), TypeError, "directory must be text, not bytes"),
    ("directory", None, TypeError, "directory must be a str or os.PathLike, not NoneType"),
    ("directory", 3, TypeError, "directory must be a str or os.PathLike, not int"),
    ("allocation_name", None, TypeError, "allocation_name must be a str, not NoneType"),
    ("allocation_name", b"KV", TypeError, "allocation_name must be a str, not bytes"),
    ("hint", 1, TypeError, "hint must be a str, not int"),
    ("hint", b"Lower it.", TypeError, "hint must be a str, not bytes"),
    ("timeout", -1, ValueError, "timeout must be 0 seconds or more, not -1"),
    ("timeout", -0.001, ValueError, "timeout must be 0 seconds or more"),
    ("timeout", -math.inf, ValueError, "timeout must be 0 seconds or more, not -inf"),
    ("timeout", math.nan, ValueError, "timeout must be 0 seconds or more, not nan"),
    ("timeout", 10**400, ValueError, "timeout must be"),  # no float holds it
    ("timeout", True, TypeError, "timeout must be seconds as a float, or None, not bool"),
    ("timeout", "30", TypeError, "timeout must be seconds as a float, or None, not str"),
    ("timeout", decimal.Decimal(1), TypeError, "timeout must be seconds as a float, or None, not Decimal"),
    ("populate", 1, TypeError, "populate must be True or False, not int"),
    ("populate", None, TypeError, "populate must be True or False, not NoneType"),
    ("populate", "yes", TypeError, "populate must be True or False, not str"),
    ("huge_pages", "always", ValueError, "huge_pages must be one of 'try', 'require', 'off', not 'always'"),
    ("huge_pages", "TRY", ValueError, "huge_pages must be one of"),
    ("huge_pages", "", ValueError, "huge_pages must be one of"),
    ("huge_pages", True, TypeError, "huge_pages must be one of 'try', 'require', 'off', not bool"),
    ("huge_pages", None, TypeError, "huge_pages must be one of"),
    ("huge_pages", ["try"], TypeError, "huge_pages must be one of"),
    ("numa", "all", ValueError, "numa must be one of 'first-touch', 'interleave', not 'all'"),
    ("numa", "", ValueError, "numa must be one of"),
    ("numa", [], ValueError, "numa must name at least one node"),
    ("numa", (), ValueError, "numa must name at least one node"),
    ("numa", [1, 0, 1], ValueError, "numa must name each node once, not 1, 0, 1"),
    ("numa", [0, -1], ValueError, "numa must name nodes from 0 to 1023, not -1"),
    ("numa", [1024], ValueError, "numa must name nodes from 0 to 1023, not 1024"),
    ("numa", [10**5000], ValueError, "numa must name nodes from 0 to 1023"),
    ("numa", 0, TypeError, "numa must be 'first-touch', 'interleave', a sequence of node numbers or None, not int"),
    ("numa", True, TypeError, "numa must be 'first-touch', 'interleave', a sequence"),
    ("numa", b"\0", TypeError, "numa must be 'first-touch', 'interleave', a sequence"),
    ("numa", {0: 1}, TypeError, "numa must be 'first-touch', 'interleave', a sequence"),
    ("numa", [True], TypeError, "a node of numa must be an int, not bool"),
    ("numa", [0.0], TypeError, "a node of numa must be an int, not float"),
    ("numa", ["0"], TypeError, "a node of numa must be an int, not str"),
    ("numa", [None], TypeError, "a node of numa must be an int, not NoneType"),
    ("threads", 0, ValueError, "threads must be greater than 0, not 0"),
    ("threads", -2, ValueError, "threads must be greater than 0, not -2"),
    ("threads", True, TypeError, "threads must be an int, not bool"),
    ("threads", 2.0, TypeError, "threads must be an int, not float"),
    ("threads", "2", TypeError, "threads must be an int, not str"),
    ("memory_policy", "fail", ValueError, "memory_policy must be one of 'guard', 'warn', 'ignore', not 'fail'"),
    ("memory_policy", "Guard", ValueError, "memory_policy must be one of"),
    ("memory_policy", None, TypeError, "memory_policy must be one of"),
    ("memory_policy", 1, TypeError, "memory_policy must be one of"),
    ("on_progress", 1, TypeError, "on_progress must be callable or None, not int"),
    ("on_progress", "print", TypeError, "on_progress must be callable or None, not str"),
    ("mode", 0o600, TypeError, "mode"),
    ("huge_page", "try", TypeError, "huge_page"),
    ("allow_disk", True, TypeError, "allow_disk"),
]


def arguments(**changed: Any) -> dict[str, Any]:
    """Return good arguments with some of them changed."""
    return {"name": "kv", "size": 4096, **changed}


def every_argument(**changed: Any) -> dict[str, Any]:
    """Return what `open_region` passes on for `arguments(...)`: its defaults come along."""
    parameters = inspect.signature(aioshm.open_region).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty} | arguments(**changed)


@pytest.mark.parametrize(
    ("field", "value", "kind", "words"), REFUSED, ids=[f"{row[0]}-{index}" for index, row in enumerate(REFUSED)]
)
def test_bad_argument_is_refused_by_name_at_the_call(field, value, kind, words):
    with pytest.raises(kind) as caught:
        aioshm.open_region(**arguments(**{field: value}))
    assert type(caught.value) is kind
    assert not isinstance(caught.value, aioshm.AioshmError)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("flags", [(), ("-O",), ("-OO",)], ids=["plain", "-O", "-OO"])
def test_nothing_is_touched_by_a_refusal_however_python_runs(flags):
    done = subprocess.run([sys.executable, *flags, __file__], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert [outcome for outcome in told["outcomes"] if outcome[0] != outcome[1]] == []
    assert len(told["outcomes"]) == len(REFUSED)
    assert told["events"] == []
    assert told["optimized"] == bool(flags)


def test_size_and_options_are_keyword_only_after_the_first_two():
    with pytest.raises(TypeError, match="positional"):
        aioshm.open_region("kv", 4096, "/dev/shm")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="name"):
        aioshm.open_region(size=4096)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="size"):
        aioshm.open_region("kv")  # type: ignore[call-arg]


@pytest.mark.parametrize("good", ["a", ".", "-", "_", "A-z.0_9", "a" * 200, "0", Text("sub-class")])
def test_good_names_are_taken_as_they_are(good):
    assert _request.check_name(good) == good


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_numpy_integers_are_sizes(kind):
    numpy = pytest.importorskip("numpy")
    size = _request.check_size(numpy.dtype(kind).type(100))
    assert size == 100
    assert type(size) is int  # or file offsets computed from it would wrap around


@pytest.mark.parametrize("value", ["bool_", "float32", "float64"])
def test_other_numpy_scalars_are_no_sizes(value):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="size must be an int"):
        aioshm.open_region("kv", getattr(numpy, value)(1))


def test_size_may_be_anything_with_an_index_and_as_large_as_an_address_space():
    class Index:
        def __index__(self) -> int:
            return 12345

    assert _request.check_size(Index()) == 12345
    assert _request.check_size(1) == 1
    assert _request.check_size(1 << 56) == 1 << 56


@pytest.mark.parametrize("good", [0, 0.0, 1, 2.5, math.inf])
def test_timeout_is_seconds_as_a_float_or_for_ever(good):
    request = _request.check_request(**every_argument(timeout=good))
    assert request.timeout == good
    assert type(request.timeout) is float
    assert _request.check_request(**every_argument(timeout=None)).timeout is None


def test_directory_is_made_absolute_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory in ("shm", pathlib.Path("shm"), "./shm/", "x/../shm"):
        assert _request.check_directory(directory) == str(tmp_path / "shm")


def test_a_region_opened_with_numpy_integers_has_that_size(run, name):
    numpy = pytest.importorskip("numpy")

    async def main():
        async with aioshm.open_region(name, numpy.uint32(MIB + 1), threads=numpy.int8(1)) as region:
            assert region.size == MIB + 1
            assert type(region.size) is int
            assert len(region.buffer) == MIB + 1

    run(main())


@pytest.mark.parametrize(
    ("offset", "length", "kind"),
    [
        (-1, 1, ValueError),
        (0, -1, ValueError),
        (0, 4097, ValueError),
        (4097, None, ValueError),
        (4096, 1, ValueError),
        (1 << 70, None, ValueError),
        (0.0, None, TypeError),
        (0, 1.5, TypeError),
        ("0", None, TypeError),
        (None, None, TypeError),
    ],
)
def test_a_span_outside_the_region_is_refused(offset, length, kind):
    with pytest.raises(kind, match=r"offset and length|do not lie within"):
        _request.check_span(offset, length, 4096)


def test_a_span_inside_the_region_is_taken():
    assert _request.check_span(0, None, 4096) == range(4096)
    assert _request.check_span(4096, None, 4096) == range(4096, 4096)
    assert _request.check_span(1, 2, 4096) == range(1, 3)
    assert _request.check_span(0, 0, 4096) == range(0)


def main() -> None:
    aioshm.open_region("kv", 4096)  # loads what is loaded at the first use
    events: list[str] = []
    # `object` and `exec` events and their like are Python at work on itself.
    outward = (
        "open",
        "os.",
        "shutil.",
        "socket.",
        "subprocess.",
        "fcntl.",
        "mmap.",
        "tempfile.",
        "ctypes.dlopen",
        "import",
    )
    sys.addaudithook(lambda event, _: events.append(event) if event.startswith(outward) else None)
    outcomes = []
    for index, (field, value, kind, words) in enumerate(REFUSED):
        try:
            aioshm.open_region(**arguments(**{field: value}))
        except Exception as error:  # noqa: BLE001 - judged by the test
            expected = kind.__name__ if words in str(error) else f"{kind.__name__} that says {words}"
            outcomes.append((type(error).__name__, expected))
        else:
            outcomes.append(("accepted", f"{field}, row {index}"))
    seen = list(events)
    os.listdir("/")
    if "os.listdir" not in events:
        seen.append("the hook hears nothing")
    print(json.dumps({"outcomes": outcomes, "events": seen, "optimized": not __debug__}))


if __name__ == "__main__":
    main()
