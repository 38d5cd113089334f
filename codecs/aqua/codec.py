"""Codec 5: AQUA-KV (arXiv 2501.19392). Each layer is predicted from the one before it; what is left is coded with a
few bits a value. Lossy; the published baseline that others are compared with.

Keys are predicted from the decoded keys of the previous layer, before their rotary embedding; values from the decoded
keys of their own layer and the values of the previous one. The first layer takes 4 bits without a prediction, and the
first 4 tokens of a sequence are kept as they are. Without predictors the same codec is plain HIGGS, Quanto, or round to
nearest: all layers alike, keys as the cache holds them.

A layer: a header (how, bits, backbone, 0; one byte each; in the first layer also the predictors' fingerprint, 4 bytes),
the raw first tokens of K and of V (`[heads, tokens, dim]`), then the coded rows of K and of V, a row for every token,
all heads. A layer that the backbone cannot code, or not make smaller, is raw: header, K, V.

predictors.py has the predictions; native.py the fast way for bfloat16 and HIGGS. Older layers were
predicted in double precision (`IN_DOUBLE`), and are decoded so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.codecs.aqua.higgs import Bytes, Floats
from kvstore.codecs.aqua.minmax import MinMax
from kvstore.codecs.aqua.native import NativeHiggs, Turns, turns_of
from kvstore.codecs.aqua.predictors import AquaPredictors, Guess, Prediction, predict, rounded
from kvstore.codecs.aqua.tensors import (
    LayerMemory,
    fill,
    layers_of,
    packed,
    raw_bytes,
    rows_of,
    split_layers,
    store_rows,
    widths,
)
from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.profile import NO_PROFILE
from kvstore.codecs.view import KVView
from kvstore.core.layout import SINKS
from kvstore.core.rope import rotate
from kvstore.errors import CodecError, ConfigError

FIRST_BITS = 4  # of the first layer, where the others are predicted
RAW, PLAIN, FIRST, IN_DOUBLE, PREDICTED = range(5)
_HEADER = struct.Struct("<BBBB")
_FINGERPRINT = struct.Struct("<I")


class Backbone(Protocol):
    """Codes rows of numbers, float32 `[rows, width]`. Stateless and thread-safe."""

    @property
    def number(self) -> int:
        """Number of this backbone in headers."""

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits a value that it can code with."""

    def size(self, rows: int, width: int, bits: int) -> int:
        """Return the bytes of so many coded rows."""

    def encode(self, values: Floats, bits: int) -> Bytes | None:
        """Return the coded rows; None if values are not finite, or too large for a scale."""

    def decode(self, data: Bytes, rows: int, width: int, bits: int) -> Floats:
        """Decode rows; `data` has the right size. Raises `CodecError` if it is damaged."""


BACKBONES: dict[str, Backbone] = {"higgs": NativeHiggs(), "quanto": MinMax(1, 64), "rtn": MinMax(2, None)}
_BY_NUMBER = {backbone.number: backbone for backbone in BACKBONES.values()}
Layer = tuple[Floats, Floats]
"""Decoded keys, before their rotary embedding, and values of a layer, bf16 numbers `[tokens, heads * dim]`."""


@dataclass(frozen=True)
class _CodedTokens:
    """The tokens of a block that are coded: how many are raw before them, how many they are, where they stand."""

    sinks: int
    rows: int
    positions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, info: BlockInfo) -> _CodedTokens:
        sinks = min(info.count, max(0, SINKS - info.start))
        return cls(sinks, info.count - sinks, info.start + np.arange(sinks, info.count, dtype=np.int64))


@dataclass(frozen=True)
class _LayerPieces:
    """A coded layer taken apart: K and V, raw; or the raw first tokens of K and V, then their coded rows."""

    mode: int
    bits: int
    backbone: Backbone | None
    pieces: list[Bytes]


@dataclass(frozen=True, slots=True)
class _Side:
    """K or V of a layer, and what both sides know of it.

    number: 0 for K, 1 for V. turns: the rotations, of keys that are coded without them. guess: what is expected of the
    coded rows.
    """

    part: _CodedTokens
    layer: LayerMemory
    number: int
    turns: Turns | None
    guess: Guess


class AquaCodec(Codec):
    """Lossy: 2, 3 or 4 bits a value. Decodes any bits and backbone, with the predictors it was coded with. Thread-safe.

    Args:
        predictors: of a profile; None for the backbone alone.
        bits: 2, 3 or 4 a value.
        backbone: "higgs", "quanto" (least and largest of 64 values) or "rtn" (of a token's values).
        profile: id of the profile that the predictors are of.

    Raises:
        ConfigError: names the argument that is not one of these.

    Example:
        >>> import torch
        >>> from kvstore import KVLayout
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=64)
        >>> k, v = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        >>> info = BlockInfo(layout, np.arange(64, dtype=np.uint32), start=64)
        >>> codec = AquaCodec(bits=4)
        >>> out = memoryview(bytearray(codec.bound(info)))
        >>> (size,) = codec.encode(info, KVView.of_layers(layout, [(k, v)]), out)
        >>> info.layer_bytes()[0] / size > 3.5
        True
        >>> back = torch.zeros_like(k), torch.zeros_like(v)
        >>> codec.decode(info, out[:size], [size], KVView.of_layers(layout, [back]))
        >>> torch.allclose(back[0].float(), k.float(), atol=0.5)
        True
    """

    id = 5
    name = "aqua"
    exact = False

    def __init__(
        self,
        predictors: AquaPredictors | None = None,
        bits: int = 4,
        backbone: str = "higgs",
        profile: bytes = NO_PROFILE,
    ) -> None:
        if backbone not in BACKBONES:
            raise ConfigError(f"aqua: backbone: expected one of {', '.join(BACKBONES)}, found {backbone!r}")
        if bits not in BACKBONES[backbone].bits:
            raise ConfigError(f"aqua: bits: expected one of {BACKBONES[backbone].bits}, found {bits!r}")
        self.profile = profile
        self._predictors = predictors
        self._bits = bits
        self._backbone = BACKBONES[backbone]

    def bound(self, info: BlockInfo) -> int:
        return _FINGERPRINT.size + sum(_HEADER.size + size for size in info.layer_bytes())

    def usual(self, info: BlockInfo) -> int:
        part, item = _CodedTokens.of(info), info.layout.item_bytes
        total = _FINGERPRINT.size
        for number, (shape, raw) in enumerate(zip(info.layout.layers, info.layer_bytes(), strict=True)):
            coded = sum(self._backbone.size(part.rows, width, self._bits_of(number)) for width in widths(shape))
            total += _HEADER.size + min(raw, part.sinks * sum(widths(shape)) * item + coded)
        return total

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        """See `Codec.encode`. Raises `CodecError` if the predictors are of another layout."""
        self._check_layout(info)
        raw = np.empty(block.nbytes, np.uint8)
        block.copy_to(packed(info.layout, info.count, raw))
        part, before = _CodedTokens.of(info), None
        sizes, at = [], 0
        for number, layer in enumerate(layers_of(info.layout, info.count, raw)):
            coded, before = self._encode_layer(info, number, part, layer, before)
            size = sum(map(len, coded))
            if at + size > len(out):
                return None
            sizes.append(size)
            for piece in coded:
                out[at : at + len(piece)] = piece
                at += len(piece)
        return tuple(sizes)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        starts = np.cumsum([0, *layer_sizes[:-1]]).tolist()
        return sum(payload[at] == RAW for at, size in zip(starts, layer_sizes, strict=True) if size)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """See `Codec.decode`. Raises `CodecError` also if the payload was coded with other predictors."""
        check_payload(self.name, info, payload, layer_sizes, out)
        self._check_layout(info)
        part, before = _CodedTokens.of(info), None
        layers = [self._pieces(info, number, part, x) for number, x in enumerate(split_layers(payload, layer_sizes))]
        raw = np.empty(info.count * info.layout.bytes_per_token, np.uint8)
        for number, memory in enumerate(layers_of(info.layout, info.count, raw)):
            before = self._decode_layer(info, number, part, layers[number], before, memory)
        packed(info.layout, info.count, raw).narrow(0, out.tokens).copy_to(out)

    # -- a layer -------------------------------------------------------------------------------------------------------

    def _encode_layer(
        self, info: BlockInfo, number: int, part: _CodedTokens, layer: LayerMemory, before: Layer | None
    ) -> tuple[list[bytes | memoryview], Layer | None]:
        """The coded layer in pieces, and what the next one is predicted from."""
        mode = PLAIN if self._predictors is None else PREDICTED if number else FIRST
        bits = self._bits_of(number)
        fingerprint = b"" if number else _FINGERPRINT.pack(self._fingerprint())
        pieces: list[bytes | memoryview] = [_HEADER.pack(mode, bits, self._backbone.number, 0) + fingerprint]
        if part.sinks:
            pieces += [raw_bytes(layer.tensor(side)[:, : part.sinks]) for side in (0, 1)]
        found: list[Floats] = []
        turns = self._turns(info, part, layer, mode)
        room = _HEADER.size + len(fingerprint) + layer.nbytes
        for side in (0, 1):
            guess = self._predict(mode, number, side, before, found)
            coded, decoded = self._encode_side(info, _Side(part, layer, side, None if side else turns, guess), bits)
            if coded is None:
                break
            pieces.append(coded.data)
            found.append(decoded)
        if len(found) < 2 or sum(map(len, pieces)) >= room:
            raw: list[bytes | memoryview] = [_HEADER.pack(RAW, 0, 0, 0) + fingerprint]
            raw += [side.data for side in layer.sides]
            return raw, self._raw_layer(info, part, layer)
        return pieces, None if mode == PLAIN else (found[0], found[1])

    def _encode_side(self, info: BlockInfo, side: _Side, bits: int) -> tuple[Bytes | None, Floats]:
        """The coded rows, None if they cannot be coded, and what a decoder has of them."""
        part, turns, guess = side.part, side.turns, side.guess
        none = np.empty((0, 0), np.float32)
        if not part.rows:
            return None, none
        if isinstance(self._backbone, NativeHiggs) and info.layout.dtype == "bfloat16":
            return self._backbone.encode_side(side.layer, side.number, part.sinks, turns, guess, bits)
        values, rows = rows_of(side.layer.tensor(side.number)[:, part.sinks :]), _rows(guess)
        if turns is not None:
            values = rotate(values, side.layer.shape.heads, part.positions, info.layout.rope, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            coded = self._backbone.encode(values if rows is None else values - rows, bits)
            if coded is None:
                return None, none
            decoded = self._backbone.decode(coded, len(values), values.shape[1], bits)
            return coded, rounded(decoded if rows is None else rows + decoded)

    def _pieces(self, info: BlockInfo, number: int, part: _CodedTokens, data: Bytes) -> _LayerPieces:
        """The parts of a coded layer, all of the size that they must have. Raises `CodecError`."""
        at = _HEADER.size + (0 if number else _FINGERPRINT.size)
        if len(data) < at:
            raise CodecError(f"aqua: layer {number} has {len(data)} bytes, too few for its header")
        mode, bits, kind, zero = _HEADER.unpack_from(data.data)
        if not number and _FINGERPRINT.unpack_from(data.data, _HEADER.size) != (self._fingerprint(),):
            raise CodecError("aqua: the block was coded with other predictors; use the profile that its record names")
        sides, item = widths(info.layout.layers[number]), info.layout.item_bytes
        allowed = (PLAIN,) if self._predictors is None else (PREDICTED, IN_DOUBLE) if number else (FIRST,)
        backbone = _BY_NUMBER.get(kind)
        if (mode, bits, kind, zero) == (RAW, 0, 0, 0):
            sizes = [info.count * width * item for width in sides]
        elif mode in allowed and backbone and bits in backbone.bits and not zero and part.rows:
            sizes = [part.sinks * width * item for width in sides]
            sizes += [backbone.size(part.rows, width, bits) for width in sides]
        else:
            raise CodecError(f"aqua: layer {number} has the unknown header {(mode, bits, kind, zero)}")
        if len(data) != at + sum(sizes):
            raise CodecError(f"aqua: layer {number} has {len(data)} bytes, expected {at + sum(sizes)}")
        return _LayerPieces(mode, bits, backbone, np.split(data[at:], np.cumsum(sizes)[:-1]))

    def _decode_layer(
        self,
        info: BlockInfo,
        number: int,
        part: _CodedTokens,
        layer: _LayerPieces,
        before: Layer | None,
        memory: LayerMemory,
    ) -> Layer | None:
        """Decodes into `memory`. Returns what the next layer is predicted from."""
        if layer.mode == RAW or layer.backbone is None:
            for side in (0, 1):
                memory.sides[side][:] = layer.pieces[side]
            return self._raw_layer(info, part, memory)
        found: list[Floats] = []
        turns = self._turns(info, part, memory, layer.mode)
        for side in (0, 1):
            if part.sinks:
                fill(memory.tensor(side)[:, : part.sinks], layer.pieces[side])
            guess = self._predict(layer.mode, number, side, before, found)
            coded = _Side(part, memory, side, None if side else turns, guess)
            found.append(self._decode_side(info, coded, layer.pieces[2 + side], layer.backbone, layer.bits))
        return found[0], found[1]

    def _decode_side(self, info: BlockInfo, side: _Side, data: Bytes, backbone: Backbone, bits: int) -> Floats:
        """Decodes coded rows into the side's memory. Returns what later parts are predicted from."""
        part, layer, turns = side.part, side.layer, side.turns
        if isinstance(backbone, NativeHiggs) and info.layout.dtype == "bfloat16":
            return backbone.decode_side(layer, side.number, part.sinks, turns, side.guess, data, bits)
        guess = _rows(side.guess)
        # Bytes that no encoder wrote may hold scales that add up to more than a float holds.
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = backbone.decode(data, part.rows, widths(layer.shape)[side.number], bits)
            if guess is not None:
                decoded = guess + decoded
            kept = rounded(decoded)
            if turns is not None:
                decoded = rotate(decoded, layer.shape.heads, part.positions, info.layout.rope, 1)
        store_rows(layer.tensor(side.number)[:, part.sinks :], decoded)
        return kept

    def _turns(self, info: BlockInfo, part: _CodedTokens, layer: LayerMemory, mode: int) -> Turns | None:
        """The rotations of the keys that are coded without them."""
        if mode == PLAIN or not part.rows:
            return None
        return turns_of(info.layout.rope, layer.shape.key_dim, info.start + part.sinks, part.rows)

    def _predict(self, mode: int, number: int, side: int, before: Layer | None, found: list[Floats]) -> Guess:
        """What is expected of the keys (side 0) or values (1) of a layer; `found`: its decoded keys."""
        if mode not in (PREDICTED, IN_DOUBLE) or self._predictors is None or before is None or not len(before[0]):
            return None
        inputs = [before[0]] if side == 0 else [found[0], before[1]]
        if mode == IN_DOUBLE:
            return predict(self._predictors.wide[number - 1][side], inputs)
        outputs = self._predictors.weights[number - 1][side].shape[1]
        return Prediction(self._predictors.single[number - 1][side], inputs, outputs)

    def _raw_layer(self, info: BlockInfo, part: _CodedTokens, layer: LayerMemory) -> Layer | None:
        if self._predictors is None:
            return None
        keys, values = (rows_of(layer.tensor(side)[:, part.sinks :]) for side in (0, 1))
        return rounded(rotate(keys, layer.shape.heads, part.positions, info.layout.rope, -1)), rounded(values)

    def _bits_of(self, number: int) -> int:
        return FIRST_BITS if self._predictors is not None and number == 0 else self._bits

    def _fingerprint(self) -> int:
        return 0 if self._predictors is None else self._predictors.fingerprint

    def _check_layout(self, info: BlockInfo) -> None:
        if self._predictors is not None and self._predictors.layout != info.layout:
            raise CodecError("aqua: the predictors were fitted to another layout than the block's")


def _rows(guess: Guess) -> Floats | None:
    return guess.rows() if isinstance(guess, Prediction) else guess
