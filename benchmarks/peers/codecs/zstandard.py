"""zstd as it is, level 3."""

from __future__ import annotations

from typing import Any

import zstandard

from benchmarks.peers.codecs.base import Bytes


class Zstandard:
    mutates_input = False

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, values: Bytes) -> Any:
        return self._compressor.compress(values)

    def decode(self, coded: Any, out: Bytes) -> Any:
        return self._decompressor.decompress(coded)


make = Zstandard
