"""LZ4's block format, the fast compressor."""

from __future__ import annotations

from typing import Any

import lz4.block

from benchmarks.peers.codecs.base import Bytes


class Lz4:
    mutates_input = False

    def encode(self, values: Bytes) -> Any:
        return lz4.block.compress(values)

    def decode(self, coded: Any, out: Bytes) -> Any:
        return lz4.block.decompress(coded)


make = Lz4
