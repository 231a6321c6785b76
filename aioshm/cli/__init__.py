"""The command `aioshm`: its front door, which opens without the extra `cli` too, and then says how to install it."""

from __future__ import annotations

import sys

_EXTRA = frozenset({"click", "rich", "bitmath"})


def main() -> None:
    """Run the command named on the command line, and exit with its status."""
    try:
        from ._group import group
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"The command aioshm needs {missing}: install it with pip install 'aioshm[cli]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    group(prog_name="aioshm")
