"""ZipNN: bytes of equal meaning together, the exponents by Huffman's code."""

from __future__ import annotations

from typing import Any

from zipnn import ZipNN

from benchmarks.peers.codecs.base import Bytes


class Zipnn:
    mutates_input = True  # rotates the sign bit in place, in immutable bytes too

    def __init__(self) -> None:
        self._zipnn = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def encode(self, values: Bytes) -> Any:
        return self._zipnn.compress(memoryview(values))

    def decode(self, coded: Any, out: Bytes) -> Any:
        return self._zipnn.decompress(coded)


make = Zipnn
