"""A worker process of `test_shared_offload_region`: as vLLM's, it has no loop. Lines as `rank_main` has them.

Commands: hello, open, view, fill, read, cleanup.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "shared_offload_region.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shared_offload_region", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Commands:
    def hello(self) -> dict[str, Any]:
        import torch  # noqa: F401 - takes seconds: before anybody waits for us in a cohort

        return {}

    def open(self, facts: dict[str, Any]) -> dict[str, Any]:
        self.region = load_example().SharedOffloadRegion(**facts).open()
        self.views: list[Any] = []
        return {"base": self.region.base_tensor.data_ptr()}

    def view(self, width: int) -> dict[str, Any]:
        """Take the next view and say where it is."""
        view = self.region.get_view(width)
        self.views.append(view)
        return {"address": view.data_ptr(), "shape": view.shape, "strides": view.stride(), "dtype": str(view.dtype)}

    def fill(self, view: int, chunk: int, value: int) -> dict[str, Any]:
        self.views[view][chunk] = value
        return {}

    def read(self, view: int, chunk: int) -> dict[str, Any]:
        return {"values": sorted(set(self.views[view][chunk].tolist()))}

    def cleanup(self) -> dict[str, Any]:
        self.views.clear()
        self.region.cleanup()
        with open("/proc/self/maps") as maps:
            return {"mapped": [line.strip() for line in maps if "/aioshm-" in line]}


def main() -> None:
    commands = Commands()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(commands, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 - answered, not died of
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
