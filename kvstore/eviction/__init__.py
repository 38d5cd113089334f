"""Which record a tier gives up when its budget is full. Pure: no I/O; the tier that owns a policy guards it."""

from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.lru import LeafFirstLRU
from kvstore.eviction.prior import PriorGuided

__all__ = ["EvictionPolicy", "LeafFirstLRU", "PriorGuided"]
