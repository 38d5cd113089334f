"""kvstore: an embedded, persistent, tiered store for the KV caches of language models.

A program calls `KVStore(path, identity, config)`, `put` and `get`; README.md shows it, ARCHITECTURE.md says which
folder does what. Names are imported when they are first used, so that `kvstore.codecs` and `kvstore.trie` work where
neither lmdb nor transformers is installed.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstore.version import __version__ as __version__

if TYPE_CHECKING:
    from kvstore.aio import AsyncKVStore
    from kvstore.config import StoreConfig, TenantConfig, TierConfig
    from kvstore.core.approximate import Approximate
    from kvstore.core.explanation import BlockExplanation, Explanation, Reason
    from kvstore.core.identity import ModelIdentity
    from kvstore.core.layout import KVLayout, LayerLayout
    from kvstore.core.results import (
        ClusterInfo,
        CompactResult,
        EraseResult,
        FlushResult,
        Hit,
        PutResult,
        RequestReport,
        SessionInfo,
    )
    from kvstore.errors import (
        BlocksLost,
        CodecError,
        ConfigError,
        CorruptStore,
        DiskError,
        FormatVersion,
        IdentityMismatch,
        KVStoreError,
        LayerLost,
        LayoutMismatch,
        MalformedEvents,
        MalformedState,
        MetadataError,
        ProfileError,
        ReadOnlyStore,
        RemoteError,
        RemoteFull,
        RemoteGarbled,
        RemoteRefused,
        RemoteTimeout,
        RemoteTooLarge,
        RemoteUnavailable,
        StoreBusy,
        StoreClosed,
        StoreForked,
        StoreLocked,
        StoreNotFound,
        UnknownCodec,
        UnsupportedCache,
        UnsupportedLength,
        UnsupportedModel,
        UnsupportedTokens,
        WriterSilent,
    )
    from kvstore.integrations.transformers.attached import Attachment, attach, detach
    from kvstore.remote_config import RemoteConfig
    from kvstore.residency.inventory import Inventory, SequenceInfo
    from kvstore.session import Session
    from kvstore.shared.store import SharedKVStore
    from kvstore.store import KVStore
    from kvstore.stored import stored_identity

__all__ = [
    "Approximate",
    "AsyncKVStore",
    "Attachment",
    "BlockExplanation",
    "BlocksLost",
    "ClusterInfo",
    "CodecError",
    "CompactResult",
    "ConfigError",
    "CorruptStore",
    "DiskError",
    "EraseResult",
    "Explanation",
    "FlushResult",
    "FormatVersion",
    "Hit",
    "IdentityMismatch",
    "Inventory",
    "KVLayout",
    "KVStore",
    "KVStoreError",
    "LayerLayout",
    "LayerLost",
    "LayoutMismatch",
    "MalformedEvents",
    "MalformedState",
    "MetadataError",
    "ModelIdentity",
    "ProfileError",
    "PutResult",
    "ReadOnlyStore",
    "Reason",
    "RemoteConfig",
    "RemoteError",
    "RemoteFull",
    "RemoteGarbled",
    "RemoteRefused",
    "RemoteTimeout",
    "RemoteTooLarge",
    "RemoteUnavailable",
    "RequestReport",
    "SequenceInfo",
    "Session",
    "SessionInfo",
    "SharedKVStore",
    "StoreBusy",
    "StoreClosed",
    "StoreConfig",
    "StoreForked",
    "StoreLocked",
    "StoreNotFound",
    "TenantConfig",
    "TierConfig",
    "UnknownCodec",
    "UnsupportedCache",
    "UnsupportedLength",
    "UnsupportedModel",
    "UnsupportedTokens",
    "WriterSilent",
    "attach",
    "detach",
    "stored_identity",
]

_HOMES = {
    "aio": ("AsyncKVStore",),
    "core.approximate": ("Approximate",),
    "config": ("StoreConfig", "TenantConfig", "TierConfig"),
    "core.explanation": ("BlockExplanation", "Explanation", "Reason"),
    "core.results": (
        "ClusterInfo",
        "CompactResult",
        "EraseResult",
        "FlushResult",
        "Hit",
        "PutResult",
        "RequestReport",
        "SessionInfo",
    ),
    "core.identity": ("ModelIdentity",),
    "core.layout": ("KVLayout", "LayerLayout"),
    "errors": (
        "BlocksLost",
        "CodecError",
        "ConfigError",
        "CorruptStore",
        "DiskError",
        "FormatVersion",
        "IdentityMismatch",
        "KVStoreError",
        "LayerLost",
        "LayoutMismatch",
        "MalformedEvents",
        "MalformedState",
        "MetadataError",
        "ProfileError",
        "ReadOnlyStore",
        "RemoteError",
        "RemoteFull",
        "RemoteGarbled",
        "RemoteRefused",
        "RemoteTimeout",
        "RemoteTooLarge",
        "RemoteUnavailable",
        "StoreBusy",
        "StoreClosed",
        "StoreForked",
        "StoreLocked",
        "StoreNotFound",
        "UnknownCodec",
        "UnsupportedCache",
        "UnsupportedLength",
        "UnsupportedModel",
        "UnsupportedTokens",
        "WriterSilent",
    ),
    "remote_config": ("RemoteConfig",),
    "residency.inventory": ("Inventory", "SequenceInfo"),
    "session": ("Session",),
    "shared.store": ("SharedKVStore",),
    "store": ("KVStore",),
    "stored": ("stored_identity",),
    "integrations.transformers.attached": ("Attachment", "attach", "detach"),
}
_COMPILE = "run `make setup` in the source tree, or `pip install kvstore-lm`, for this version of Python"

logging.getLogger("kvstore").addHandler(logging.NullHandler())  # what to do with the lines is the program's to say


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            try:
                value = globals()[name] = getattr(import_module(f"kvstore.{module}"), name)
            except ModuleNotFoundError as error:
                if re.fullmatch(r"kvstore\.(trie|codecs)\.([a-z.]+\.)?_[a-z_]+", error.name or ""):
                    raise ImportError(f"{error.name} is not compiled; {_COMPILE}", name=error.name) from error
                raise
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
