"""kvstore: an embedded, persistent, tiered store for the KV caches of language models.

A program calls `KVStore(path, identity, config)`, `put` and `get`; README.md shows it, ARCHITECTURE.md says which
folder does what. Names are imported when they are first used, so that `kvstore.codecs` and `kvstore.trie` work where
neither lmdb nor transformers is installed.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.config import StoreConfig, TierConfig
    from kvstore.core.approximate import Approximate
    from kvstore.core.explanation import BlockExplanation, Explanation, Reason
    from kvstore.core.identity import ModelIdentity
    from kvstore.core.layout import KVLayout, LayerLayout
    from kvstore.core.results import ClusterInfo, EraseResult, FlushResult, Hit, PutResult, SessionInfo
    from kvstore.session import Session
    from kvstore.store import KVStore

__all__ = [
    "Approximate",
    "BlockExplanation",
    "ClusterInfo",
    "EraseResult",
    "Explanation",
    "FlushResult",
    "Hit",
    "KVLayout",
    "KVStore",
    "LayerLayout",
    "ModelIdentity",
    "PutResult",
    "Reason",
    "Session",
    "SessionInfo",
    "StoreConfig",
    "TierConfig",
]

_HOMES = {
    "core.approximate": ("Approximate",),
    "config": ("StoreConfig", "TierConfig"),
    "core.explanation": ("BlockExplanation", "Explanation", "Reason"),
    "core.results": ("ClusterInfo", "EraseResult", "FlushResult", "Hit", "PutResult", "SessionInfo"),
    "core.identity": ("ModelIdentity",),
    "core.layout": ("KVLayout", "LayerLayout"),
    "session": ("Session",),
    "store": ("KVStore",),
}


logging.getLogger("kvstore").addHandler(logging.NullHandler())  # what to do with the lines is the program's to say


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"kvstore.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
