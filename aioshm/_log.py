"""The logger of everything here: `aioshm`, silent until a program sets up logging."""

from __future__ import annotations

import logging

log = logging.getLogger("aioshm")
log.addHandler(logging.NullHandler())
