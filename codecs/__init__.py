"""Codecs: a block of keys and values to bytes and back.

A codec is a folder here (raw and zstd are short: one file) and a row in `registry`, the closed list of numbers that
stand on disk. `base` says what a codec promises, `delta` the same of codecs that need other blocks; `view` is the
tensors of a block, `profile` what was fitted to a model. Codecs may import core and each other's parts; they know
layouts and tensors, never tiers or stores.
"""

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
