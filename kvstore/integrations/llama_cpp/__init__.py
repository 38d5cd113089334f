"""llama.cpp: sequences of a context, and slots of a server, saved to a store and restored from it (docs/llama_cpp.md).

Names are imported when they are first used. Nothing of llama.cpp is imported before a `Library` is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.integrations.llama_cpp.cache import LlamaCache
    from kvstore.integrations.llama_cpp.identity import identity_from_gguf
    from kvstore.integrations.llama_cpp.library import Library
    from kvstore.integrations.llama_cpp.server import LlamaServer

__all__ = ["Library", "LlamaCache", "LlamaServer", "identity_from_gguf"]

_HOMES = {"LlamaCache": "cache", "LlamaServer": "server", "Library": "library", "identity_from_gguf": "identity"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
