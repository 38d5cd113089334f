"""The model of a level on a device, and the rows of blocks that are coded at once with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.kernels.device import (
    BLOCK_K,
    BLOCK_N,
    DENSE_OPTIONS,
    OPTIONS,
    Array,
    DeviceLinearModel,
    Layers,
    Rows,
    Tensor,
)
from kvstore.codecs.predictive.levels.kernels.encode import pack_groups_kernel, split_groups_kernel
from kvstore.codecs.predictive.levels.kernels.groups import sums_kernel
from kvstore.codecs.predictive.levels.model import GROUP, LevelModel, coding_order
from kvstore.codecs.predictive.levels.reference import MODES
from kvstore.codecs.predictive.model import CLASSES

GROUP_K = 64  # residuals that a product of a group takes at once
GROUP_OPTIONS: dict[str, Any] = {**OPTIONS, "num_warps": 8}  # with 4, registers do not suffice


@dataclass(frozen=True, eq=False)
class DeviceLevelPart:
    """K or V of a layer, C values a token, columns in coding order. Arrays as in `model.LevelPart`, but these."""

    number: int  # 2 * layer, and 1 more of V
    width: int
    dim: int
    rotated: bool
    bias: Tensor
    shift: Tensor
    gain: Tensor
    narrow: Tensor
    scale: Tensor
    row: Tensor  # of other layers than 0 nothing
    to_fixed: Tensor  # float32 [C]: 2**fix
    from_fixed: Tensor  # float32 [C]: 2**-fix, of what is rotated 2**-(fix + 14)
    weight: Tensor
    """int8 [C, blocks * BLOCK_K], the inputs of each part padded with zeros; of layer 0 [vocabulary, C]; where there
    are no inputs nothing."""
    blocks: int
    shifts: tuple[int, ...]
    """shift, until, shift, until, shift: see `dense_kernel`."""
    column: int  # of `Rows.inputs`: where this part's own begin
    groups: Tensor
    """int8 [C, residual_stride]: what column c takes of the residual of column k; 0 unless k's group is before c's."""

    @property
    def grouped(self) -> bool:
        return self.number >= 2

    @property
    def pairs(self) -> int:
        """BLOCK_N of the sums."""
        return min(BLOCK_N, max(16, 1 << ((self.width + 1) // 2 - 1).bit_length()))


class DeviceLevelModel(DeviceLinearModel):
    """A `LevelModel` on a device. Takes about the bytes of its weights, twice those of its groups. Immutable, for any
    thread."""

    parts: Sequence[DeviceLevelPart]

    def __init__(self, model: LevelModel, device: torch.device | str) -> None:
        super().__init__(model, device)
        self.level, self.mode = model.level, MODES[model.level]
        self.residual_stride = -(-max(self.widths) // GROUP_K) * GROUP_K
        self.vocabulary = len(model.token_kv)
        self.parts = [self._part(model, number) for number in range(len(self.widths))]

    def _part(self, model: LevelModel, number: int) -> DeviceLevelPart:
        layer, which = divmod(number, 2)
        part, shape = model.parts[layer][which], self.layout.layers[layer]
        fix = part.fix.astype(np.float32)
        sources = self._sources(number, model.reach) if layer else []
        weight, blocks = self.nothing.to(torch.int8), 0
        if part.weight is not None:
            weight, blocks = self._weight(part.weight, sources)
        if not layer:
            weight = self._table(model, which)
        return DeviceLevelPart(
            number=number,
            width=part.width,
            dim=shape.value_dim if which else shape.key_dim,
            rotated=part.rotated,
            bias=self.send(part.bias),
            shift=self.send(part.shift),
            gain=self.send(part.gain),
            narrow=self.send(part.narrow),
            scale=self.send(part.scale),
            row=self.nothing.to(torch.int16) if part.row is None else self.send(part.row),
            to_fixed=self.send(np.exp2(fix)),
            from_fixed=self.send(np.exp2(-(fix + 14 * part.rotated))),
            weight=weight,
            blocks=blocks,
            shifts=self._shifts(sources),
            column=self._own(number),
            groups=self._groups(part.groups, part.width),
        )

    def _table(self, model: LevelModel, which: int) -> Tensor:
        """The rows of tokens, of K or V of layer 0."""
        width = self.widths[0]
        if which:
            return self.send(model.token_kv[:, width:])
        half = self.layout.layers[0].key_dim // 2 if model.parts[0][0].rotated else 0
        return self.send(model.token_kv[:, :width][:, coding_order(width, half)])

    def _groups(self, groups: Sequence[Array], width: int) -> Tensor:
        if not groups:
            return self.nothing.to(torch.int8)
        dense = np.zeros((width, self.residual_stride), np.int8)
        for number, weight in enumerate(groups, 1):
            before = GROUP * number
            dense[before : before + weight.shape[1], :before] = weight.T
        return self.send(dense)


class LevelRows(Rows):
    """Rows with what the groups of a part leave to each other. model: a `DeviceLevelModel`; else as `Rows`."""

    model: DeviceLevelModel

    def __init__(
        self, model: DeviceLevelModel, tokens: Sequence[Array], starts: Sequence[int], blocks: Sequence[Layers]
    ) -> None:
        super().__init__(model, tokens, starts, blocks)
        device = model.device
        self.without = torch.empty(self.rows * max(model.widths), dtype=torch.int32, device=device)
        self.residuals = torch.empty(self.rows * model.residual_stride, dtype=torch.int8, device=device)
        self.p, self.mu, self.values = torch.empty(3, self.rows * GROUP, dtype=torch.int16, device=device)

    @property
    def last_of_layers(self) -> Array:
        groups = -(-np.array(self.model.widths) // GROUP)
        last: Array = np.cumsum(groups)[1::2] - 1
        return last

    def add_up(self, part: DeviceLevelPart) -> None:
        """Sets the sums of a part without its groups."""
        first = part.number < 2
        sums_kernel[(-(-self.rows // predict_device.BLOCK_M), -(-part.width // (2 * part.pairs)))](
            *(self.inputs, self.model.input_stride, part.weight, part.weight.stride(0), self.model.vocabulary),
            *(self.tokens, part.row, part.blocks, *part.shifts, part.bias, self.without, self.rows, part.width),
            FIRST=first,
            BLOCK_M=predict_device.BLOCK_M,
            BLOCK_N=part.pairs,
            BLOCK_K=BLOCK_K,
            **DENSE_OPTIONS,
        )

    def split(self, part: DeviceLevelPart, symbols: Tensor, classes: Tensor) -> None:
        split_groups_kernel[(-(-self.rows // predict_device.BLOCK_M),)](
            *(self.places, self.block_of, self.firsts, *self.of_groups(part), self.cos, self.sin, self.p),
            *(symbols, classes, self.raw_bits, self.escapes, self.sums, *self.of_inputs(part), *self.numbers(part)),
            **self.constants(part),
        )

    def pack(self, part: DeviceLevelPart, symbols: Tensor, targets: Tensor, bits: Tensor, payload: Tensor) -> None:
        pack_groups_kernel[(self.blocks,)](
            *(self.places, self.firsts, symbols, *self.of_scales(part), targets, bits, payload),
            *(part.number, self.rows, self.blocks, part.width),
            DIM=part.dim,
            ROTATE=part.rotated,
            TILE=predict_device.TILE,
            **GROUP_OPTIONS,
        )

    def of_scales(self, part: DeviceLevelPart) -> tuple[Any, ...]:
        """Scales of a part, how many values those of a block lie behind those of the one before, and offsets."""
        return part.scale, 0, self.offsets

    def of_groups(self, part: DeviceLevelPart) -> tuple[Any, ...]:
        """What the kernels of groups take from the sums to the fits."""
        return (
            *(self.without, part.groups, self.residuals, self.model.residual_stride, part.shift, part.from_fixed),
            *(part.to_fixed, part.gain, part.narrow, part.scale, self.model.adapts, self.offsets, self.fits),
        )

    def of_inputs(self, part: DeviceLevelPart) -> tuple[Any, ...]:
        return self.inputs, self.model.input_stride, part.column

    def numbers(self, part: DeviceLevelPart) -> tuple[int, ...]:
        """What the kernels of groups take from `parts` on."""
        before = self.model.widths[part.number - 1] if part.number % 2 else 0
        which = part.number % 2
        return len(self.model.parts), part.number, self.rows, self.blocks, part.width, before, CLASSES * which

    def constants(self, part: DeviceLevelPart) -> dict[str, Any]:
        return {
            "GROUPED": part.grouped,
            "DIM": part.dim,
            "ROTATE": part.rotated,
            "BLOCK_M": predict_device.BLOCK_M,
            "BLOCK_K": GROUP_K,
            **GROUP_OPTIONS,
        }

    def layer_sums(self) -> Tensor:
        both = self.totals(self.sums.long() & 0xFFFFFFFF)
        return (both[:, ::2] + both[:, 1::2]) & 0xFFFFFFFF
