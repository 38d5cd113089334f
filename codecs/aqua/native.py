"""AQUA-KV's loops in C++ (csrc/aqua), behind the interface of the plain ones; they write the same bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

import kvstore.codecs.aqua._aqua as _aqua
from kvstore.codecs.aqua.grids import grid
from kvstore.codecs.aqua.higgs import Bytes, Floats, Higgs, signs
from kvstore.core.rope import frequencies
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

Turns = tuple[Floats, Floats]
"""Cosines and sines of rows, `[rows * pairs]` each."""


class NativeHiggs(Higgs):
    """`Higgs`, fast: rows by themselves, or the rows of a cache with their rotations and predictions. Thread-safe."""

    def encode(self, values: Floats, bits: int) -> Bytes | None:
        rows, width = values.shape
        out = np.empty(self.size(rows, width, bits), np.uint8)
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        return out if _coder(bits, width).encode_rows(flat, out) else None

    def decode(self, data: Bytes, rows: int, width: int, bits: int) -> Floats:
        out = np.empty(rows * width, np.float32)
        wrong = _coder(bits, width).decode_rows(np.ascontiguousarray(data), out)
        if wrong is not None:
            raise CodecError(wrong)
        return out.reshape(rows, width)

    def encode_side(
        self, tensor: torch.Tensor, sinks: int, turns: Turns | None, guess: Floats | None, bits: int
    ) -> tuple[Bytes | None, Floats]:
        """Code K or V of a layer, bfloat16 `[heads, tokens, dim]`, contiguous, but for its first `sinks` tokens.

        turns: rotations that are taken away. guess: what was predicted, `[rows, width]`. Returns the coded rows (None:
        they cannot be coded), and what a decoder has of them, bf16 numbers `[rows, width]`, before their rotation.
        """
        heads, tokens, dim = tensor.shape
        rows, width = tokens - sinks, heads * dim
        out, found = np.empty(self.size(rows, width, bits), np.uint8), np.empty((rows, width), np.float32)
        cos, sin = turns or (None, None)
        ok = _coder(bits, width).encode(_words(tensor), heads, sinks, cos, sin, _flat(guess), out, found.reshape(-1))
        return out if ok else None, found

    def decode_side(
        self, tensor: torch.Tensor, sinks: int, turns: Turns | None, guess: Floats | None, data: Bytes, bits: int
    ) -> Floats:
        """Do the inverse of `encode_side`, into `tensor`. Raises `CodecError` for a scale that cannot be."""
        heads, tokens, dim = tensor.shape
        found = np.empty((tokens - sinks, heads * dim), np.float32)
        cos, sin = turns or (None, None)
        wrong = _coder(bits, heads * dim).decode(
            _words(tensor), heads, sinks, cos, sin, _flat(guess), np.ascontiguousarray(data), found.reshape(-1)
        )
        if wrong is not None:
            raise CodecError(wrong)
        return found


@lru_cache(maxsize=16)
def turns_of(rope: str, dim: int, start: int, count: int) -> Turns | None:
    """The rotations of `count` rows from position `start` on; None where keys are not rotated. Not to be written to."""
    radians = frequencies(rope, dim)
    if not len(radians):
        return None
    angle = np.arange(start, start + count, dtype=np.float64)[:, None] * radians
    return np.cos(angle).astype(np.float32).reshape(-1), np.sin(angle).astype(np.float32).reshape(-1)


@lru_cache(maxsize=64)
def _coder(bits: int, width: int) -> _aqua.Higgs:
    return _aqua.Higgs(bits, signs(width), np.ascontiguousarray(grid(bits)).reshape(-1))


def _words(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    import torch

    return tensor.view(torch.uint16).numpy().reshape(-1)


def _flat(values: Floats | None) -> Floats | None:
    return None if values is None else values.reshape(-1)
