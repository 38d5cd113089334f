"""The levels of the exact predictor as a plain program: what csrc/levels/levels.h must equal.

A part is coded in groups of 16 columns. Its sums are made as in ../reference.py; to those of a group the 8-bit
residuals of the groups before it are added, times weights of their own. Everything is in integers, but for the
conversions between bf16 and fixed point, each of one rounding. What is coded, and how, is ../reference.py's. FORMAT.md
says it in words.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvstore.codecs.predictive import reference as base
from kvstore.codecs.predictive.levels.model import GROUP, LevelModel, LevelPart, group_sizes
from kvstore.codecs.predictive.linear_model import RANGE
from kvstore.codecs.rans.coder import RansDecoder
from kvstore.errors import CodecError

MODES = {1: 21, 2: 22, 3: 23}
HEADER = struct.Struct("<7I")  # as base.HEADER

Tensor = torch.Tensor


# -- integers ----------------------------------------------------------------------------------------------------------


def clamped(x: Tensor, bits: int) -> Tensor:
    """To numbers of so many bits."""
    return x.clamp(-(1 << bits - 1), (1 << bits - 1) - 1)


def wrapped(x: Tensor) -> Tensor:
    """The lower 16 bits as a number with a sign."""
    return ((x + 0x8000) & 0xFFFF) - 0x8000


def narrowed(x: Tensor, factor: Tensor) -> Tensor:
    """8 bits of numbers of 16 bits: times factor / 2**15, rounded half up."""
    return clamped((x * factor + (1 << 14)) >> 15, 8)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: int64 [n, C] of pairs side by side in heads of D; the rotation by (cos, sin), 14 binary places more."""
    pairs = x.view(len(x), -1, cos.shape[2], 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], 3).view_as(x)


def predicted(part: LevelPart, p: Tensor, columns: slice, rotation: base.Angles | None) -> Tensor:
    """The upper 16 bits of predictions as float32, int64 [n, columns]. p: in fixed point, of these columns."""
    fix = base.tensor(part.fix[columns]).float()
    if part.rotated and rotation is not None:
        begin, end = columns.start // 2, columns.stop // 2
        heads = part.width // 2 // rotation[0].shape[2]
        cos, sin = (x.expand(-1, heads, -1).reshape(len(p), 1, -1)[:, :, begin:end] for x in rotation)
        p, fix = turned(p, cos, sin), fix + 14
    return ((p.float() * torch.exp2(-fix)).view(torch.int32).long() >> 16) & 0xFFFF


def fixed(part: LevelPart, bits: Tensor, rotation: base.Angles | None) -> Tensor:
    """Values in fixed point, of 16 bits and before the rotation. bits: int64 [n, C], bf16."""
    finite = ((bits >> 7) & 0xFF) != 0xFF
    x = torch.where(finite, bits << 16, 0).int().view(torch.float32) * torch.exp2(base.tensor(part.fix).float())
    if not part.rotated or rotation is None:
        return x.clamp(-32767, 32767).round().long()
    whole = x.clamp(-RANGE, RANGE).round().long()
    return wrapped((turned(whole, rotation[0], -rotation[1]) + (1 << 13)) >> 14)


def group_sums(part: LevelPart, total: Tensor, residuals: Tensor, number: int) -> Tensor:
    """The predictions of a group in fixed point, int64 [n, columns].

    total: int64 [n, C], sums without groups. residuals: int64 [n, GROUP * number], 8 bits, of the groups before.
    """
    columns = slice(GROUP * number, GROUP * number + GROUP)
    t = total[:, columns]
    if number and part.groups:
        weight = base.tensor(part.groups[number - 1]).double()
        t = t + (residuals.double() @ weight).long()  # exact in float64
    return clamped(t >> base.tensor(part.shift[columns]).long(), 16)


def residuals_of(part: LevelPart, values: Tensor, p: Tensor, columns: slice) -> Tensor:
    """The 8-bit residuals of a group. values, p: in fixed point, of its columns."""
    return narrowed(clamped(values - p, 16), base.tensor(part.narrow[columns]).long())


# -- the parts of a block ----------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """Goes over the parts of a block in order: `sums` of the next one, then `take` what it was found to be."""

    model: LevelModel
    tokens: Tensor
    start: int
    rotation: base.Angles | None = field(init=False)

    def __post_init__(self) -> None:
        model, positions = self.model, torch.arange(self.start, self.start + len(self.tokens))
        self.rotation = None
        if model.rope_fine is not None and model.rope_coarse is not None:
            self.rotation = base.angles(model.rope_fine, model.rope_coarse, positions)
        self._inputs: list[list[Tensor]] = []  # of every layer so far

    def sums(self, layer: int, which: int, rows: slice = slice(None)) -> Tensor:
        """Without groups, int64 [n, C], of these rows."""
        part = self.model.parts[layer][which]
        bias = base.tensor(part.bias).long().expand(len(self.tokens[rows]), -1)
        if part.row is not None:
            return bias + self._token_rows(which)[rows] * base.tensor(part.row).long()
        if part.weight is None:
            return bias
        before = [x for i in range(layer - 1, layer - 1 - self.model.reach, -1) if i >= 0 for x in self._inputs[i]]
        own = self._inputs[layer] if which else []
        inputs = torch.cat([x[rows] for x in (*before, *own)], 1)
        return bias + (inputs.double() @ base.tensor(part.weight).double()).long()

    def take(self, layer: int, which: int, values: Tensor) -> None:
        """values: the part in fixed point."""
        if which == 0:
            self._inputs.append([])
        part = self.model.parts[layer][which]
        self._inputs[layer].append(narrowed(values, base.tensor(part.gain).long()))

    def _token_rows(self, which: int) -> Tensor:
        k = self.model.parts[0][0]
        table = self.model.token_kv[:, k.width :] if which else self.model.token_kv[:, : k.width]
        known = (self.tokens >= 0) & (self.tokens < len(table))
        rows = torch.from_numpy(table[torch.where(known, self.tokens, 0).numpy()]).long() * known[:, None]
        return rows if which else in_order(rows, k, self.rotation)


def in_order(x: Tensor, part: LevelPart, rotation: base.Angles | None) -> Tensor:
    """Columns as in the cache to coding order."""
    if not part.rotated or rotation is None:
        return x
    return x.reshape(len(x), -1, 2, rotation[0].shape[2]).transpose(2, 3).reshape(x.shape)


def as_cached(x: Tensor, part: LevelPart, rotation: base.Angles | None) -> Tensor:
    """The inverse of `in_order`."""
    if not part.rotated or rotation is None:
        return x
    return x.reshape(len(x), -1, rotation[0].shape[2], 2).transpose(2, 3).reshape(x.shape)


def block_as_cached(
    block: Sequence[tuple[Tensor, Tensor]], model: LevelModel, rotation: base.Angles | None
) -> list[tuple[Tensor, Tensor]]:
    """The same of K and V of each layer."""
    pairs = [(model.parts[layer], pair) for layer, pair in enumerate(block)]
    return [(as_cached(k, parts[0], rotation), as_cached(v, parts[1], rotation)) for parts, (k, v) in pairs]


def walk_groups(
    part: LevelPart,
    total: Tensor,
    rotation: base.Angles | None,
    values: Callable[[slice, Tensor], Tensor],
) -> Tensor:
    """Goes over the groups of a part. values: gives those of some columns, in fixed point, when it is told their
    predictions (upper 16 bits). Returns the predictions of all, int64 [n, C]."""
    residuals, found = torch.zeros(len(total), 0, dtype=torch.long), []
    for number, size in enumerate(group_sizes(part.width)):
        columns = slice(GROUP * number, GROUP * number + size)
        p = group_sums(part, total, residuals, number)
        mu = predicted(part, p, columns, rotation)
        found.append(mu)
        if columns.stop < part.width:
            residuals = torch.cat([residuals, residuals_of(part, values(columns, mu), p, columns)], 1)
        else:
            values(columns, mu)
    return torch.cat(found, 1)


# -- the payload -------------------------------------------------------------------------------------------------------


def parts_of(
    model: LevelModel, tokens: Tensor, start: int, block: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, base.Coded]]:
    """Every part of a block in order: its bits, and what is coded of it, columns in coding order.

    block: bf16 bits of K and V of each layer, int64 [n, C], as cached.
    """
    walk, found = Walk(model, tokens, start), []
    fits: list[Tensor] = []
    for layer, pair in enumerate(block):
        for which, cached in enumerate(pair):
            part = model.parts[layer][which]
            bits = in_order(cached, part, walk.rotation)
            values = fixed(part, bits, walk.rotation)
            mu = walk_groups(part, walk.sums(layer, which), walk.rotation, lambda at, _, v=values: v[:, at])  # type: ignore[misc]
            coded = base.residuals(part, which, bits, mu, base.offsets(part, fits, len(tokens)))
            fits.append(coded.fits)
            found.append((bits, coded))
            walk.take(layer, which, values)
    return found


def encode(model: LevelModel, tokens: Tensor, start: int, block: Sequence[tuple[Tensor, Tensor]]) -> list[bytes]:
    """The coded layers. block: as in `parts_of`; its positions must lie below `model.positions`."""
    found = parts_of(model, tokens, start, block)
    fits, parts = [coded.fits for _, coded in found], [part for pair in model.parts for part in pair]
    coded = []
    for i, (part, (bits, one)) in enumerate(zip(parts, found, strict=True)):
        coded.append((bits, base.linear_exponent(part, base.offsets(part, fits[:i], len(tokens)))[0], one))
    return base.pack_layers(model.freqs, coded, partial(HEADER.pack, MODES[model.level]), GROUP)


def decode(model: LevelModel, tokens: Tensor, start: int, layers: Sequence[bytes]) -> list[tuple[Tensor, Tensor]]:
    """The inverse; `CodecError` unless the layers are what `encode` wrote."""
    walk = Walk(model, tokens, start)
    sections = [_section(model.level, data) for data in layers]
    block = base.unpack_layers(model.freqs, sections, partial(_decode_part, walk), columns=GROUP)
    return block_as_cached(block, model, walk.rotation)


def _decode_part(
    walk: Walk, coder: RansDecoder, section: base.Section, layer: int, which: int, fits: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(bits in coding order, fits) of the next part."""
    part, n = walk.model.parts[layer][which], len(walk.tokens)
    offset = base.offsets(part, fits, n)
    linear, quarter = base.linear_exponent(part, offset)
    source = base.ValueSource(section.raw[which], section.escapes[which])
    bits, sizes = torch.zeros(n, part.width, dtype=torch.long), []

    def values(at: slice, mu: Tensor) -> Tensor:
        distance, escaped, octaves = base.next_distances(coder, mu, linear[:, at], quarter[:, at], which)
        bits[:, at] = source.take(base.warp(mu, linear[:, at]) + distance, linear[:, at], escaped)
        sizes.append(base.sizes_of(distance, escaped, octaves, quarter[:, at]))
        return fixed(part, bits, walk.rotation)[:, at]

    walk_groups(part, walk.sums(layer, which), walk.rotation, values)
    source.finish()
    walk.take(layer, which, fixed(part, bits, walk.rotation))
    return bits, base.fits_from(offset, torch.cat(sizes, 1))


def _section(level: int, data: bytes) -> base.Section:
    if len(data) < HEADER.size:
        raise CodecError("predictive: a layer is too short for its header")
    mode, *counts, a, b = HEADER.unpack_from(data)
    if mode != MODES[level]:
        raise CodecError(f"predictive: expected a layer of mode {MODES[level]}, found mode {mode}")
    return base.Section.cut("predictive", data, HEADER.size, counts, (a, b))
