"""The predictive codec's model on a device, and what is known there of blocks that are coded at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvstore.codecs.launching import send
from kvstore.codecs.predictive.kernels.axis import PLACE_COLUMNS
from kvstore.codecs.predictive.kernels.dense import dense_kernel
from kvstore.codecs.predictive.kernels.encode import pack_kernel
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.predictive.linear_model import FINE
from kvstore.codecs.predictive.model import CLASSES, PredictiveModel
from kvstore.codecs.predictive.reference import MODE
from kvstore.codecs.rans.coder import RansTables
from kvstore.codecs.rans.kernels.launch import DeviceTables
from kvstore.errors import CodecError

Tensor = torch.Tensor
Array = npt.NDArray[Any]
Layers = Sequence[tuple[Tensor, Tensor]]
"""K and V of each layer, bfloat16 `[heads, tokens, dim]`, the last dimension contiguous."""

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 128  # of the product: rows, pairs of columns, inputs
TILE = 1024  # columns of a row at a time
SLOTS = 3  # layers whose inputs are kept: this one and two before
# The definition multiplies and adds in fp32 apart.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
DENSE_OPTIONS: dict[str, Any] = {**OPTIONS, "num_stages": 3}
MOST_VALUES = 1 << 27  # of one part of one block: their raw bits are counted in int32


@dataclass(frozen=True, eq=False)
class DevicePart:
    """K or V of a layer, C values a token. Arrays as in `model.Part`, but the weights."""

    number: int  # 2 * layer, and 1 more of V
    width: int
    dim: int
    rotated: bool
    in_scale: Tensor
    out_scale: Tensor
    scale: Tensor
    bias: Tensor
    to_fixed: Tensor  # float32 [C]: 2**fix
    from_fixed: Tensor  # float32 [C]: 2**-(fix + 14)
    weight: Tensor
    """int8 [C, blocks * BLOCK_K], the inputs of each part padded with zeros; of layer 0 [vocabulary, C], strided."""
    blocks: int
    shifts: tuple[int, ...]
    """shift, until, shift, until, shift: see `dense_kernel`."""
    column: int  # of `Run.inputs`: where this part's own begin

    @property
    def pairs(self) -> int:
        """BLOCK_N of the product: pairs of columns of a program."""
        half = self.dim // 2 if self.rotated else (self.width + 1) // 2
        return min(BLOCK_N, max(16, 1 << (half - 1).bit_length()))

    @property
    def tiles(self) -> int:
        """Programs that a tile of rows takes."""
        if self.rotated:
            return self.width // self.dim * -(-(self.dim // 2) // self.pairs)
        return -(-self.width // (2 * self.pairs))


class DeviceLinearModel:
    """What every model on a device has: tables, where the inputs of parts lie, and rotations. Immutable."""

    mode: int | None  # of the layers that are coded with it; None: they do not say
    parts: Sequence[Any]  # each with `number`, `width`, `dim` and `scale`

    def __init__(self, model: PredictiveModel | LevelModel, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise CodecError(f"predictive: {self.device} runs no kernels; code on the CPU")
        self.layout = model.layout
        self.positions = model.positions
        self.tables = DeviceTables(RansTables(model.freqs, 12), self.device)
        self.widths = [part.width for pair in model.parts for part in pair]
        self._columns = _columns(self.widths)
        self.input_stride = SLOTS * max(
            sum(map(_padded, self.widths[i : i + 2])) for i in range(0, len(self.widths), 2)
        )
        adapts = [*(part.adapt for pair in model.parts for part in pair), np.zeros(3, np.int32)]
        self.adapts = self.send(np.stack(adapts).astype(np.int32))
        self._first_offset = min(max((int(adapts[0][2]) + 128) >> 8, -32), 40)
        self._rope = None
        if model.rope_fine is not None and model.rope_coarse is not None:
            self._rope = self.send(model.rope_fine).long(), self.send(model.rope_coarse).long()
        self.nothing = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def header_bytes(self) -> int:
        """What a layer begins with: the mode if it says it, four counts and two sums."""
        return 24 if self.mode is None else 28

    def send(self, array: Array) -> Tensor:
        """A copy on the device, for which nothing waits."""
        return send(array, self.device)

    def can_code(self, count: int, start: int) -> bool:
        """Whether blocks of so many tokens at such positions can be predicted."""
        return 0 < count <= self.positions - start and start >= 0 and count * max(self.widths) < MOST_VALUES

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, int32 [n, D / 2] each, of int64 positions [n]; something of one value without rotation."""
        if self._rope is None:
            return self.nothing, self.nothing
        (c0, s0), (c1, s1) = (
            table[:, at] for table, at in zip(self._rope, (positions % FINE, positions // FINE), strict=True)
        )
        return ((c1 * c0 - s1 * s0 + 8192) >> 14).int(), ((s1 * c0 + c1 * s0 + 8192) >> 14).int()

    def first_offsets(self, rows: int) -> Tensor:
        """int32 [parts + 1, rows], those of the first part right."""
        offsets = torch.empty(len(self.parts) + 1, rows, dtype=torch.int32, device=self.device)
        offsets[0] = self._first_offset
        return offsets

    def _sources(self, number: int, reach: int) -> list[int]:
        """The parts that a part takes inputs from, `reach` layers back, in the order of its weights."""
        layer, which = divmod(number, 2)
        before = [2 * i + j for i in range(layer - 1, layer - 1 - reach, -1) if i >= 0 for j in (0, 1)]
        return before + ([number - 1] if which else [])

    def _weight(self, weight: Array, sources: Sequence[int]) -> tuple[Tensor, int]:
        """Weights [inputs, C] as `dense_kernel` takes them, and how many blocks of inputs they have."""
        ends = np.cumsum([self.widths[i] for i in sources])[:-1]
        pieces = [np.pad(piece, ((0, _padded(len(piece)) - len(piece)), (0, 0))) for piece in np.split(weight, ends)]
        return self.send(np.concatenate(pieces).T), sum(map(len, pieces)) // BLOCK_K

    def _own(self, number: int) -> int:
        return number // 2 % SLOTS * (self.input_stride // SLOTS) + self._columns[number]

    def _shifts(self, sources: Sequence[int]) -> tuple[int, ...]:
        """Of parts in this order; K and V of a layer lie side by side."""
        begins, found = [], 0
        for number in sources:
            if number % 2 == 0:
                begins.append((found, self._own(number) // BLOCK_K - found))
            found += _padded(self.widths[number]) // BLOCK_K
        begins += [(found, 0)] * (3 - len(begins))
        return begins[0][1], begins[1][0], begins[1][1], begins[2][0], begins[2][1]


class DeviceModel(DeviceLinearModel):
    """A `PredictiveModel` on a device, which takes about the bytes of its weights. Immutable, for any thread."""

    mode = MODE
    parts: Sequence[DevicePart]

    def __init__(self, model: PredictiveModel, device: torch.device | str) -> None:
        super().__init__(model, device)
        self.token_kv = self.send(model.token_kv)
        self.parts = [self._part(model, number) for number in range(len(self.widths))]

    def _part(self, model: PredictiveModel, number: int) -> DevicePart:
        layer, which = divmod(number, 2)
        part, shape = model.parts[layer][which], self.layout.layers[layer]
        fix = np.zeros(part.width, np.float32) if part.fix is None else part.fix.astype(np.float32)
        sources = self._sources(number, 2)
        weight, blocks = self.token_kv[:, self.widths[0] :] if which else self.token_kv[:, : self.widths[0]], 0
        if part.weight is not None:
            weight, blocks = self._weight(part.weight, sources)
        return DevicePart(
            number=number,
            width=part.width,
            dim=shape.value_dim if which else shape.key_dim,
            rotated=part.fix is not None,
            in_scale=self.send(part.in_scale),
            out_scale=self.send(part.out_scale),
            scale=self.send(part.scale),
            bias=self.send(part.bias),
            to_fixed=self.send(np.exp2(fix)),
            from_fixed=self.send(np.exp2(-(fix + 14))),
            weight=weight,
            blocks=blocks,
            shifts=self._shifts(sources),
            column=self._own(number),
        )


class Rows:
    """The rows of blocks that are coded at once, part after part: what launches leave to later ones.

    tokens: ids of each block; starts: their positions; block: `Layers` of each, to be read or written, which may have
    fewer tokens if they are written. Raises `CodecError` where these are not of the model's shapes.
    """

    def __init__(
        self, model: DeviceLinearModel, tokens: Sequence[Array], starts: Sequence[int], blocks: Sequence[Layers]
    ) -> None:
        self.model = model
        self.counts = np.array([len(ids) for ids in tokens], np.int64)
        self.ends = np.cumsum(self.counts)
        self.rows, self.blocks = int(self.ends[-1]), len(tokens)
        parts, device = len(model.parts), model.device
        numbers = np.repeat(np.arange(self.blocks, dtype=np.int32), self.counts)
        inside = np.arange(self.rows) - np.repeat(self.ends - self.counts, self.counts)
        self.block_of = model.send(numbers)
        self.firsts = model.send(np.concatenate([[0], self.ends]))
        self.tokens = model.send(np.concatenate([np.asarray(ids, np.int64) for ids in tokens]))
        self.cos, self.sin = model.angles(model.send(np.asarray(starts, np.int64)[numbers] + inside))
        self.places = model.send(places_of_blocks(model, blocks))
        self.in_block = model.send(inside)
        self.offsets = model.first_offsets(self.rows)
        self.fits = torch.zeros(parts + 2, self.rows, dtype=torch.int32, device=device)
        self.raw_bits, self.escapes = torch.empty(2, parts, self.rows, dtype=torch.int32, device=device)
        self.sums = torch.empty(2, parts, self.rows, dtype=torch.int32, device=device)
        padded = -(-self.rows // BLOCK_M) * BLOCK_M
        self.inputs = torch.zeros(padded, model.input_stride, dtype=torch.int8, device=device)

    @property
    def before(self) -> tuple[Tensor, Array]:
        """What stands before the first layer's header: the bytes, uint8, block after block, and how many each has."""
        return self.model.nothing.view(torch.uint8), np.zeros(self.blocks, np.int64)

    @property
    def last_of_layers(self) -> Array:
        """The last part of the stream in each layer."""
        return np.arange(1, len(self.model.parts), 2)

    def pack(self, part: Any, symbols: Tensor, targets: Tensor, bits: Tensor, payload: Tensor) -> None:
        """Adds a part's raw bits to `bits`, and writes its escapes, where `targets` says."""
        raise NotImplementedError

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launches a kernel of the rows, a program a row, on the current stream."""
        kernel[(self.rows,)](*arguments, TILE=TILE, **constants, **OPTIONS)

    def totals(self, of_rows: Tensor) -> Tensor:
        """int64 [..., blocks] of integers [..., rows], added up exactly."""
        shape = (*of_rows.shape[:-1], self.blocks)
        zeros = torch.zeros(shape, dtype=torch.int64, device=of_rows.device)
        return zeros.index_add_(-1, self.block_of, of_rows.long())

    def layer_sums(self) -> Tensor:
        """The two sums of every layer of every block, int64 [2, layers, blocks], from those of the rows."""
        widths = self.model.send(np.array(self.model.widths, np.int64))[:, None]
        counts = torch.diff(self.firsts)[self.block_of.long()]
        before = self.in_block * widths  # values of the layer before a row
        before[1::2] += counts * widths[::2]
        plain, weighted = self.sums.long() & 0xFFFFFFFF
        both = self.totals(plain), self.totals((weighted + plain * before) & 0xFFFFFFFF)
        return torch.stack([x[::2] + x[1::2] for x in both]) & 0xFFFFFFFF


class Run(Rows):
    """Rows with predictions of one part after the other. model: a `DeviceModel`; else as `Rows`."""

    model: DeviceModel

    def __init__(
        self, model: DeviceModel, tokens: Sequence[Array], starts: Sequence[int], blocks: Sequence[Layers]
    ) -> None:
        super().__init__(model, tokens, starts, blocks)
        self.mu = torch.empty(self.rows * max(model.widths), dtype=torch.int16, device=model.device)

    def predict(self, part: DevicePart, classes: Tensor) -> None:
        """Sets `mu` and classes, uint8 [rows * C], of a part."""
        first = part.number < 2
        dense_kernel[(-(-self.rows // BLOCK_M), part.tiles)](
            self.inputs,
            self.model.input_stride,
            part.weight,
            part.weight.stride(0),
            self.model.token_kv.shape[0],
            self.tokens,
            part.blocks,
            *part.shifts,
            part.bias,
            part.out_scale,
            part.from_fixed,
            self.cos,
            self.sin,
            part.scale,
            self.offsets,
            part.number,
            self.mu,
            classes,
            self.rows,
            part.width,
            CLASSES * (part.number % 2),
            FIRST=first,
            ROTATE=part.rotated,
            DIM=part.dim if part.rotated else 0,
            BLOCK_M=BLOCK_M,
            BLOCK_N=part.pairs,
            BLOCK_K=BLOCK_K,
            **DENSE_OPTIONS,
        )

    def pack(self, part: DevicePart, symbols: Tensor, targets: Tensor, bits: Tensor, payload: Tensor) -> None:
        self.launch(
            pack_kernel,
            *(self.places, self.block_of, self.firsts, symbols, part.scale, self.offsets, self.raw_bits),
            *(self.escapes, targets, bits, payload, part.number, self.rows, self.blocks, part.width),
            DIM=part.dim,
        )


def _padded(width: int) -> int:
    return -(-width // BLOCK_K) * BLOCK_K


def _columns(widths: Sequence[int]) -> list[int]:
    """Where the inputs that each part gives begin among its layer's."""
    return [_padded(widths[number - 1]) if number % 2 else 0 for number in range(len(widths))]


def places_of_blocks(model: DeviceLinearModel, blocks: Sequence[Layers]) -> Array:
    """See axis.py; int64 [parts, blocks, PLACE_COLUMNS]."""
    table = np.empty((len(model.parts), len(blocks), PLACE_COLUMNS.value), np.int64)
    for number, layers in enumerate(blocks):
        if len(layers) != len(model.layout.layers):
            raise CodecError(f"predictive: a block of {len(layers)} layers, the model has {len(model.layout.layers)}")
        for part, tensor in enumerate(tensor for pair in layers for tensor in pair):
            shape = model.layout.layers[part // 2]
            dim = shape.value_dim if part % 2 else shape.key_dim
            if tensor.dtype != torch.bfloat16 or tensor.dim() != 3 or tensor.shape[::2] != (shape.heads, dim):
                raise CodecError(f"predictive: expected bfloat16 [{shape.heads}, tokens, {dim}], found {tensor.shape}")
            if tensor.device.type != model.device.type or tensor.shape[1] != layers[0][0].shape[1]:
                raise CodecError("predictive: the tensors of a block differ in device or tokens")
            if tensor.stride(2) != 1 and dim > 1:
                raise CodecError("predictive: the last dimension must be contiguous")
            table[part, number] = tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.shape[1]
    return table
