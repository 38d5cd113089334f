"""SGLang's storage interface without the rest of SGLang, which needs CUDA: its packages are entered empty."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")


def _enter_packages() -> None:
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        return
    root = Path(found.origin).parents[1]
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module


_enter_packages()
