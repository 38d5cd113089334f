"""The decoder of the lossy mode on the device that holds the tensors: the symbols of csrc/lossy/lossy.h, and the values
of its scalar loops.

A block is cut up on the host, which has its bytes; its words, escapes and exact rows go to the device. Parts are
decoded one after the other. No call waits for the device until it says whether the block is damaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from kvstore.codecs.launching import on
from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.kernels.device import BLOCK_K, DENSE_OPTIONS, OPTIONS, Array, Layers, Tensor
from kvstore.codecs.predictive.lossy_kernels.device import BLOCK_N, DeviceLossyModel, DeviceLossyPart
from kvstore.codecs.predictive.lossy_kernels.symbols import (
    classify_kernel,
    count_escapes_kernel,
    count_kernel,
    take_kernel,
)
from kvstore.codecs.predictive.lossy_kernels.values import finish_kernel, sums_kernel, values_kernel
from kvstore.codecs.predictive.lossy_model import CLASSES, LEAST, PLAIN
from kvstore.codecs.predictive.lossy_quantiser import scale_at
from kvstore.codecs.predictive.lossy_reference import HEADER, header, read_varint
from kvstore.codecs.rans.kernels.launch import DeviceDecoder
from kvstore.errors import CodecError

ROWS = 16  # of a program that makes values


class Cut:
    """A payload taken apart: exact rows and escapes of each layer, and the words of all. Raises `CodecError`."""

    def __init__(self, model: DeviceLossyModel, count: int, payload: memoryview, sizes: Sequence[int]) -> None:
        self.steps, self.exact, _ = header(payload[: sizes[0]])
        if self.exact > count:
            raise CodecError(f"predictive: a lossy block has {self.exact} exact rows of {count}")
        words, sides, self.kept, self.escapes, begin, end = [], [], [], [], 0, 0
        for number, size in enumerate(sizes):
            data = payload[begin : begin + size]
            begin += size
            listed, at = read_varint(data, 0 if number else HEADER.size)
            widths = model.widths[2 * number : 2 * number + 2]
            exact = 2 * self.exact * sum(widths)
            stop = at + exact + 2 * listed
            if stop > len(data):
                raise CodecError("predictive: a lossy layer ends within its exact rows or its escapes")
            sides.append(data[at:stop])
            words.append(data[stop:])
            self.kept += [end, end + self.exact * widths[0]]
            self.escapes.append((end + exact // 2, listed))
            end += (stop - at) // 2
        self.words, self.side = b"".join(words), b"".join(sides)


def decode_block(
    model: DeviceLossyModel, payload: memoryview, sizes: Sequence[int], tokens: Array, start: int, out: Layers
) -> Tensor:
    """Decodes one block from memory on the host, which may hold anything but is as long as its layers say.

    tokens: integers [n]; start: position of the first; out: tensors on the model's device, mutated: of its first tokens
    as many as they have. Returns a bool on the device: whether the block is damaged, so that the values are undefined.
    Raises `CodecError` for damage that shows on the host, and where arguments do not fit each other.
    """
    if not model.can_code(len(tokens), start):
        raise CodecError("predictive: the profile does not know the positions of a lossy block")
    cut = Cut(model, len(tokens), payload, sizes)
    with on(model.device):
        return _Run(model, cut, tokens, start, out).decode()


class _Run:
    """A block on its way through the parts."""

    def __init__(self, model: DeviceLossyModel, cut: Cut, tokens: Array, start: int, out: Layers) -> None:
        self.model, self.cut, self.out, device = model, cut, out, model.device
        self.count, self.rows = len(tokens), len(tokens) - cut.exact
        most = max(model.widths)
        side = np.frombuffer(cut.side or b"\0\0", np.int16)
        self.side = model.send(side.copy())
        words = model.send(np.frombuffer(cut.words + b"\0" * (2 - len(cut.words) % 2), np.uint8).copy())
        streams = model.send(np.array([[0, len(cut.words)]], np.int64))
        self.decoder = DeviceDecoder(model.tables, words, streams)
        self.cos, self.sin = model.angles(model.send(np.arange(start, start + self.count)))
        room = max(1, self.rows)
        self.states = torch.zeros(room, dtype=torch.int32, device=device)
        self.shifts = torch.full((room,), PLAIN, dtype=torch.uint8, device=device)
        self.symbols, self.classes = torch.empty(2, room * most, dtype=torch.uint8, device=device)
        self.counts, self.means, self.slopes = torch.zeros(3, room, dtype=torch.int64, device=device)
        self.begins, self.listed = torch.zeros(2, room + 1, dtype=torch.int64, device=device)
        self.tile = torch.zeros(self.count * most, dtype=torch.float32, device=device)
        self.x = torch.empty_like(self.tile)
        self.sums = torch.empty(self.count * most, dtype=torch.int32, device=device)
        self.bits = torch.empty(self.count * most, dtype=torch.int16, device=device)
        padded = -(-self.count // predict_device.BLOCK_M) * predict_device.BLOCK_M
        self.inputs = torch.zeros(padded, model.input_stride, dtype=torch.int8, device=device)
        self.scales = [model.send(self._scale(part)) for part in model.parts]
        ids = model.send(np.asarray(tokens, np.int64))
        known = (ids >= 0) & (ids < len(model.token_kv))
        self.tokens = model.token_kv[torch.where(known, ids, 0)] * known[:, None]
        self.inputs[: self.count, model.token_column : model.token_column + self.tokens.shape[1]] = self.tokens

    def decode(self) -> Tensor:
        wrong = torch.zeros((), dtype=torch.bool, device=self.model.device)
        status = torch.zeros(1, dtype=torch.int32, device=self.model.device)
        for part in self.model.parts:
            status = self._symbols(part)
            if part.number % 2 == 0:
                self.listed.zero_()
            else:
                self.listed[0] = self.listed[-1].clone()
            if self.rows:
                count_escapes_kernel[(self.rows,)](
                    self.symbols, self.begins, self.counts, TILE=predict_device.TILE, **OPTIONS
                )
                self.listed[1:] = self.listed[0] + self.counts.cumsum(0)
                self._take(part)
            if part.number % 2:
                wrong |= self.listed[-1] != self.cut.escapes[part.number // 2][1]
            self._predict(part)
            self._finish(part)
        return wrong | (status != 0).any()

    def _symbols(self, part: DeviceLossyPart) -> Tensor:
        """Shifts of rows, and the symbols of a part. Returns the status of the stream."""
        model = self.model
        by = self.shifts + 2 * CLASSES
        places = model.send(np.array([[[0, self.rows]]], np.int64))
        shifts = torch.empty_like(by)
        self.decoder.parts(by, places, shifts)
        self.shifts = shifts.clamp(max=7)  # a damaged stream may say more
        if self.rows:
            count_kernel[(self.rows,)](
                *(self.scales[part.number], self.states, self.shifts, model.expect, self.counts, self.means),
                *(self.slopes, CLASSES * (part.number % 2), part.width),
                TILE=predict_device.TILE,
                **OPTIONS,
            )
            self.begins[1:] = self.counts.cumsum(0)
            classify_kernel[(self.rows,)](
                *(self.scales[part.number], self.states, self.shifts, self.begins, self.classes),
                *(CLASSES * (part.number % 2), part.width),
                TILE=predict_device.TILE,
                **OPTIONS,
            )
        places = torch.stack([torch.zeros_like(self.begins[-1]), self.begins[-1]]).view(1, 1, 2)
        return self.decoder.parts(self.classes, places, self.symbols)

    def _take(self, part: DeviceLossyPart) -> None:
        model, (begin, available) = self.model, self.cut.escapes[part.number // 2]
        following = model.parts[min(part.number + 1, len(model.parts) - 1)]
        take_kernel[(self.rows,)](
            *(self.scales[part.number], self.states, self.shifts, self.begins, self.listed, self.means, self.slopes),
            *(self.symbols, self.side[begin:], available, model.values, part.component, following.adapt, self.tile),
            *(self.cut.steps[part.number % 2], self.cut.exact, CLASSES * (part.number % 2), part.width),
            TILE=predict_device.TILE,
            **OPTIONS,
        )

    def _predict(self, part: DeviceLossyPart) -> None:
        """Sums of a part's inputs, and values before the rotation."""
        count, width = self.count, part.width
        if part.number < 2:
            begin = self.model.widths[0] * part.number
            self.sums[: count * width] = 256 * self.tokens[:, begin : begin + width].int().flatten()
        else:
            sums_kernel[(triton.cdiv(count, predict_device.BLOCK_M), triton.cdiv(width, BLOCK_N))](
                *(self.inputs, self.model.input_stride, part.order, len(part.order), part.weight, self.sums),
                *(count, width),
                BLOCK_M=predict_device.BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
                **DENSE_OPTIONS,
            )
        values_kernel[(triton.cdiv(count, ROWS), triton.cdiv(width, BLOCK_N))](
            *(self.tile, part.basis, self.sums, part.bias, part.out, part.unit, self.x, count, width),
            BLOCK_M=ROWS,
            BLOCK_N=BLOCK_N,
            **OPTIONS,
        )

    def _finish(self, part: DeviceLossyPart) -> None:
        target = self.out[part.number // 2][part.number % 2]
        finish_kernel[(self.count,)](
            *(self.x, self.side[self.cut.kept[part.number] :], self.cut.exact, self.cos, self.sin, self.bits, target),
            *(target.stride(0), target.stride(1), target.shape[1], part.in_scale, part.to_fixed, self.inputs),
            *(self.model.input_stride, part.column, part.width),
            DIM=part.dim,
            ROTATE=part.rotated,
            TILE=predict_device.TILE,
            **OPTIONS,
        )

    def _scale(self, part: DeviceLossyPart) -> Array:
        """Quarter octaves of a part's components above the step and the least class, int16 [C]."""
        layer, which = divmod(part.number, 2)
        model, quarters = self.model.model, self.cut.steps.quarters[which]
        scale = scale_at(model.levels[:, which], model.parts[layer][which].scale, quarters)
        found: Array = (scale - quarters - LEAST).numpy().astype(np.int16)
        return found
