"""The errors: the tree as it is drawn, facts that survive pickling, and figures that never contradict each other."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioshm
from aioshm import _errors

TIB = 1 << 40

# One of each, by facts that name themselves.
EXAMPLES: dict[str, dict[str, Any]] = {
    "InsufficientSpaceError": {
        "allocation_name": "CPU KV cache",
        "directory": "/dev/shm",
        "required": 64 << 30,
        "available": 33_285_996_543,
        "hint": "Lower --kv-offloading-size.",
        "reclaimable_leftovers": 512 << 20,
        "huge_page": None,
    },
    "InsufficientMemoryError": {
        "allocation_name": "CPU KV cache",
        "level": "/sys/fs/cgroup/pod/engine",
        "required": 700 << 20,
        "limit": 512 << 20,
        "usage": 100 << 20,
        "reclaimable": 40 << 20,
        "hint": None,
        "huge_page": None,
    },
    "JoinTimeoutError": {
        "name": "kv",
        "path": "/dev/shm/aioshm-0-kv",
        "waited": 30.04,
        "missing": (2, 3),
        "local_world_size": 4,
    },
    "PeerLostError": {
        "name": "kv",
        "lost": (1, 3),
        "pids": (4711, None),
        "missing": (2,),
        "oom_killed_in": ("/sys/fs/cgroup/pod",),
    },
    "RankInUseError": {"name": "kv", "local_rank": 3, "pid": 4711},
    "ShortFileError": {
        "path": "/models/a.safetensors",
        "file_offset": 4096,
        "required": 8 << 30,
        "available": 3 << 30,
        "shrank": True,
    },
    "CohortEnvironmentError": {"reason": "LOCAL_RANK is no number", "launchers": ("Slurm",)},
    "RegionMismatchError": {"name": "kv", "field": "size", "expected": 4096, "found": 8192},
    "RegionAccessError": {"path": "/dev/shm/aioshm-0-kv", "reason": "it is a directory"},
    "RegionRemovedError": {"path": "/dev/shm/aioshm-0-kv"},
    "RegionClosedError": {"name": "kv"},
    "HugePagesUnavailableError": {"allocation_name": "KV", "directory": "/dev/shm", "reason": "the kernel says so"},
    "UnsuitableDirectoryError": {"directory": "/mnt", "reason": "it is mounted read-only"},
    "UnsupportedPlatformError": {"reason": "Darwin"},
}


def every_class() -> list[type[aioshm.AioshmError]]:
    found = [kind for kind in vars(_errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    return [kind for kind in dict.fromkeys(found) if kind is not aioshm.AioshmError]


def make(kind: type[aioshm.AioshmError]) -> aioshm.AioshmError:
    return kind(**EXAMPLES[kind.__name__])


def facts(error: BaseException) -> dict[str, Any]:
    return {key: value for key, value in vars(error).items() if key != "__notes__"}


each_class = pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)


def test_the_tree_is_the_one_that_is_drawn():
    drawn = {}
    for line in (_errors.__doc__ or "").splitlines():
        if found := re.match(r"\s+[├└]── (\w+)(?: \((\w+)\))?  ", line):
            drawn[found[1]] = found[2]
    real = {}
    for kind in every_class():
        first, *others = kind.__bases__
        assert first is aioshm.AioshmError
        assert len(others) < 2
        real[kind.__name__] = others[0].__name__ if others else None
    assert real == drawn
    assert aioshm.AioshmError.__bases__ == (RuntimeError,)


def test_all_of_them_are_public_and_nothing_else_is_an_error():
    public = {name for name in aioshm.__all__ if name.endswith("Error")}
    assert public == {"AioshmError", *(kind.__name__ for kind in every_class())}
    assert set(EXAMPLES) == public - {"AioshmError"}


@each_class
def test_it_says_that_it_is_aioshms(kind):
    assert kind.__module__ == "aioshm"
    assert kind.__qualname__ == kind.__name__
    assert getattr(aioshm, kind.__name__) is kind


@each_class
def test_facts_are_attributes_keyword_only_and_documented(kind):
    error = make(kind)
    assert facts(error) == EXAMPLES[kind.__name__]
    documented = set(re.findall(r"^    (\w+): ", inspect.getdoc(kind) or "", re.MULTILINE))
    assert documented == set(facts(error))
    with pytest.raises(TypeError, match="positional"):
        kind(*EXAMPLES[kind.__name__].values())


@each_class
def test_the_message_is_the_text_and_says_the_facts(kind):
    error = make(kind)
    assert error.args == (str(error),)
    for value in EXAMPLES[kind.__name__].values():
        if isinstance(value, str):
            assert value in str(error)
    assert str(error)[0].isupper() or str(error).startswith(("/", "aioshm"))
    assert str(error).endswith(".")
    assert "\n" not in str(error)


@each_class
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_pickles_with_facts_notes_and_message(kind, protocol):
    error = make(kind)
    error.add_note("while rank 3 opened it")
    error.add_note("on node 7")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert again.__notes__ == ["while rank 3 opened it", "on node 7"]
    assert (str(again), again.args, repr(again)) == (str(error), error.args, repr(error))
    assert pickle.loads(pickle.dumps(again)).__notes__ == error.__notes__


@each_class
def test_it_is_the_same_after_a_copy(kind):
    error = make(kind)
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert (vars(again), str(again)) == (vars(error), str(error))


def test_the_root_pickles_too():
    again = pickle.loads(pickle.dumps(aioshm.AioshmError("a", 1)))
    assert (type(again), again.args) == (aioshm.AioshmError, ("a", 1))


@each_class
def test_what_others_hang_on_an_error_survives_pickling(kind):
    error = make(kind)
    error.request_id = 7  # type: ignore[attr-defined]  # as error trackers do
    again = pickle.loads(pickle.dumps(error))
    assert again.request_id == 7  # type: ignore[attr-defined]
    assert str(again) == str(error)


def test_a_process_can_send_it_to_another():
    program = f"""
import pickle, sys, aioshm
examples = {EXAMPLES!r}
pickle.dump([getattr(aioshm, name)(**facts) for name, facts in examples.items()], sys.stdout.buffer)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    received = pickle.loads(done.stdout)
    assert [(type(error).__name__, facts(error)) for error in received] == list(EXAMPLES.items())


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        (aioshm.InsufficientMemoryError, MemoryError),
        (aioshm.JoinTimeoutError, TimeoutError),
        (aioshm.RegionMismatchError, ValueError),
        (aioshm.RegionAccessError, PermissionError),
    ],
)
def test_it_is_caught_as_what_users_expect(kind, second):
    with pytest.raises(second) as caught:
        raise make(kind)
    assert str(caught.value) == str(make(kind))  # OSError has a text of its own making
    assert isinstance(caught.value, RuntimeError)
    assert getattr(caught.value, "errno", None) is None


def test_the_words_for_a_file_system_that_is_too_small():
    assert str(make(aioshm.InsufficientSpaceError)) == (
        "Insufficient space in /dev/shm for CPU KV cache: 65536.0 MiB required, 31743.9 MiB free (33792.1 MiB short). "
        "Leftovers of dead processes take 512.0 MiB of it: `aioshm gc` frees them. "
        "Increase /dev/shm (e.g. --shm-size or --ipc=host, or an emptyDir with medium: Memory and a larger sizeLimit). "
        "Lower --kv-offloading-size."
    )


def test_the_words_for_memory_that_is_too_small():
    error = make(aioshm.InsufficientMemoryError)
    assert str(error) == (
        "Insufficient memory in memory cgroup /sys/fs/cgroup/pod/engine for CPU KV cache: 700.0 MiB required, "
        "452.0 MiB available (248.0 MiB short): limit 512.0 MiB, in use 100.0 MiB of which 40.0 MiB reclaimable. "
        "Ask for less, or raise the memory limit of the container or pod."
    )
    host = aioshm.InsufficientMemoryError(**{**EXAMPLES["InsufficientMemoryError"], "level": "host", "hint": "Hm."})
    assert "on this host for CPU KV cache" in str(host)
    assert str(host).endswith("Ask for less, or free memory on the host. Hm.")
    pages = aioshm.InsufficientMemoryError(**{**EXAMPLES["InsufficientMemoryError"], "huge_page": 2 << 20})
    assert "for hugetlb pages in cgroup /sys/fs/cgroup/pod/engine for CPU KV cache" in str(pages)
    assert str(pages).endswith("raise the limit on huge pages of the container or pod (hugepages-2Mi, for one).")


@pytest.mark.parametrize("hint", [None, ""])
def test_without_a_hint_nothing_is_appended(hint):
    error = aioshm.InsufficientSpaceError(**{**EXAMPLES["InsufficientSpaceError"], "hint": hint})
    assert str(error).endswith("a larger sizeLimit).")


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_leftovers_are_told_where_there_are_any_to_speak_of(size):
    facts = {**EXAMPLES["InsufficientSpaceError"], "directory": "/mnt/kv", "reclaimable_leftovers": size}
    sentence = "Leftovers of dead processes take 1.0 MiB of it: `aioshm gc --directory /mnt/kv` frees them."
    assert (sentence in str(aioshm.InsufficientSpaceError(**facts))) == (size >= 1 << 20)
    assert ("eftovers" in str(aioshm.InsufficientSpaceError(**facts))) == (size >= 1 << 20)


def tenths(text: str, pattern: str) -> int:
    """Return the figure in front of `pattern` in tenths of a MiB."""
    found = re.search(r"(\d+)\.(\d) MiB " + pattern, text)
    assert found is not None, text
    return int(found[1]) * 10 + int(found[2])


def check_figures(text: str, free: str) -> None:
    required, available, short = tenths(text, "required"), tenths(text, free), tenths(text, "short")
    assert required > available
    assert short > 0
    assert short <= required - available <= short + 1  # each figure is rounded by itself, by less than one tenth


@given(available=st.integers(0, TIB), short=st.one_of(st.integers(1, 4096), st.integers(1, TIB)))
def test_required_and_free_never_contradict_each_other(available, short):
    error = aioshm.InsufficientSpaceError(
        allocation_name="KV", directory="/dev/shm", required=available + short, available=available
    )
    check_figures(str(error), "free")


@given(
    limit=st.integers(0, TIB),
    usage=st.integers(0, TIB),
    share=st.floats(0, 1),
    short=st.one_of(st.integers(1, 4096), st.integers(1, TIB)),
)
def test_required_and_available_never_contradict_each_other(limit, usage, share, short):
    reclaimable = int(usage * share)
    available = max(0, limit - usage + reclaimable)
    error = aioshm.InsufficientMemoryError(
        allocation_name="KV",
        level="host",
        required=available + short,
        limit=limit,
        usage=usage,
        reclaimable=reclaimable,
    )
    assert error.available == available
    check_figures(str(error), "available")
