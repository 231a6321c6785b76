"""The arguments of `open_region`, checked before anything is touched."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ._files import region_path
from ._locks import MAX_RANKS

if TYPE_CHECKING:
    from ._progress import Progress
    from ._region import Region

HugePages = Literal["try", "require", "off"]
MemoryPolicy = Literal["guard", "warn", "ignore"]
Placement = Literal["first-touch", "interleave"]

# 64 PiB: half the address space of five-level paging, the largest there is.
_MAX_SIZE = 1 << 56
# The most that the kernel can be built for (NODES_SHIFT of mm/Kconfig).
_MAX_NODES = 1024
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True, kw_only=True)
class Need:
    """How much memory is needed, where, and in whose words errors of capacity are told."""

    size: int
    directory: str
    allocation_name: str
    hint: str | None


@dataclass(frozen=True, kw_only=True)
class Request(Need):
    """What one call of `open_region` asks for; made only with arguments that make sense.

    Without a cohort `local_rank` and `local_world_size` are both 0.
    """

    name: str
    local_rank: int
    local_world_size: int
    timeout: float | None
    populate: bool
    huge_pages: HugePages
    numa: Placement | tuple[int, ...] | None
    threads: int | None
    memory_policy: MemoryPolicy
    initialize: Callable[[Region], Awaitable[None]] | None
    on_progress: Callable[[Progress], None] | None

    @property
    def is_cohort(self) -> bool:
        """Whether a fixed number of ranks was announced; otherwise both figures are 0, and anyone may come."""
        return self.local_world_size > 0

    @property
    def path(self) -> str:
        """The region's file."""
        return region_path(self.directory, os.geteuid(), self.name)


def check_request(
    *,
    name: object,
    size: object,
    local_rank: object,
    local_world_size: object,
    directory: object,
    allocation_name: object,
    hint: object,
    timeout: object,
    populate: object,
    huge_pages: object,
    numa: object,
    threads: object,
    memory_policy: object,
    initialize: object,
    on_progress: object,
) -> Request:
    """Return the arguments as a Request.

    Raises:
        TypeError: One has the wrong type.
        ValueError: One has a value that makes no sense. Nothing was touched either way.
    """
    rank, world = check_ranks(local_rank, local_world_size)
    return Request(
        name=check_name(name),
        **vars(check_need(size=size, directory=directory, allocation_name=allocation_name, hint=hint)),
        local_rank=rank,
        local_world_size=world,
        timeout=_seconds("timeout", timeout),
        populate=_flag("populate", populate),
        huge_pages=check_word("huge_pages", huge_pages, HugePages),
        numa=check_numa(numa),
        threads=None if threads is None else check_count("threads", threads),
        memory_policy=check_word("memory_policy", memory_policy, MemoryPolicy),
        initialize=_callable("initialize", initialize),
        on_progress=_callable("on_progress", on_progress),
    )


def check_need(*, size: object, directory: object, allocation_name: object, hint: object) -> Need:
    """Return these arguments as a Need.

    Raises:
        TypeError: One has the wrong type.
        ValueError: One has a value that makes no sense.
    """
    return Need(
        size=check_size(size),
        directory=check_directory(directory),
        allocation_name=_text("allocation_name", allocation_name),
        hint=None if hint is None else _text("hint", hint),
    )


def check_numa(numa: object) -> Placement | tuple[int, ...] | None:
    """Return `numa` as a word, or as a tuple of memory nodes; whether they exist only the kernel knows."""
    if numa is None:
        return None
    if isinstance(numa, str):
        word: Placement = check_word("numa", numa, Placement)
        return word
    if isinstance(numa, (bytes, Mapping)) or not isinstance(numa, Iterable):
        raise TypeError(
            f"numa must be 'first-touch', 'interleave', a sequence of node numbers or None, not {_kind(numa)}"
        )
    nodes = tuple(check_index("a node of numa", node) for node in numa)
    if not nodes:
        raise ValueError("numa must name at least one node")
    if len(set(nodes)) < len(nodes):
        raise ValueError(f"numa must name each node once, not {_listed(nodes)}")
    for node in nodes:
        if not 0 <= node < _MAX_NODES:
            raise ValueError(f"numa must name nodes from 0 to {_MAX_NODES - 1}, not {_figure(node)}")
    return nodes


def check_name(name: object) -> str:
    """Return `name` if it may be part of a file name, with nothing in it that a path gives a meaning to."""
    name = _text("name", name)
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"name must be 1 to 200 of the characters A-Z a-z 0-9 . _ -, without '..', not {name!r}")
    return name


def check_size(size: object) -> int:
    """Return `size` in bytes; NumPy's integers are fine, bool and float are not."""
    bytes_ = check_count("size", size)
    if bytes_ > _MAX_SIZE:
        raise ValueError(f"size must be in bytes, and no address space holds {_figure(bytes_)}")
    return bytes_


def check_ranks(local_rank: object, local_world_size: object) -> tuple[int, int]:
    """Return local rank and local world size; both 0 where neither was given."""
    if local_rank is None and local_world_size is None:
        return 0, 0
    if local_rank is None or local_world_size is None:
        raise ValueError("local_rank and local_world_size belong together: give both or neither")
    world = check_count("local_world_size", local_world_size)
    if world > MAX_RANKS:
        raise ValueError(f"local_world_size must be at most {MAX_RANKS}, not {world}")
    rank = check_index("local_rank", local_rank)
    if not 0 <= rank < world:
        raise ValueError(f"local_rank must be 0 to {world - 1} where local_world_size is {world}, not {rank}")
    return rank, world


def check_directory(directory: object) -> str:
    """Return `directory` as an absolute path: a later chdir must not move the region."""
    path = check_path("directory", directory, "a directory")
    if not _is_encodable(path):
        raise ValueError(f"directory must be the path of a directory, not {path!r}")
    return path


def check_path(field: str, value: object, what: str) -> str:
    """Return the path of `what` as an absolute one, in text."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{field} must be a str or os.PathLike, not {_kind(value)}")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{field} must be text, not {_kind(path)}")
    if not path or "\0" in path:
        raise ValueError(f"{field} must be the path of {what}, not {path!r}")
    return os.path.abspath(path)


def check_span(offset: object, length: object, size: int) -> range:
    """Return the part of a region of `size` bytes that `offset` and `length` (None: to the end) name."""
    try:
        start = operator.index(offset)  # type: ignore[arg-type]  # what is no integer raises TypeError: that is the check
        end = size if length is None else start + operator.index(length)  # type: ignore[arg-type]  # likewise
    except TypeError:
        raise TypeError(f"offset and length must be ints, not {_kind(offset)} and {_kind(length)}") from None
    if not 0 <= start <= end <= size:
        raise ValueError(f"bytes {start} to {end} do not lie within the region's {size} bytes")
    return range(start, end)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} must be a str, not {_kind(value)}")
    return value


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{field} must be True or False, not {_kind(value)}")
    return value


def check_index(field: str, value: object) -> int:
    """Return `value` as an int, of any sign; bool and float are refused."""
    number = None
    # NumPy's bool has an index as well, up to 1.26.
    if not isinstance(value, bool) and getattr(getattr(value, "dtype", None), "kind", None) != "b":
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]  # what is no integer raises: that is the check
    if number is None:
        raise TypeError(f"{field} must be an int, not {_kind(value)}")
    return number


def check_count(field: str, value: object) -> int:
    """Return `value` as an int greater than 0."""
    number = check_index(field, value)
    if number <= 0:
        raise ValueError(f"{field} must be greater than 0, not {_figure(number)}")
    return number


def _seconds(field: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{field} must be seconds as a float, or None, not {_kind(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError(f"{field} must be seconds that a float can hold; None is for ever") from None
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{field} must be 0 seconds or more, not {value}")
    return seconds


def check_word(field: str, value: object, words: Any) -> Any:
    """Return `value` if it is one of `words`, a Literal type."""
    choices = get_args(words)
    if not isinstance(value, str):
        raise TypeError(f"{field} must be one of {', '.join(map(repr, choices))}, not {_kind(value)}")
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def _callable(field: str, value: object) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{field} must be callable or None, not {_kind(value)}")
    return value


def _is_encodable(path: str) -> bool:
    """Whether a path can be told to the kernel: a lone surrogate that stands for no byte cannot."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _figure(number: int) -> str:
    """Return a number as text; Python refuses to print one of thousands of digits."""
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"about {'-' if number < 0 else ''}2**{bits}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(_figure, numbers))


def _kind(value: object) -> str:
    return type(value).__name__
