"""Asyncio-native allocation of host memory that many processes share.

Everything public is here; modules with an underscore are not. Names are loaded when they are first used, so that
`import aioshm` costs next to nothing where it is only named in an annotation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._cohort import Cohort as Cohort
    from ._columns import BlockCursor as BlockCursor
    from ._errors import AioshmError as AioshmError
    from ._errors import CohortEnvironmentError as CohortEnvironmentError
    from ._errors import HugePagesUnavailableError as HugePagesUnavailableError
    from ._errors import InsufficientMemoryError as InsufficientMemoryError
    from ._errors import InsufficientSpaceError as InsufficientSpaceError
    from ._errors import JoinTimeoutError as JoinTimeoutError
    from ._errors import PeerLostError as PeerLostError
    from ._errors import RankInUseError as RankInUseError
    from ._errors import RegionAccessError as RegionAccessError
    from ._errors import RegionClosedError as RegionClosedError
    from ._errors import RegionMismatchError as RegionMismatchError
    from ._errors import RegionRemovedError as RegionRemovedError
    from ._errors import ShortFileError as ShortFileError
    from ._errors import UnsuitableDirectoryError as UnsuitableDirectoryError
    from ._errors import UnsupportedPlatformError as UnsupportedPlatformError
    from ._layout import BlockLayout as BlockLayout
    from ._loading import load_from as load_from
    from ._open import open_region as open_region
    from ._picture import DirectoryReport as DirectoryReport
    from ._picture import HugePagesReport as HugePagesReport
    from ._picture import MemoryLevelReport as MemoryLevelReport
    from ._picture import PreflightReport as PreflightReport
    from ._picture import preflight as preflight
    from ._progress import Progress as Progress
    from ._region import Region as Region
    from ._report import OpenReport as OpenReport

__all__ = [
    "AioshmError",
    "BlockCursor",
    "BlockLayout",
    "Cohort",
    "CohortEnvironmentError",
    "DirectoryReport",
    "HugePagesReport",
    "HugePagesUnavailableError",
    "InsufficientMemoryError",
    "InsufficientSpaceError",
    "JoinTimeoutError",
    "MemoryLevelReport",
    "OpenReport",
    "PeerLostError",
    "PreflightReport",
    "Progress",
    "RankInUseError",
    "Region",
    "RegionAccessError",
    "RegionClosedError",
    "RegionMismatchError",
    "RegionRemovedError",
    "ShortFileError",
    "UnsuitableDirectoryError",
    "UnsupportedPlatformError",
    "load_from",
    "open_region",
    "preflight",
]

__version__ = "0.1.0"

_HOMES = {
    "BlockCursor": "_columns",
    "BlockLayout": "_layout",
    "Cohort": "_cohort",
    "DirectoryReport": "_picture",
    "HugePagesReport": "_picture",
    "MemoryLevelReport": "_picture",
    "OpenReport": "_report",
    "PreflightReport": "_picture",
    "Progress": "_progress",
    "Region": "_region",
    "load_from": "_loading",
    "open_region": "_open",
    "preflight": "_picture",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("." + _HOMES.get(name, "_errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
