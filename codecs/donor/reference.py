"""The donor codec's exact core as a plain program: what csrc/donor/donor.h must equal.

A block's rows are predicted from the rows of the same tokens in other blocks, their keys rotated by the difference of
positions; what is left is coded as the predictive codec does (../predictive/reference.py), but that the scales of the
bins are measured and stand in the record, a byte for `GROUP` channels, and that the frequencies are part of the
format. With a `DonorModel`, what the layer before differed in says how this one will. All arithmetic is in integers,
or single operations in float32 in a fixed order, so that every machine predicts, and writes, the same bits. FORMAT.md
says it in words. Torch, tensors of any device, on the CPU; slow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.tables import frequencies
from kvstore.codecs.predictive import reference as base
from kvstore.codecs.predictive.model import CodingTables
from kvstore.codecs.rans.coder import RansDecoder
from kvstore.errors import CodecError

DAMAGE = "donor: the decoded values differ from the encoded ones: damage, or another donor"
HEADER = struct.Struct("<6I")  # bytes of raw bits of K and V, escapes of K and V, two sums
GROUP = 8  # channels of a head that share a scale
ADAPT = np.array([110, 90, 0], np.int32)  # how a row's offset follows from the two parts before
LEAST_OFFSET, MOST_OFFSET = -32, 40
MOST_SCALE = 400
LIFT = -1  # quarter octaves from the mean of absolute values to the scale
_LEAST_EXPONENT = 28  # of a pair that is rotated: smaller numbers count as if they were of this one
_BASE = struct.Struct("<h")

Tensor = torch.Tensor
Block = Sequence[tuple[Tensor, Tensor]]
"""bf16 bits of K and V of each layer, int64 [n, C]."""


@dataclass(frozen=True)
class Rows:
    """What both sides know of n rows that have a donor.

    heads: of each layer. donor: their bits there. cos, sin: int64 [n, half] in 1/16384, of the rotation of keys;
    rotated: bool [n], rows that are rotated at all; the three are None where no row is. positions: of the rows here,
    int64 [n]. model: to carry differences on; the positions must lie below `model.positions`.
    """

    heads: Sequence[int]
    donor: Block
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotated: Tensor | None = None
    positions: Tensor | None = None
    model: DonorModel | None = None

    def __len__(self) -> int:
        return len(self.donor[0][0])

    def on_cpu(self) -> Rows:
        """The same in memory of the CPU, where everything here is computed."""
        cos, sin, rotated, positions = (
            None if x is None else x.cpu() for x in (self.cos, self.sin, self.rotated, self.positions)
        )
        return Rows(self.heads, _on_cpu(self.donor), cos, sin, rotated, positions, self.model)


def _on_cpu(block: Block) -> list[tuple[Tensor, Tensor]]:
    return [(k.cpu(), v.cpu()) for k, v in block]


# -- prediction --------------------------------------------------------------------------------------------------------


def finite(bits: Tensor) -> Tensor:
    """The same bits, 0 for infinities and NaN."""
    return torch.where(((bits >> 7) & 0xFF) == 0xFF, 0, bits)


def rotated(bits: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Finite keys, int64 [n, C], rotated: pairs half a head apart share an exponent, and are rotated in integers."""
    half = cos.shape[1]
    pairs = bits.view(len(bits), -1, 2, half)
    exponent = (pairs >> 7) & 0xFF
    top = exponent.amax(2, keepdim=True).clamp(min=_LEAST_EXPONENT)
    mantissa = torch.where(exponent > 0, 128 | (pairs & 127), 0)  # subnormal numbers count as 0
    signed = torch.where(pairs >= 0x8000, -mantissa, mantissa)
    fixed = (signed << 6) >> (top - exponent).clamp(max=31)  # rounds down; 14 bits and a sign
    a, b, c, s = fixed[:, :, 0], fixed[:, :, 1], cos[:, None], sin[:, None]
    both = torch.stack([a * c - b * s, b * c + a * s], 2).float()
    return finite(upper(both * values_of((top - 27) << 7))).view_as(bits)  # 2**(top - 127 - 7 - 6 - 14)


def values_of(bits: Tensor) -> Tensor:
    return (bits << 16).int().view(torch.float32)


def upper(values: Tensor) -> Tensor:
    """The upper 16 bits of float32, int64."""
    return (values.view(torch.int32).long() >> 16) & 0xFFFF


@dataclass
class Predictor:
    """Walks over the parts of a block in order: `predict` the next one, then `take` what it was found to be."""

    rows: Rows
    _angles: base.Angles | None = None
    _from: Tensor = field(default_factory=lambda: torch.zeros(0))  # the donor's part, as a prediction
    _before: list[Tensor] = field(default_factory=list)  # inputs: K, V of the layer before
    _now: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.rows.model
        if model is not None and model.rope_fine is not None and model.rope_coarse is not None:
            assert self.rows.positions is not None
            self._angles = base.angles(model.rope_fine, model.rope_coarse, self.rows.positions)

    def predict(self, layer: int) -> Tensor:
        """Bits of the next part, which is of `layer`, int64 [n, C]."""
        which, rows = len(self._now) % 2, self.rows
        self._from = mu = finite(rows.donor[layer][which])
        if which == 0 and rows.cos is not None and rows.sin is not None and rows.rotated is not None:
            self._from = mu = torch.where(rows.rotated[:, None], rotated(mu, rows.cos, rows.sin), mu)
        if rows.model is None or layer == 0:
            return mu
        part = rows.model.parts[layer][which]
        total = base.products(part, torch.cat(self._before + self._now, 1))
        delta = base.predict(part, total, self._angles)
        return upper(values_of(mu) + values_of(finite(delta)))

    def take(self, layer: int, bits: Tensor) -> None:
        which = len(self._now)
        if self.rows.model is None:
            self._now.append(bits)
        else:
            part = self.rows.model.parts[layer][which]
            self._now.append(base.inputs_of(part, upper(values_of(bits) - values_of(self._from)), self._angles))
        if which:
            self._before, self._now = self._now, []


# -- scales ------------------------------------------------------------------------------------------------------------


def groups_of(part_width: int, heads: int) -> int:
    """Scales of a part of one token's C values in `heads` heads."""
    return heads * (-(-(part_width // heads) // GROUP))


def weights() -> Tensor:
    """float32 [73]: 2**(-offset / 4) of every offset of a row, from the least on."""
    roots = torch.tensor([0x3F800000, 0x3F5744FD, 0x3F3504F3, 0x3F1837F0], dtype=torch.int32)
    offsets = torch.arange(LEAST_OFFSET, MOST_OFFSET + 1)
    return (roots[offsets & 3] - ((offsets >> 2) << 23).int()).view(torch.float32)


def scales_of(bits: Tensor, mu: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Quarter octaves of how large the residuals are, less their rows' offsets, int64 [groups]. In float32: each
    channel is summed over the rows, then each group over its channels, one after the other."""
    n, width = bits.shape
    distance = (values_of(bits) - values_of(mu)).abs()
    distance = torch.where(distance.isfinite(), distance, 0) * weights()[offsets - LEAST_OFFSET][:, None]
    total = torch.zeros(width)
    for row in distance:
        total = total + row
    channels = torch.nn.functional.pad(total.view(heads, -1), (0, -(width // heads) % GROUP)).view(heads, -1, GROUP)
    group = torch.zeros(channels.shape[:2])
    for i in range(GROUP):
        group = group + channels[:, :, i]
    sizes = torch.full(group.shape, float(n * GROUP))
    sizes[:, -1] = float(n * (width // heads - (group.shape[1] - 1) * GROUP))
    scale = quarters(group / sizes).flatten().clamp(-MOST_SCALE, MOST_SCALE)
    return scale.clamp(min=int(scale.max()) - 255)


def quarters(sizes: Tensor) -> Tensor:
    """floor(4 * log2) of float32 above 0, and LIFT; subnormal numbers and 0 give some less than -500."""
    bits = sizes.view(torch.int32).long()
    mantissa = ((bits >> 8) & 0x7FFF) | 0x8000
    above = sum((mantissa >= bound).long() for bound in base.MANTISSA)
    return 4 * ((bits >> 23) - 127) + above + LIFT


def tables_of(scale: Tensor, heads: int, width: int) -> CodingTables:
    """What `predictive_reference` codes a part with. scale: int64 [groups]."""
    dim = width // heads
    wide = scale.view(heads, -1, 1).expand(-1, -1, GROUP).reshape(heads, -1)[:, :dim].reshape(-1)
    return CodingTables(wide.numpy().astype(np.int16), ADAPT)


def offsets_of(fits: Sequence[Tensor], count: int) -> Tensor:
    """Quarter octaves that each row of a part is scaled by, int64 [n]. fits: of the parts before."""
    return base.offsets(tables_of(torch.zeros(1, dtype=torch.long), 1, 1), fits, count)


def _packed(scale: Tensor) -> bytes:
    least = int(scale.min())
    return _BASE.pack(least) + bytes((scale - least).tolist())


# -- the payload -------------------------------------------------------------------------------------------------------


def parts_of(rows: Rows, block: Block) -> tuple[list[Tensor], list[base.Coded], list[Tensor]]:
    """Of every part: its scales, what is coded, and the bits of its prediction."""
    walk = Predictor(rows)
    scales, coded, predictions = list[Tensor](), list[base.Coded](), list[Tensor]()
    for layer, pair in enumerate(block):
        for which, bits in enumerate(pair):
            mu = walk.predict(layer)
            offset = offsets_of([c.fits for c in coded], len(rows))
            scales.append(scales_of(bits, mu, offset, rows.heads[layer]))
            part = tables_of(scales[-1], rows.heads[layer], bits.shape[1])
            coded.append(base.residuals(part, which, bits, mu, offset))
            predictions.append(mu)
            walk.take(layer, bits)
    return scales, coded, predictions


def encode(rows: Rows, block: Block) -> list[bytes]:
    """The coded layers; all scales stand before the first one's header."""
    rows, block = rows.on_cpu(), _on_cpu(block)
    scales, coded, _ = parts_of(rows, block)
    fits, parts = [c.fits for c in coded], []
    for number, bits in enumerate(x for pair in block for x in pair):
        part = tables_of(scales[number], rows.heads[number // 2], bits.shape[1])
        linear, _ = base.linear_exponent(part, offsets_of(fits[:number], len(rows)))
        parts.append((bits, linear, coded[number]))
    layers = base.pack_layers(frequencies(), parts, HEADER.pack)
    layers[0] = b"".join(map(_packed, scales)) + layers[0]
    return layers


def decode(rows: Rows, layers: Sequence[bytes]) -> list[tuple[Tensor, Tensor]]:
    """The inverse; `CodecError` unless the layers are what `encode` wrote."""
    rows = rows.on_cpu()
    n, walk = len(rows), Predictor(rows)
    scales, at = _scales_in(rows, layers[0])
    sections = [_section(data) for data in (layers[0][at:], *layers[1:])]

    def next_part(
        coder: RansDecoder, section: base.Section, layer: int, which: int, fits: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        mu = walk.predict(layer)
        part = tables_of(scales[2 * layer + which], rows.heads[layer], mu.shape[1])
        offset = offsets_of(fits, n)
        linear, quarter = base.linear_exponent(part, offset)
        distance, escaped, octaves = base.next_distances(coder, mu, linear, quarter, which)
        index = base.warp(mu, linear) + distance
        bits = base.values_at(index, linear, escaped, section.raw[which], section.escapes[which])
        walk.take(layer, bits)
        return bits, base.fits_of(offset, distance, escaped, octaves, quarter)

    return base.unpack_layers(frequencies(), sections, next_part, DAMAGE)


def _scales_in(rows: Rows, data: bytes) -> tuple[list[Tensor], int]:
    """Of every part int64 [groups], and the bytes that they take."""
    scales, at = list[Tensor](), 0
    for layer, pair in enumerate(rows.donor):
        for bits in pair:
            end = at + _BASE.size + groups_of(bits.shape[1], rows.heads[layer])
            if end > len(data):
                raise CodecError("donor: the payload ends within its scales")
            (least,) = _BASE.unpack_from(data, at)
            if not -MOST_SCALE <= least <= MOST_SCALE:
                raise CodecError("donor: the scales are out of range")
            scales.append(least + torch.tensor(list(data[at + _BASE.size : end])))
            at = end
    return scales, at


def _section(data: bytes) -> base.Section:
    if len(data) < HEADER.size:
        raise CodecError("donor: a layer is too short for its header")
    *counts, a, b = HEADER.unpack_from(data)
    return base.Section.cut("donor", data, HEADER.size, counts, (a, b))
