"""The predictive codec's lossless mode as a plain program: what csrc/predictive/predictive.h and the GPU
kernels must equal.

A value is predicted from the token's id (layer 0) or from the two layers before (and K of its own, for V), in pre-RoPE
space, after the wiring of AQUA-KV (arXiv:2501.19392) with more inputs. All arithmetic is in integers, or is one
multiplication in float32, so that every machine predicts the same bits. What is coded is the distance from the
prediction on an axis of bins: as wide as a fraction of the residual's standard deviation near zero, single bf16 values
where those are wider. FORMAT.md says it in words. Torch, on any device; slow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.predictive.linear_model import FINE, RANGE, LinearPredictor
from kvstore.codecs.predictive.model import CLASSES, ESCAPE, OFFSET, CodingTables, Part, PredictiveModel
from kvstore.codecs.rans.coder import RansDecoder, RansTables
from kvstore.errors import CodecError

MODE = 4
HEADER = struct.Struct("<7I")  # mode, bytes of raw bits of K and V, escapes of K and V, two sums
_RESIDUAL = (64, 54, 45, 38)  # 64 * 2**(-i / 4)
MANTISSA = (38968, 46341, 55109)  # 2**15 * 2**(i / 4)
WHOLE = 1 << 31  # more columns than a part has

Tensor = torch.Tensor


@dataclass(frozen=True)
class Coded:
    """One part of a block, n rows of C values, between prediction and entropy coding."""

    symbols: Tensor  # [n, C]
    classes: Tensor  # [n, C]
    fits: Tensor  # [n]: how large the row's residuals were, quarter octaves: the next parts' offsets come from it


# -- prediction --------------------------------------------------------------------------------------------------------


def tensor(array: npt.NDArray[Any] | None) -> Tensor:
    """A copy: torch warns of arrays that are read-only, as those of a profile are."""
    return torch.from_numpy(np.array(array))


Angles = tuple[Tensor, Tensor]
"""cos and sin of a rotation, each int64 [n, 1, D / 2] in 1/16384."""


def angles(fine: npt.NDArray[np.int16], coarse: npt.NDArray[np.int16], positions: Tensor) -> Angles:
    """The rotation of the rotary embedding at `positions` [n], by the two tables of the model."""
    f = tensor(fine).long()[:, positions % FINE]
    c = tensor(coarse).long()[:, positions // FINE]
    cos = (c[0] * f[0] - c[1] * f[1] + 8192) >> 14
    sin = (c[1] * f[0] + c[0] * f[1] + 8192) >> 14
    return cos[:, None], sin[:, None]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: int64 [n, C] of heads of D; the rotation by (cos, sin), 14 binary places more."""
    half = cos.shape[2]
    pairs = x.view(len(x), -1, 2 * half)
    a, b = pairs[..., :half], pairs[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 2).view_as(x)


def first_sums(part: Part, table: npt.NDArray[np.int8], tokens: Tensor) -> Tensor:
    """Layer 0: the sums of `predict`, int64 [n, C]. table: int8 [vocabulary, C], the part's columns."""
    known = (tokens >= 0) & (tokens < len(table))  # others: no row, the bias alone
    rows = torch.from_numpy(table[torch.where(known, tokens, 0).numpy()]).long()
    return tensor(part.bias).long() + 256 * rows * known[:, None]


def sums(part: Part, inputs: Tensor) -> Tensor:
    """Other layers: the same. inputs: int64 [n, inputs], -127..127."""
    return tensor(part.bias).long() + products(part, inputs)


def products(part: LinearPredictor, inputs: Tensor) -> Tensor:
    """The same without bias."""
    # Sums of products of 8 bits are exact in float64.
    return (inputs.double() @ tensor(part.weight).double()).long()


def predict(part: LinearPredictor, total: Tensor, rotation: Angles | None) -> Tensor:
    """The upper 16 bits of the prediction as float32, int64 [n, C]. rotation: of K that was
    rotated."""
    scaled = total.float() * tensor(part.out_scale)
    if part.fix is not None and rotation is not None:
        fixed = scaled.clamp(-RANGE, RANGE).round().long()
        scaled = rotated(fixed, *rotation).float() * torch.exp2(-(tensor(part.fix).float() + 14))
    return (scaled.view(torch.int32).long() >> 16) & 0xFFFF


def inputs_of(part: LinearPredictor, bits: Tensor, rotation: Angles | None) -> Tensor:
    """The 8-bit inputs, int64 [n, C], that a decoded part (bf16 bits, int64 [n, C]) gives to later parts."""
    finite = ((bits >> 7) & 0xFF) != 0xFF
    x = torch.where(finite, bits << 16, 0).int().view(torch.float32)
    scale = tensor(part.in_scale)
    if part.fix is None or rotation is None:
        return (x * scale).clamp(-127, 127).round().long()
    fixed = (x * torch.exp2(tensor(part.fix).float())).clamp(-RANGE, RANGE).round().long()
    return (rotated(fixed, rotation[0], -rotation[1]).float() * scale).clamp(-127, 127).round().long()


@dataclass
class Predictor:
    """Walks over the parts of a block in order: `predict` the next one, then `take` what it was found to be."""

    model: PredictiveModel
    tokens: Tensor
    start: int

    def __post_init__(self) -> None:
        model, positions = self.model, torch.arange(self.start, self.start + len(self.tokens))
        self._angles = None
        if model.rope_fine is not None and model.rope_coarse is not None:
            self._angles = angles(model.rope_fine, model.rope_coarse, positions)
        self._before: list[Tensor] = []  # inputs: K, V of the layer before the last one, K, V of the last one
        self._now: list[Tensor] = []

    def predict(self, layer: int) -> Tensor:
        """The next part, which is of `layer`."""
        which = len(self._now)
        part = self.model.parts[layer][which]
        if layer == 0:
            split = self.model.parts[0][0].width
            table = self.model.token_kv[:, split:] if which else self.model.token_kv[:, :split]
            total = first_sums(part, table, self.tokens)
        else:
            total = sums(part, torch.cat(self._before[-2:] + self._before[:-2] + self._now, 1))
        return predict(part, total, self._angles)

    def take(self, layer: int, bits: Tensor) -> None:
        self._now.append(inputs_of(self.model.parts[layer][len(self._now)], bits, self._angles))
        if len(self._now) == 2:
            self._before = (self._before + self._now)[-4:]
            self._now = []


# -- the axis of bins --------------------------------------------------------------------------------------------------


def linear_exponent(part: CodingTables, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(E_lin, quarter octave), [n, C]: from the exponent E_lin on, a bin is one bf16 value; below, as wide as there."""
    scale = (tensor(part.scale).long() + offsets[:, None]).clamp(-440, 440)
    return ((scale >> 2) - 3 + 134).clamp(8, 254), scale & 3


def warp(bits: Tensor, linear: Tensor) -> Tensor:
    """The bin of bf16 bits; those of negative values are negative."""
    magnitude, exponent = bits & 0x7FFF, (bits >> 7) & 0xFF
    shift = linear - exponent
    below = torch.where((exponent == 0) | (shift > 7), 0, (128 | (bits & 127)) >> shift.clamp(0, 7))
    index = torch.where(exponent >= linear, 128 + magnitude - (linear << 7), below)
    return torch.where(bits >= 0x8000, -1 - index, index)


def octaves_above(mu: Tensor, linear: Tensor) -> Tensor:
    """By how many octaves predictions lie above the linear exponent, 0 to 8."""
    return (((mu >> 7) & 0xFF) - linear).clamp(0, 8)


def fits_of(offsets: Tensor, residual: Tensor, escaped: Tensor, octaves: Tensor, quarter: Tensor) -> Tensor:
    """How large the residuals of each row were, in quarter octaves above the calibrated scales."""
    return fits_from(offsets, sizes_of(residual, escaped, octaves, quarter))


def sizes_of(residual: Tensor, escaped: Tensor, octaves: Tensor, quarter: Tensor) -> Tensor:
    """How large residuals were, 0 to 255 each."""
    ratio = torch.tensor(_RESIDUAL)[quarter]
    return torch.where(escaped, 255, ((residual.abs() << octaves) * ratio >> 6).clamp(max=255))


def fits_from(offsets: Tensor, sizes: Tensor) -> Tensor:
    """sizes: of all columns, [n, C]."""
    mean = (sizes.sum(1) * 64 // sizes.shape[1]).clamp(min=1)
    return offsets + log2_quarters(mean) - 34


def log2_quarters(v: Tensor) -> Tensor:
    """floor(4 * log2(v)) of integers from 1 to 2**31 - 1."""
    top = torch.frexp(v.double())[1].long() - 1
    m = torch.where(top > 15, v >> (top - 15).clamp(min=0), v << (15 - top).clamp(min=0))
    return 4 * top + sum((m >= bound).long() for bound in MANTISSA)


def offsets(part: CodingTables, before: Sequence[Tensor], count: int) -> Tensor:
    """Quarter octaves that each row of this part is scaled by, int64 [n]; before: the fits of the parts before."""
    a, b, c = (int(x) for x in part.adapt)
    none = torch.zeros(count, dtype=torch.long)
    one, two = ([none, none, *before])[-1], ([none, none, *before])[-2]
    return ((a * one + b * two + c + 128) >> 8).clamp(-32, 40)


def residuals(part: CodingTables, which: int, bits: Tensor, mu: Tensor, offset: Tensor) -> Coded:
    """Symbols and classes of a part. bits, mu: int64 [n, C]."""
    linear, quarter = linear_exponent(part, offset)
    octaves = octaves_above(mu, linear)
    distance = warp(bits, linear) - warp(mu, linear)
    escaped = (distance < -OFFSET) | (distance >= OFFSET)
    symbols = torch.where(escaped, ESCAPE, distance + OFFSET)
    return Coded(symbols, 4 * octaves + quarter + CLASSES * which, fits_of(offset, distance, escaped, octaves, quarter))


def raw_bits(bits: Tensor, linear: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(value, number of bits, whether the whole value is an escape), each [n, C]: what a symbol leaves open."""
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 127
    shift = linear - exponent
    gap = shift - 8
    deep = (exponent == 0) | (shift > 7)
    near = (exponent > 0) & (gap < 7)
    count = torch.where(deep, 10, shift.clamp(0, 7))
    value = torch.where(deep, torch.where(near, gap | mantissa << 3, 7), mantissa & ((1 << shift.clamp(0, 7)) - 1))
    escaped = symbols == ESCAPE
    return (
        torch.where(escaped, 0, value),
        torch.where(escaped, 0, count),
        escaped | (deep & ~near),
    )


# -- the payload -------------------------------------------------------------------------------------------------------


def parts_of(model: PredictiveModel, tokens: Tensor, start: int, block: Sequence[tuple[Tensor, Tensor]]) -> list[Coded]:
    """Every part of a block in order. block: bf16 bits of K and V of each layer, int64 [n, C]."""
    walk = Predictor(model, tokens, start)
    coded: list[Coded] = []
    for layer, pair in enumerate(block):
        for which, bits in enumerate(pair):
            part, mu = model.parts[layer][which], walk.predict(layer)
            offset = offsets(part, [c.fits for c in coded], len(tokens))
            coded.append(residuals(part, which, bits, mu, offset))
            walk.take(layer, bits)
    return coded


def encode(model: PredictiveModel, tokens: Tensor, start: int, block: Sequence[tuple[Tensor, Tensor]]) -> list[bytes]:
    """The coded layers. block: as in `parts_of`; its positions must lie below `model.positions`."""
    coded = parts_of(model, tokens, start, block)
    fits, parts = [c.fits for c in coded], [part for pair in model.parts for part in pair]
    linear = [linear_exponent(part, offsets(part, fits[:i], len(tokens)))[0] for i, part in enumerate(parts)]
    bits = [x for pair in block for x in pair]
    return pack_layers(model.freqs, list(zip(bits, linear, coded, strict=True)), partial(HEADER.pack, MODE))


def decode(model: PredictiveModel, tokens: Tensor, start: int, layers: Sequence[bytes]) -> list[tuple[Tensor, Tensor]]:
    """The inverse; `CodecError` unless the layers are what `encode` wrote."""
    n, walk = len(tokens), Predictor(model, tokens, start)

    def next_part(
        coder: RansDecoder, section: Section, layer: int, which: int, fits: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        part, mu = model.parts[layer][which], walk.predict(layer)
        offset = offsets(part, fits, n)
        linear, quarter = linear_exponent(part, offset)
        distance, escaped, octaves = next_distances(coder, mu, linear, quarter, which)
        bits = values_at(warp(mu, linear) + distance, linear, escaped, section.raw[which], section.escapes[which])
        walk.take(layer, bits)
        return bits, fits_of(offset, distance, escaped, octaves, quarter)

    return unpack_layers(model.freqs, [_section(data) for data in layers], next_part)


def pack_layers(
    freqs: npt.NDArray[np.uint16],
    parts: Sequence[tuple[Tensor, Tensor, Coded]],
    header: Callable[..., bytes],
    columns: int = WHOLE,
) -> list[bytes]:
    """The coded layers.

    parts: of K and V of each layer: bits, linear exponents, and what is coded. header: makes a layer's from four counts
    and two sums. columns: so many stand together in the stream, row after row.
    """
    symbols = [byte_array(x) for _, _, coded in parts for x in torch.split(coded.symbols, columns, 1)]
    classes = [byte_array(x) for _, _, coded in parts for x in torch.split(coded.classes, columns, 1)]
    stream, ends = RansTables(freqs, 12).encode_parts(symbols, classes)
    layers, begin, pieces = [], 0, 0
    for pair in zip(parts[::2], parts[1::2], strict=True):
        raws, escapes = [], []
        for bits, linear, coded in pair:
            value, count, whole = (in_stream(x, columns) for x in raw_bits(bits, linear, coded.symbols))
            raws.append(pack_bits(value.tolist(), count.tolist()))
            escapes.append(np.asarray(in_stream(bits, columns)[whole].tolist(), "<u2").tobytes())
            pieces += len(torch.split(bits, columns, 1))
        counts = [*map(len, raws), *(len(e) // 2 for e in escapes)]
        sums = checksums([in_stream(bits, columns) for bits, _, _ in pair])
        end = ends[pieces - 1]
        layers.append(header(*counts, *sums) + b"".join([*raws, *escapes, stream[begin:end]]))
        begin = end
    return layers


def unpack_layers(
    freqs: npt.NDArray[np.uint16],
    sections: Sequence[Section],
    next_part: Callable[[RansDecoder, Section, int, int, Sequence[Tensor]], tuple[Tensor, Tensor]],
    damage: str = "predictive: the decoded values differ from the encoded ones",
    columns: int = WHOLE,
) -> list[tuple[Tensor, Tensor]]:
    """The bits of K and V of each layer. `CodecError`, which says `damage`, if the sums are others.

    next_part: of the coder, a layer's section, the layer, 0 for K or 1 for V, and the fits of the parts before: the
    bits of the part, and its fits. columns: as of `pack_layers`.
    """
    coder = RansTables(freqs, 12).decoder(b"".join(section.words for section in sections))
    fits: list[Tensor] = []
    block = []
    for layer, section in enumerate(sections):
        found = []
        for which in range(2):
            bits, fit = next_part(coder, section, layer, which, fits)
            fits.append(fit)
            found.append(bits)
        if checksums([in_stream(bits, columns) for bits in found]) != section.sums:
            raise CodecError(damage)
        block.append((found[0], found[1]))
    coder.finish()
    return block


def next_distances(
    coder: RansDecoder, mu: Tensor, linear: Tensor, quarter: Tensor, which: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How many bins the next values lie from their predictions, which of them are escapes, and the octaves of the
    predictions above the linear exponents; [n, C] as mu, linear and quarter. which: 0 for K, 1 for V."""
    octaves = octaves_above(mu, linear)
    classes = byte_array(4 * octaves + quarter + CLASSES * which)
    symbols = torch.from_numpy(coder.part(classes, mu.numel())).long().view(mu.shape)
    return symbols - OFFSET, symbols == ESCAPE, octaves


def in_stream(x: Tensor, columns: int) -> Tensor:
    """The values of a part, flat, in the order of the stream: `columns` columns after the others, rows of each."""
    return torch.cat([some.flatten() for some in torch.split(x, columns, 1)])


@dataclass(frozen=True)
class Section:
    """A layer of a payload, taken apart. Pairs: of K and V."""

    raw: tuple[bytes, bytes]
    escapes: tuple[list[int], list[int]]
    words: bytes
    sums: tuple[int, int]

    @classmethod
    def cut(cls, codec: str, data: bytes, begin: int, counts: Sequence[int], sums: tuple[int, int]) -> Section:
        """begin: where the header ends. counts: bytes of raw bits of K and V, then numbers of escapes. codec: for
        errors."""
        raw_k, raw_v, escapes_k, escapes_v = counts
        ends = np.cumsum([begin, raw_k, raw_v, 2 * escapes_k, 2 * escapes_v]).tolist()
        if ends[-1] > len(data):
            raise CodecError(f"{codec}: a layer is shorter than its header says")
        k, v = (np.frombuffer(data[i:j], "<u2").tolist() for i, j in (ends[2:4], ends[3:5]))
        return cls((data[ends[0] : ends[1]], data[ends[1] : ends[2]]), (k, v), data[ends[4] :], sums)


def _section(data: bytes) -> Section:
    if len(data) < HEADER.size:
        raise CodecError("predictive: a layer is too short for its header")
    mode, *counts, a, b = HEADER.unpack_from(data)
    if mode != MODE:
        raise CodecError(f"predictive: expected a layer of mode {MODE}, found mode {mode}")
    return Section.cut("predictive", data, HEADER.size, counts, (a, b))


def values_at(index: Tensor, linear: Tensor, escaped: Tensor, raw: bytes, escapes: list[int]) -> Tensor:
    """bf16 bits of the bins `index`, with what the bins leave open from `raw` and `escapes`; all of both is used."""
    source = ValueSource(raw, escapes)
    found = source.take(index, linear, escaped)
    source.finish()
    return found


class ValueSource:
    """What bins leave open of the values of a part: raw bits and escapes, taken in order."""

    def __init__(self, raw: bytes, escapes: list[int]) -> None:
        self._bits, self._bytes = int.from_bytes(raw, "little"), len(raw)
        self._at, self._left = 0, iter(escapes)

    def take(self, index: Tensor, linear: Tensor, escaped: Tensor) -> Tensor:
        """bf16 bits of the next bins."""
        found = []
        try:
            for i, lin, whole in zip(*(x.flatten().tolist() for x in (index, linear, escaped)), strict=True):
                sign, i = (0x8000, -1 - i) if i < 0 else (0, i)
                found.append(next(self._left) if whole else self._value(sign, i, lin))
        except StopIteration:
            raise CodecError("predictive: a layer has too few escapes") from None
        return torch.tensor(found).view(index.shape)

    def _value(self, sign: int, i: int, lin: int) -> int:
        if i >= 128:
            if i - 128 + (lin << 7) > 0x7FFF:
                raise CodecError("predictive: a value is too large for bfloat16")
            return sign | i - 128 + (lin << 7)
        if i > 0:
            shift = 8 - i.bit_length()
            return sign | (lin - shift) << 7 | (i << shift & 127) | self._raw(shift)
        gap, mantissa = self._raw(3), self._raw(7)
        if gap < 7 and lin - 8 - gap < 1:
            raise CodecError("predictive: a value is too small for bfloat16")
        return next(self._left) if gap == 7 else sign | (lin - 8 - gap) << 7 | mantissa

    def _raw(self, count: int) -> int:
        self._at += count
        return self._bits >> self._at - count & (1 << count) - 1

    def finish(self) -> None:
        """Raises `CodecError` if anything is left over."""
        if (self._at + 7) // 8 != self._bytes or next(self._left, None) is not None:
            raise CodecError("predictive: a layer has raw bits or escapes left over")


def byte_array(x: Tensor) -> npt.NDArray[np.uint8]:
    """Numbers from 0 to 255, flat."""
    flat: npt.NDArray[np.uint8] = x.flatten().to(torch.uint8).numpy()
    return flat


def pack_bits(values: list[int], counts: list[int]) -> bytes:
    """Numbers of so many bits each without gaps, lowest bits first."""
    text, at = 0, 0
    for value, count in zip(values, counts, strict=True):
        text |= value << at
        at += count
    return text.to_bytes((at + 7) // 8, "little")


def checksums(pair: Sequence[Tensor]) -> tuple[int, int]:
    """Of the values of K and V, and of the values times their numbers from 1, modulo 2**32."""
    values = torch.cat([x.flatten() for x in pair])
    weights = torch.arange(1, len(values) + 1)
    return int(values.sum()) & 0xFFFFFFFF, int((values * weights).sum()) & 0xFFFFFFFF
