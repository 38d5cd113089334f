"""The model of the lossy mode on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.codecs.predictive.kernels.device import BLOCK_K, Array, DeviceLinearModel, Tensor
from kvstore.codecs.predictive.lossy_model import CLASSES, ESCAPE, LARGEST, SHIFTS, SYMBOLS, LossyModel, input_groups
from kvstore.codecs.predictive.lossy_reference import MODE
from kvstore.codecs.rans.coder import RansTables
from kvstore.codecs.rans.kernels.launch import DeviceTables

BLOCK_N = 64  # columns of a product


@dataclass(frozen=True, eq=False)
class DeviceLossyPart:
    """K or V of a layer, C values a token. Arrays as in `LossyPart`, but these."""

    number: int  # 2 * layer, and 1 more of V
    width: int
    dim: int
    rotated: bool
    bias: Tensor  # float32 [C]
    out: Tensor  # float32 [C]: what sum + bias is multiplied by
    unit: Tensor
    component: Tensor
    basis: Tensor
    adapt: Tensor
    weight: Tensor  # int8 [C, blocks * BLOCK_K], the inputs of each kind padded with zeros; of layer 0 nothing
    order: Tensor  # int32 [blocks]: see `sums_kernel`
    in_scale: Tensor
    to_fixed: Tensor
    column: int  # of a row's inputs: where this part's own begin


class DeviceLossyModel(DeviceLinearModel):
    """A `LossyModel` on a device. Takes about the bytes of its weights and bases. Immutable, for any thread."""

    mode = MODE
    parts: Sequence[DeviceLossyPart]

    def __init__(self, model: LossyModel, device: torch.device | str) -> None:
        super().__init__(model.base, device)
        self.model = model
        rows = np.pad(model.row_freqs, ((0, 0), (0, SYMBOLS - SHIFTS)))
        self.tables = DeviceTables(RansTables(np.concatenate([model.freqs, rows]), 12), self.device)
        self.expect = self.send(model.expect)
        signed = np.zeros((2 * CLASSES, SYMBOLS), np.float32)
        signed[:, LARGEST + 1 : ESCAPE] = model.centroids[:, 1:]
        signed[:, :LARGEST] = -model.centroids[:, :0:-1]
        self.values = self.send(signed)
        self.token_kv = self.send(model.base.token_kv)
        self.token_column = self.input_stride
        width = model.base.token_kv.shape[1]
        self.input_stride += -(-width // BLOCK_K) * BLOCK_K
        self._layer_stride = self.token_column
        self.parts = [self._lossy_part(model, number) for number in range(len(self.widths))]

    def _own(self, number: int) -> int:
        return number // 2 % 3 * (self._layer_stride // 3) + self._columns[number]

    def _lossy_part(self, model: LossyModel, number: int) -> DeviceLossyPart:
        layer, which = divmod(number, 2)
        part, base, shape = model.parts[layer][which], model.base.parts[layer][which], self.layout.layers[layer]
        fix = np.zeros(len(part.unit), np.float32) if base.fix is None else base.fix.astype(np.float32)
        weight, order = self.nothing.to(torch.int8), self.nothing
        if part.weight is None:
            bias, out = base.bias, base.out_scale / np.exp2(fix)
        else:
            assert part.bias is not None
            assert part.out_scale is not None
            bias, out = part.bias, part.out_scale
            weight, order = self._inputs_of(model, number, part.uses, part.weight)
        return DeviceLossyPart(
            number=number,
            width=len(part.unit),
            dim=shape.value_dim if which else shape.key_dim,
            rotated=base.fix is not None,
            bias=self.send(bias.astype(np.float32)),
            out=self.send(out.astype(np.float32)),
            unit=self.send(part.unit),
            component=self.send(part.component),
            basis=self.send(part.basis),
            adapt=self.send(part.adapt),
            weight=weight,
            order=order,
            in_scale=self.send(base.in_scale),
            to_fixed=self.send(np.exp2(fix)),
            column=self._own(number),
        )

    def _inputs_of(self, model: LossyModel, number: int, uses: int, weight: Array) -> tuple[Tensor, Tensor]:
        """Weights as `sums_kernel` takes them, and where the inputs are."""
        layer, which = divmod(number, 2)
        pieces, order, at = list[Array](), list[int](), 0
        for kind, (of, side) in input_groups(model.base, layer, which).items():
            if not uses >> kind & 1:
                continue
            width = model.base.token_kv.shape[1] if of < 0 else self.widths[2 * of + side]
            begin = (self.token_column if of < 0 else self._own(2 * of + side)) // BLOCK_K
            blocks = -(-width // BLOCK_K)
            pieces.append(np.pad(weight[at : at + width], ((0, blocks * BLOCK_K - width), (0, 0))))
            order += range(begin, begin + blocks)
            at += width
        return self.send(np.concatenate(pieces).T), self.send(np.array(order, np.int32))
