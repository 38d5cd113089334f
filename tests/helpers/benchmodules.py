"""Benchmarks and tools as modules, for tests of what they compute."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A module of `benchmarks`, without the repository's root on the path."""
    if "benchmarks" not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["benchmarks"])
    return importlib.import_module(f"benchmarks.{name}")


@cache
def tool(name: str) -> ModuleType:
    """A program of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
