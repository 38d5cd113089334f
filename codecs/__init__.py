"""Codecs: a block of keys and values to bytes and back. They know layouts and tensors, never tiers or stores."""

from kvstore.codecs.base import BlockInfo, Codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.registry import auto_name, codec_by_id, codec_by_name, codec_names, is_delta
from kvstore.codecs.view import KVView

__all__ = [
    "BlockInfo",
    "Codec",
    "KVView",
    "Profile",
    "auto_name",
    "codec_by_id",
    "codec_by_name",
    "codec_names",
    "is_delta",
]
