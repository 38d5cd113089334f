"""blosc2: byte shuffle and zstd, level 5."""

from __future__ import annotations

from typing import Any

import blosc2

from benchmarks.peers.codecs.base import Bytes


class Blosc2Zstd:
    mutates_input = False

    def encode(self, values: Bytes) -> Any:
        return blosc2.compress2(
            values, codec=blosc2.Codec.ZSTD, clevel=5, filters=[blosc2.Filter.SHUFFLE], typesize=2, nthreads=1
        )

    def decode(self, coded: Any, out: Bytes) -> Any:
        blosc2.decompress2(coded, dst=out, nthreads=1)
        return out


make = Blosc2Zstd
