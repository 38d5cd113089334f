"""The donor codec's mode in groups as a plain program: what csrc/donor/groups.h must equal.

What a row differs in from its donor's is made larger or smaller by a power of two of its own, so that rows that hardly
differ, and rows that differ much, look alike to one predictor: a level of the exact one
(../../predictive/levels/reference.py). What it predicts is added to what the donor predicts, and the distance is coded
as there, group after group, by scales that the model has and the record corrects. Torch, on the CPU; slow. FORMAT.md
says it in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.codecs.donor import reference as donor
from kvstore.codecs.predictive import reference as base
from kvstore.codecs.predictive.levels import reference as levels
from kvstore.codecs.predictive.levels.model import GROUP, LevelModel, LevelPart, group_sizes
from kvstore.codecs.predictive.model import CodingTables
from kvstore.codecs.rans.coder import RansDecoder
from kvstore.errors import CodecError

SIZE = 18
"""Quarter octaves of what a row's inputs come to at most, in the mean."""
LEAST_SHIFT, MOST_SHIFT = -32, 31
_LIFT = donor.LIFT

Tensor = torch.Tensor
Block = donor.Block


@dataclass
class Walk:
    """The parts of a block in order: what donors predict, and what the model adds to that.

    rows: see `donor.reference.Rows`; their model is not looked at. shifts: int64 [n].
    """

    rows: donor.Rows
    model: LevelModel
    shifts: Tensor

    def __post_init__(self) -> None:
        assert self.rows.positions is not None
        self.walk = levels.Walk(self.model, torch.full((len(self.rows),), -1), 0)
        self.rotation = None
        if self.model.rope_fine is not None and self.model.rope_coarse is not None:
            self.rotation = base.angles(self.model.rope_fine, self.model.rope_coarse, self.rows.positions)
        self.walk.rotation = self.rotation
        self.grown = torch.exp2(self.shifts.float())[:, None]

    def donors(self, layer: int, which: int) -> Tensor:
        """What the donors say of a part, bits in coding order."""
        return self.in_order(predicted_by_donors(self.rows, layer, which), layer, which)

    def in_order(self, bits: Tensor, layer: int, which: int) -> Tensor:
        return levels.in_order(bits, self.model.parts[layer][which], self.rotation)

    def added(self, mu: Tensor, delta: Tensor) -> Tensor:
        """Predictions: what donors say, and by how much it is to differ. Bits."""
        return donor.upper(donor.values_of(mu) + donor.values_of(donor.finite(delta)) * (1 / self.grown))

    def differences(self, bits: Tensor, mu: Tensor, layer: int, which: int) -> Tensor:
        """In fixed point."""
        grown = donor.upper((donor.values_of(bits) - donor.values_of(mu)) * self.grown)
        return levels.fixed(self.model.parts[layer][which], grown, self.rotation)


def predicted_by_donors(rows: donor.Rows, layer: int, which: int) -> Tensor:
    """Bits, int64 [n, C], as cached."""
    mu = donor.finite(rows.donor[layer][which])
    if which == 0 and rows.cos is not None and rows.sin is not None and rows.rotated is not None:
        return torch.where(rows.rotated[:, None], donor.rotated(mu, rows.cos, rows.sin), mu)
    return mu


# -- what stands before the layers -------------------------------------------------------------------------------------


def shifts_of(rows: donor.Rows, model: LevelModel, block: Block) -> Tensor:
    """Of every row, int64 [n]: from how large its differences are in V of all layers but the first, in steps of inputs.

    In float32: a sum for each column of a group over the parts, then over these columns."""
    sums, values = torch.zeros(len(rows), GROUP), 0
    for layer in range(1, len(block)):
        bits, mu = block[layer][1], donor.finite(rows.donor[layer][1])
        distance = (donor.values_of(bits) - donor.values_of(mu)).abs()
        distance = torch.where(distance.isfinite(), distance, 0) * float(weight(-unit_of(model.parts[layer][1])))
        for group in torch.split(distance, GROUP, 1):
            sums[:, : group.shape[1]] += group
        values += bits.shape[1]
    if not values:
        return torch.zeros(len(rows), dtype=torch.long)
    total = torch.zeros(len(rows))
    for column in range(GROUP):
        total = total + sums[:, column]
    size = quarters(total / torch.tensor(float(values)))
    return ((SIZE - size) >> 2).clamp(LEAST_SHIFT, MOST_SHIFT)


def unit_of(part: LevelPart) -> int:
    """Quarter octaves of the steps of a part's inputs, in one unit of its values: the mean over its columns."""
    gain = base.log2_quarters(base.tensor(part.gain).long().clamp(min=1))
    return int((4 * base.tensor(part.fix).long() + gain - 60).sum()) // part.width


def weight(quarters: Tensor | int) -> Tensor:
    """2**(-quarters / 4), float32."""
    quarters = torch.as_tensor(quarters)
    roots = torch.tensor([0x3F800000, 0x3F5744FD, 0x3F3504F3, 0x3F1837F0], dtype=torch.int32)
    return (roots[quarters & 3] - ((quarters >> 2) << 23).int()).view(torch.float32)


def quarters(sizes: Tensor) -> Tensor:
    """floor(4 * log2) of float32 above 0; 0 gives some less than -500."""
    return donor.quarters(sizes) - _LIFT


def corrections_of(part: LevelPart, bits: Tensor, mu: Tensor, offsets: Tensor) -> Tensor:
    """Quarter octaves that the scales of each group are above the model's, int64 [groups]."""
    distance = (donor.values_of(bits) - donor.values_of(mu)).abs()
    distance = torch.where(distance.isfinite(), distance, 0) * weight(offsets)[:, None]
    total = torch.zeros(part.width)
    for row in distance:
        total = total + row
    total = total * weight(base.tensor(part.scale).long())
    found = []
    for group in torch.split(total, GROUP):
        size = torch.zeros(())
        for column in group:
            size = size + column
        found.append(quarters(size / torch.tensor(float(len(bits) * len(group)))) + _LIFT)
    return torch.stack(found).clamp(-128, 127)


def tables_of(part: LevelPart, corrections: Tensor) -> CodingTables:
    """What a part is coded with."""
    sizes = torch.tensor(group_sizes(part.width))
    scale = base.tensor(part.scale).long() + torch.repeat_interleave(corrections, sizes)
    return CodingTables(scale.numpy().astype(np.int16), part.adapt)


# -- the payload -------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """A part as it is coded, columns in coding order. offsets: of rows, their shifts included."""

    bits: Tensor
    tables: CodingTables
    corrections: Tensor
    offsets: Tensor
    coded: base.Coded


def parts_of(rows: donor.Rows, model: LevelModel, shifts: Tensor, block: Block) -> list[_Part]:
    """Every part of a block. block: bits as cached."""
    walk, found, fits = Walk(rows, model, shifts), list[_Part](), list[Tensor]()
    for layer, pair in enumerate(block):
        for which, cached in enumerate(pair):
            part, bits, mu = model.parts[layer][which], walk.in_order(cached, layer, which), walk.donors(layer, which)
            values = walk.differences(bits, mu, layer, which)
            delta = levels.walk_groups(
                part,
                walk.walk.sums(layer, which),
                walk.rotation,
                lambda at, _, v=values: v[:, at],  # type: ignore[misc]
            )
            walk.walk.take(layer, which, values)
            mu = walk.added(mu, delta)
            own = base.offsets(part, fits, len(rows))
            offsets = own - 4 * shifts
            corrections = corrections_of(part, bits, mu, offsets)
            tables = tables_of(part, corrections)
            coded = base.residuals(tables, which, bits, mu, offsets)
            fits.append(coded.fits + 4 * shifts)  # of what is left when the shifts are taken out
            found.append(_Part(bits, tables, corrections, offsets, coded))
    return found


def encode(rows: donor.Rows, model: LevelModel, block: Block) -> list[bytes]:
    """The coded layers; shifts and corrections stand before the first one's header."""
    rows, block = rows.on_cpu(), [(k.cpu(), v.cpu()) for k, v in block]
    shifts = shifts_of(rows, model, block)
    found = parts_of(rows, model, shifts, block)
    coded = [(p.bits, base.linear_exponent(p.tables, p.offsets)[0], p.coded) for p in found]
    layers = base.pack_layers(model.freqs, coded, donor.HEADER.pack, GROUP)
    before = torch.cat([shifts, *(p.corrections for p in found)])
    layers[0] = before.to(torch.int8).numpy().tobytes() + layers[0]
    return layers


def decode(rows: donor.Rows, model: LevelModel, layers: Sequence[bytes]) -> list[tuple[Tensor, Tensor]]:
    """The inverse; `CodecError` unless the layers are what `encode` wrote."""
    rows = rows.on_cpu()
    shifts, corrections, at = _before(rows, model, layers[0])
    walk = Walk(rows, model, shifts)
    sections = [_section(data) for data in (layers[0][at:], *layers[1:])]

    def next_part(
        coder: RansDecoder, section: base.Section, layer: int, which: int, fits: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        tables = tables_of(model.parts[layer][which], corrections[2 * layer + which])
        return _decode_part(walk, layer, which, tables, coder, section, fits)

    block = base.unpack_layers(model.freqs, sections, next_part, donor.DAMAGE, GROUP)
    return levels.block_as_cached(block, model, walk.rotation)


def _decode_part(
    walk: Walk,
    layer: int,
    which: int,
    tables: CodingTables,
    coder: RansDecoder,
    section: base.Section,
    fits: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """(bits in coding order, fits) of the next part."""
    part, n, mu = walk.model.parts[layer][which], len(walk.rows), walk.donors(layer, which)
    own = base.offsets(part, fits, n)
    offsets = own - 4 * walk.shifts
    linear, quarter = base.linear_exponent(tables, offsets)
    source = base.ValueSource(section.raw[which], section.escapes[which])
    bits, sizes = torch.zeros(n, part.width, dtype=torch.long), []

    def values(at: slice, delta: Tensor) -> Tensor:
        predicted = walk.added(mu[:, at], delta)
        distance, escaped, octaves = base.next_distances(coder, predicted, linear[:, at], quarter[:, at], which)
        bits[:, at] = source.take(base.warp(predicted, linear[:, at]) + distance, linear[:, at], escaped)
        sizes.append(base.sizes_of(distance, escaped, octaves, quarter[:, at]))
        return walk.differences(bits, mu, layer, which)[:, at]

    levels.walk_groups(part, walk.walk.sums(layer, which), walk.rotation, values)
    source.finish()
    walk.walk.take(layer, which, walk.differences(bits, mu, layer, which))
    return bits, base.fits_from(own, torch.cat(sizes, 1))


def _before(rows: donor.Rows, model: LevelModel, data: bytes) -> tuple[Tensor, list[Tensor], int]:
    """(shifts of rows, corrections of every part, the bytes that they take)."""
    counts = [len(group_sizes(part.width)) for pair in model.parts for part in pair]
    at = len(rows) + sum(counts)
    if at > len(data):
        raise CodecError("donor: the payload ends within its scales")
    numbers = torch.from_numpy(np.frombuffer(data, np.int8, at).astype(np.int64))
    shifts = numbers[: len(rows)]
    if int(shifts.min()) < LEAST_SHIFT or int(shifts.max()) > MOST_SHIFT:
        raise CodecError("donor: a row's shift is out of range")
    return shifts, list(torch.split(numbers[len(rows) :], counts)), at


def _section(data: bytes) -> base.Section:
    if len(data) < donor.HEADER.size:
        raise CodecError("donor: a layer is too short for its header")
    *counts, a, b = donor.HEADER.unpack_from(data)
    return base.Section.cut("donor", data, donor.HEADER.size, counts, (a, b))
