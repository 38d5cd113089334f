"""pcodec: numbers by bins of their distribution. It has no bfloat16; the bits go in as unsigned integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from pcodec import ChunkConfig, standalone

from benchmarks.peers.codecs.base import Bytes


class Pcodec:
    mutates_input = False

    def __init__(self) -> None:
        self._config = ChunkConfig()

    def encode(self, values: Bytes) -> Any:
        return standalone.simple_compress(values.view(np.uint16), self._config)

    def decode(self, coded: Any, out: Bytes) -> Any:
        standalone.simple_decompress_into(coded, out.view(np.uint16))
        return out


make = Pcodec
