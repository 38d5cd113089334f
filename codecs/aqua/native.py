"""AQUA-KV's loops in C++ (csrc/aqua), behind the interface of the plain ones; they write the same bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

import kvstore.codecs.aqua._aqua as _aqua
from kvstore.codecs.aqua.grids import grid
from kvstore.codecs.aqua.higgs import Bytes, Floats, Higgs, signs
from kvstore.codecs.aqua.predictors import Guess, Prediction
from kvstore.codecs.aqua.tensors import LayerMemory, widths
from kvstore.core.rope import frequencies
from kvstore.errors import CodecError

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
        self, layer: LayerMemory, side: int, sinks: int, turns: Turns | None, guess: Guess, bits: int
    ) -> tuple[Bytes | None, Floats]:
        """Code K (side 0) or V (1) of a layer, bfloat16, but for its first `sinks` tokens.

        turns: rotations that are taken away. guess: what is expected of the rows. Returns the coded rows (None: they
        cannot be coded), and what a decoder has of them, bf16 numbers `[rows, width]`, before their rotation.
        """
        rows, width = layer.tokens - sinks, widths(layer.shape)[side]
        out, found = np.empty(self.size(rows, width, bits), np.uint8), np.empty(rows * width, np.float32)
        cos, sin = turns or (None, None)
        ok = _coder(bits, width).encode(
            layer.words(side), layer.shape.heads, sinks, cos, sin, *_expected(guess), out, found
        )
        return out if ok else None, found.reshape(rows, width)

    def decode_side(
        self, layer: LayerMemory, side: int, sinks: int, turns: Turns | None, guess: Guess, data: Bytes, bits: int
    ) -> Floats:
        """Do the inverse of `encode_side`, into the layer. Raises `CodecError` for a scale that cannot be."""
        rows, width = layer.tokens - sinks, widths(layer.shape)[side]
        found = np.empty(rows * width, np.float32)
        cos, sin = turns or (None, None)
        wrong = _coder(bits, width).decode(
            layer.words(side), layer.shape.heads, sinks, cos, sin, *_expected(guess), np.ascontiguousarray(data), found
        )
        if wrong is not None:
            raise CodecError(wrong)
        return found.reshape(rows, width)


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


def _expected(guess: Guess) -> tuple[Floats | None, _aqua.Predictor | None, list[Floats]]:
    if isinstance(guess, Prediction):
        return None, guess.predictor, [part.reshape(-1) for part in guess.inputs]
    return None if guess is None else guess.reshape(-1), None, []
