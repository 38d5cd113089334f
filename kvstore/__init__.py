"""kvstore: an embedded, persistent, tiered store for the KV caches of language models."""

from kvstore.config import StoreConfig, TierConfig
from kvstore.hit import FlushResult, Hit, PutResult, SessionInfo
from kvstore.identity import ModelIdentity
from kvstore.layout import KVLayout, LayerLayout
from kvstore.session import Session
from kvstore.store import KVStore

__all__ = [
    "FlushResult",
    "Hit",
    "KVLayout",
    "KVStore",
    "LayerLayout",
    "ModelIdentity",
    "PutResult",
    "Session",
    "SessionInfo",
    "StoreConfig",
    "TierConfig",
]
