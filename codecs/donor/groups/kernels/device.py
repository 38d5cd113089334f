"""The model of differences on a device, and the rows of blocks that are coded at once against donors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from kvstore.codecs.donor.groups.kernels.donors import choose_shifts_kernel, donate_kernel, measure_rows_kernel
from kvstore.codecs.donor.groups.kernels.encode import (
    correct_kernel,
    foretell_kernel,
    measure_columns_kernel,
    split_differences_kernel,
)
from kvstore.codecs.donor.groups.reference import unit_of, weight
from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.kernels.device import OPTIONS, Array, Layers, Tensor, places_of_blocks
from kvstore.codecs.predictive.levels.kernels.device import (
    GROUP_OPTIONS,
    DeviceLevelModel,
    DeviceLevelPart,
    LevelRows,
)
from kvstore.codecs.predictive.levels.model import GROUP, LevelModel, group_sizes
from kvstore.errors import CodecError

COLUMNS = 128  # of a part that a program measures
CORRECTED = 32  # groups that a program corrects at once


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one block that have a donor, as if they were a block of their own.

    Attributes:
        positions: int64 [n].
        block: `Layers` of these rows, to be read, or written; then it may have fewer.
        donors: `Layers` of as many rows of donors, keys as cached there.
        angles: int16 [angles, 2, half], cosines and sines in 1/16384.
        turns: int32 [n], by which of them a row's keys are rotated; -1: none.
    """

    positions: Array
    block: Layers
    donors: Layers
    angles: Array
    turns: Array


class DeviceGroupsModel(DeviceLevelModel):
    """A `LevelModel` of differences on a device. Immutable, for any thread."""

    def __init__(self, model: LevelModel, device: torch.device | str) -> None:
        super().__init__(model, device)
        self.mode = None
        numbers = [len(group_sizes(width)) for width in self.widths]
        self.first_groups = np.cumsum([0, *numbers]).tolist()
        self.first_columns = np.cumsum([0, *self.widths]).tolist()
        self.columns, self.groups = self.first_columns.pop(), self.first_groups.pop()
        sizes = np.concatenate([group_sizes(width) for width in self.widths])
        self.group_of = self.send(np.repeat(np.arange(self.groups), sizes))
        self.scales = torch.cat([part.scale for part in self.parts])
        parts = [part for pair in model.parts for part in pair]
        self.units = [float(weight(-unit_of(part))) for part in parts]


class GroupRows(LevelRows):
    """Rows of blocks, and what their donors say. Raises `CodecError` where tensors are not of the model's shapes."""

    model: DeviceGroupsModel

    def __init__(self, model: DeviceGroupsModel, blocks: Sequence[Rows]) -> None:
        unknown = [np.full(len(rows.positions), -1, np.int64) for rows in blocks]
        super().__init__(model, unknown, [0] * len(blocks), [rows.block for rows in blocks])
        device, positions = model.device, np.concatenate([rows.positions for rows in blocks])
        if any(rows.donors[0][0].shape[1] != len(rows.positions) for rows in blocks):
            raise CodecError("donor: expected a row of a donor for each row of the block")
        if any((rows.turns >= len(rows.angles)).any() for rows in blocks):
            raise CodecError("donor: rows are rotated by angles that were not given")
        dims = {part.dim for part in model.parts[::2]}
        if any((rows.turns >= 0).any() and dims != {2 * rows.angles.shape[2]} for rows in blocks):
            raise CodecError("donor: rows are rotated by angles of another number of dimensions than keys have")
        self.cos, self.sin = model.angles(model.send(positions))
        self.donor_places = model.send(places_of_blocks(model, [rows.donors for rows in blocks]))
        begins = np.cumsum([0, *(len(rows.angles) for rows in blocks)])
        turns = [np.where(rows.turns < 0, -1, rows.turns + at) for rows, at in zip(blocks, begins, strict=False)]
        self.turns = model.send(np.concatenate(turns).astype(np.int32))
        self.angles = model.send(np.concatenate([rows.angles.reshape(-1) for rows in blocks] + [np.zeros(1, np.int16)]))
        self.donors = torch.empty(self.rows * max(model.widths), dtype=torch.int16, device=device)
        self.applied = torch.empty(len(model.parts), self.rows, dtype=torch.int32, device=device)
        self.shifts = torch.zeros(self.rows, dtype=torch.int32, device=device)
        self.corrections = torch.empty(self.blocks, model.groups, dtype=torch.int8, device=device)
        self.scales = torch.empty(self.blocks, model.columns, dtype=torch.int16, device=device)

    @property
    def before(self) -> tuple[Tensor, Array]:
        shifts, firsts = self.shifts.to(torch.int8), self.ends - self.counts
        pieces = [
            piece
            for first, end, corrections in zip(firsts, self.ends, self.corrections, strict=True)
            for piece in (shifts[first:end], corrections)
        ]
        return torch.cat(pieces).view(torch.uint8), self.counts + self.model.groups

    def take_before(self, shifts: Tensor, corrections: Tensor) -> None:
        """What stands before the first layer's header, int8 [rows] and [blocks, groups of all parts]."""
        self.shifts = shifts.int()
        self.corrections = corrections
        self.scales = self.model.scales + corrections.to(torch.int16)[:, self.model.group_of]

    def donate(self, part: DeviceLevelPart) -> None:
        """Sets what donors predict of a part."""
        self.launch(
            donate_kernel,
            *(self.donor_places, self.block_of, self.firsts, self.angles, self.turns, self.donors),
            *(part.number, self.blocks, part.width),
            DIM=part.dim,
            ROTATE=part.rotated,
            TURN=part.number % 2 == 0 and part.dim % 2 == 0,
        )

    def choose_shifts(self) -> None:
        """Sets by how much rows are scaled, from V of all layers but the first."""
        chosen = self.model.parts[3::2]
        if not chosen:
            return
        sums = torch.zeros(self.rows, GROUP, dtype=torch.float32, device=self.model.device)
        for part in chosen:
            self.donate(part)
            measure_rows_kernel[(self._tiles,)](
                *(self.places, self.block_of, self.firsts, self.donors, self.model.units[part.number], sums),
                *(part.number, self.rows, self.blocks, part.width),
                DIM=part.dim,
                BLOCK_M=predict_device.BLOCK_M,
                **OPTIONS,
            )
        tile = predict_device.TILE
        values = sum(part.width for part in chosen)
        choose_shifts_kernel[(triton.cdiv(self.rows, tile),)](
            sums, values, self.shifts, self.rows, TILE=tile, **OPTIONS
        )

    def split_differences(
        self, part: DeviceLevelPart, mu: Tensor, totals: Tensor, symbols: Tensor, classes: Tensor
    ) -> None:
        """From a part's values to symbols and classes; mu and totals: room, see encode.py."""
        rotated = {"DIM": part.dim, "ROTATE": part.rotated}
        of_rows = (part.number, self.rows, self.blocks, part.width)
        model, scales = self.model, self._scales_of(part)
        foretell_kernel[(self._tiles,)](
            *(self.places, self.block_of, self.firsts, self.without, part.groups, self.residuals),
            *(model.residual_stride, part.shift, part.from_fixed, part.to_fixed, part.gain, part.narrow),
            *(self.cos, self.sin, self.p, self.donors, self.shifts, mu, *self.of_inputs(part), *of_rows),
            **self.constants(part),
        )
        measure_columns_kernel[(self.blocks, triton.cdiv(part.width, COLUMNS))](
            *(self.places, self.firsts, mu, self.shifts, self.offsets, totals, *of_rows),
            TILE=COLUMNS,
            **rotated,
            **OPTIONS,
        )
        correct_kernel[(self.blocks,)](
            *(totals, self.firsts, part.scale, self.corrections, model.groups, model.first_groups[part.number]),
            *(scales, model.columns, part.width),
            TILE=CORRECTED,
            **OPTIONS,
        )
        split_differences_kernel[(self._tiles,)](
            *(self.places, self.block_of, self.firsts, mu, self.shifts, scales, model.columns, model.adapts),
            *(self.offsets, self.applied, self.fits, symbols, classes, self.raw_bits, self.escapes, self.sums),
            *self.numbers(part),
            BLOCK_M=predict_device.BLOCK_M,
            **rotated,
            **GROUP_OPTIONS,
        )

    def of_scales(self, part: DeviceLevelPart) -> tuple[Any, ...]:
        return self._scales_of(part), self.model.columns, self.applied

    def of_differences(self, part: DeviceLevelPart) -> tuple[Any, ...]:
        """What `join_differences_kernel` takes from the sums to the strides of scales."""
        return (
            *(self.without, part.groups, self.residuals, self.model.residual_stride, part.shift, part.from_fixed),
            *(part.to_fixed, part.gain, part.narrow, self.model.adapts, self.offsets, self.fits, self.cos, self.sin),
            *(self.p, self.mu, self.values, *self.of_inputs(part), self.donors, self.shifts),
            *(self.applied[part.number], self._scales_of(part), self.model.columns),
        )

    def _scales_of(self, part: DeviceLevelPart) -> Tensor:
        """A part's columns of the scales, as the kernels take them: where they begin."""
        return self.scales.view(-1)[self.model.first_columns[part.number] :]

    @property
    def _tiles(self) -> int:
        """Programs that all rows take."""
        return int(triton.cdiv(self.rows, predict_device.BLOCK_M))
