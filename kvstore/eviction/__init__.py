"""Eviction: which record a tier gives up when its budget is full.

A policy is one file of this folder and one row of `POLICIES`; `StoreConfig(eviction=NAME)` chooses it. Policies do no
I/O and take no locks: the owner of a policy guards it with a lock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvstore.eviction.adaptive import Adaptive
from kvstore.eviction.arc import LeafFirstARC
from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.leaf_first import LeafFirst
from kvstore.eviction.lfu import LeafFirstLFU
from kvstore.eviction.lru import LeafFirstLRU
from kvstore.eviction.prior import PriorGuided
from kvstore.eviction.s3fifo import LeafFirstS3FIFO

__all__ = [
    "POLICIES",
    "Adaptive",
    "EvictionPolicy",
    "LeafFirstARC",
    "LeafFirstLFU",
    "LeafFirstLRU",
    "LeafFirstS3FIFO",
    "PriorGuided",
]

POLICIES: Mapping[str, type[LeafFirst] | type[LeafFirstLRU]] = MappingProxyType(
    {
        "lru": LeafFirstLRU,
        "lfu": LeafFirstLFU,
        "s3fifo": LeafFirstS3FIFO,
        "arc": LeafFirstARC,
        "prior": PriorGuided,
        "adaptive": Adaptive,
    }
)
"""All policies by name. Each value, called without arguments, makes a new, empty policy."""
