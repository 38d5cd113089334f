"""Blocks of the store, coded with the predictive codec by the device that holds them.

Every call returns when the device is done with it, and may be made by any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

import kvstore.codecs.predictive._predict as _predict
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.launching import LAUNCH, on
from kvstore.codecs.predictive._predict import FALL_BACK
from kvstore.codecs.predictive.kernels.device import (
    Array,
    DeviceLinearModel,
    DeviceModel,
    Layers,
    Rows,
    Run,
    Tensor,
)
from kvstore.codecs.predictive.kernels.launch import decode_blocks, encode_parts
from kvstore.codecs.predictive.kernels.layers import Coded, assemble, fetch_arrays
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.predictive.linear_model import FINE, LinearPredictor
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.rans.kernels.launch import Encoded
from kvstore.codecs.splitzip.kernels.blocks import after_caller, beside, readable, writable
from kvstore.codecs.together import Together
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError

TRIAL_TOKENS = 64
# Zeros, infinities, NaNs, subnormal and extreme numbers, as bits of bf16: most are escapes.
_SPECIAL = (0, 0x8000, 1, 0x807F, 0x80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF)


# A stream of rANS keeps one warp busy, whose steps wait for each other: so many blocks take little longer than one.
MOST_TOGETHER = 64

ToEncode = tuple[BlockInfo, KVView, memoryview, int]  # see `encode_into`
ToDecode = tuple[BlockInfo, memoryview, Sequence[int], KVView]


class Loaded(DeviceLinearModel):
    """A model on a device, and how blocks are coded with it: those of several threads in one call."""

    @cached_property
    def encoding(self) -> Together[ToEncode, tuple[int, ...] | int | None]:
        return Together(lambda blocks: encode_all(self, blocks), MOST_TOGETHER)

    @cached_property
    def decoding(self) -> Together[ToDecode, bool]:
        """Whether each block is sound."""

        def decode(blocks: Sequence[ToDecode]) -> list[bool]:
            bad = decode_from(self, *map(list, zip(*blocks, strict=True)))
            return [number not in bad for number in range(len(blocks))]

        return Together(decode, MOST_TOGETHER)

    def send(self, array: Array) -> Tensor:
        # A profile's arrays are read-only, of which torch makes no tensor without a warning.
        return super().send(array if array.flags.writeable else array.copy())

    def begin(self, tokens: Sequence[Array], starts: Sequence[int], blocks: Sequence[Layers]) -> FetchedRows:
        raise NotImplementedError

    def encode_parts(self, run: Any, limits: Array) -> Coded:
        """See launch.py, as of the next."""
        raise NotImplementedError

    def decode_blocks(self, *arguments: Any) -> Tensor:
        raise NotImplementedError


def load(model: PredictiveModel, device: torch.device) -> Loaded:
    """The model on a device (a GPU with its index)."""
    with beside(device):
        return _LoadedModel(model, device)


Written = Callable[[BlockInfo, KVView, memoryview], "tuple[int, ...] | int | None"]


def tried(model: PredictiveModel, native: _predict.Model, device: torch.device) -> Loaded | None:
    """The model on a device that was seen to code a block to the bytes of the CPU (native: the same model there) and
    back; None for a device that does not. Nothing else is asked of it before blocks of the store depend on it."""

    def write(info: BlockInfo, view: KVView, room: memoryview) -> tuple[int, ...] | int | None:
        return _predict.encode(native, info.tokens.astype(np.int64), info.start, view.rows, room)

    return tried_on(lambda: load(model, device), sample(model), write)


def tried_on(make: Callable[[], Loaded], block: tuple[BlockInfo, list[Tensor]], write: Written) -> Loaded | None:
    """What `make` gives if it codes a block as `write`, the CPU, does; see `tried`."""
    try:
        found = make()
        return found if _agrees(found, *block, write) else None
    except Exception:  # whatever the compiler and the driver raise: the CPU writes the same bytes
        return None


def encode_into(
    model: Loaded, info: BlockInfo, block: KVView, out: memoryview, limit: int
) -> tuple[int, ...] | int | None:
    """Codes a block into memory on the host and returns the bytes of its layers.

    None where `out`, shorter than `limit`, did not do; `_predict.FALL_BACK` where the block cannot be predicted or does
    not come to less than `limit` bytes.
    """
    return encode_all(model, [(info, block, out, limit)])[0]


def encode_together(
    model: Loaded, info: BlockInfo, block: KVView, out: memoryview, limit: int
) -> tuple[int, ...] | int | None:
    """As `encode_into`, in one call with the blocks of other threads that wait."""
    after_caller(model.device)
    return model.encoding((info, block, out, limit))


def decode_together(
    model: Loaded, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView
) -> bool:
    """As `decode_from` a block, in one call with those of other threads that wait. Returns whether it is sound."""
    after_caller(model.device)
    return model.decoding((info, payload, layer_sizes, out))


def encode_all(model: Loaded, blocks: Sequence[ToEncode]) -> list[tuple[int, ...] | int | None]:
    """The same of several blocks, at once: what `encode_into` returns of each."""
    for info, block, _, _ in blocks:
        if block.tokens != info.count:
            raise CodecError(f"predictive: expected the {info.count} tokens of the block, found {block.tokens}")
    found: list[tuple[int, ...] | int | None] = [FALL_BACK] * len(blocks)
    known = [i for i, (info, *_) in enumerate(blocks) if model.can_code(info.count, info.start)]
    if not known:
        return found
    these = [blocks[i] for i in known]
    most = np.array([min(limit, len(out) + 1) for *_, out, limit in these], np.int64)
    with beside(model.device), on(model.device):
        layers = [readable(block) for _, block, _, _ in these]  # kept until the device is done: kernels get addresses
        with LAUNCH:
            run = model.begin([info.tokens for info, *_ in these], [info.start for info, *_ in these], layers)
            coded = model.encode_parts(run, most)
        coded = replace(coded, streams=run.fetch(coded.streams))  # waits
        with LAUNCH:
            payload, all_sizes = assemble(run, coded, most)
        begin = 0
        for i, sizes, (_, _, out, limit) in zip(known, all_sizes, these, strict=True):
            if sizes is None:
                found[i] = FALL_BACK if len(out) >= limit else None
                continue
            end = begin + sum(sizes)
            torch.from_numpy(np.frombuffer(out, np.uint8, end - begin)).copy_(payload[begin:end])  # waits
            found[i], begin = sizes, end
    return found


def decode_from(
    model: Loaded,
    infos: Sequence[BlockInfo],
    payloads: Sequence[memoryview],
    layer_sizes: Sequence[Sequence[int]],
    outs: Sequence[KVView],
) -> list[int]:
    """Decodes the first tokens of blocks from memory on the host into views on the model's device, all at once.

    Payloads may hold anything, but are as long as their layers say. Returns the numbers of blocks that are damaged, of
    whose views the contents are undefined.
    """
    targets = [writable(out) for out in outs]
    host = torch.empty(sum(map(len, payloads)), dtype=torch.uint8, pin_memory=model.device.type == "cuda")
    begin = 0
    for payload in payloads:
        host.numpy()[begin : begin + len(payload)] = np.frombuffer(payload, np.uint8)
        begin += len(payload)
    with beside(model.device):
        coded = host.to(model.device, non_blocking=True)
        tokens, starts = [info.tokens for info in infos], [info.start for info in infos]
        with LAUNCH:
            status = model.decode_blocks(coded, layer_sizes, tokens, starts, targets)
        return torch.nonzero(status).flatten().tolist()  # waits


class FetchedRows(Rows):
    """Rows that wait for their sums when they are told to, with no lock held: `assemble` takes them where they are, and
    launches kernels behind them."""

    _known: tuple[tuple[Tensor, Tensor], ...] = ()

    def fetch(self, streams: Encoded) -> Encoded:
        """Waits for the device, and returns the streams' tables on the host."""
        sums = self.totals(self.raw_bits), self.totals(self.escapes), super().layer_sums()
        tables = streams.streams, streams.after, streams.status
        raw_bits, escapes, layer_sums, *rest = map(torch.from_numpy, fetch_arrays(*sums, *tables))
        self._known = ((self.raw_bits, raw_bits), (self.escapes, escapes))
        self._layer_sums = layer_sums
        return Encoded(*rest)

    def totals(self, of_rows: Tensor) -> Tensor:
        known = [total for rows, total in self._known if rows is of_rows]
        return known[0] if known else super().totals(of_rows)

    def layer_sums(self) -> Tensor:
        return self._layer_sums


class _FetchedRun(FetchedRows, Run):
    pass


class _LoadedModel(Loaded, DeviceModel):
    def begin(self, tokens: Sequence[Array], starts: Sequence[int], blocks: Sequence[Layers]) -> FetchedRows:
        return _FetchedRun(self, tokens, starts, blocks)

    def encode_parts(self, run: Run, limits: Array) -> Coded:
        return encode_parts(run, limits)

    def decode_blocks(self, *arguments: Any) -> Tensor:
        return decode_blocks(self, *arguments)


# ---- the trial ---------------------------------------------------------------------------------------------------


def _agrees(device: Loaded, info: BlockInfo, tensors: list[Tensor], write: Written) -> bool:
    view = _view(info, tensors)
    room = memoryview(bytearray(4 * view.nbytes + (1 << 16)))  # a symbol, raw bits and an escape take 38 bits
    sizes = write(info, view, room)
    if not isinstance(sizes, tuple):
        return False
    right = room[: sum(sizes)]
    found = memoryview(bytearray(len(right)))
    there = [tensor.to(device.device) for tensor in tensors]
    if encode_into(device, info, _view(info, there), found, len(right) + 1) != sizes or found != right:
        return False
    back = [torch.zeros_like(tensor) for tensor in there]
    if decode_from(device, [info], [right], [sizes], [_view(info, back)]):
        return False
    pairs = zip(tensors, back, strict=True)
    return all(torch.equal(a.view(torch.int16), b.cpu().view(torch.int16)) for a, b in pairs)


def sample(model: PredictiveModel) -> tuple[BlockInfo, list[Tensor]]:
    """A block that the model might have made, on the CPU: bf16 [heads, n, dim] in a view's order, at positions in the
    middle of the tables. Every input takes its whole range; some values are escapes, some tokens unknown."""
    return sample_of(model, [_spread(part) for pair in model.parts for part in pair])


def sample_of(
    model: PredictiveModel | LevelModel, spreads: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]]
) -> tuple[BlockInfo, list[Tensor]]:
    """spreads: of the values of each part, as `_spread` gives them."""
    rng = np.random.default_rng(0)
    count = TRIAL_TOKENS
    start = max(0, FINE * (model.positions // FINE // 2) - count // 2)
    tokens = rng.integers(0, len(model.token_kv), count).astype(np.uint32)
    tokens[5::16] = len(model.token_kv)
    tensors = []
    shapes = [(x.heads, dim) for x in model.layout.layers for dim in (x.key_dim, x.value_dim)]
    for (heads, dim), spread in zip(shapes, spreads, strict=True):
        values = rng.normal(0, 1, (count, heads * dim)) * rng.exponential(1, (count, 1)) * spread
        bits = torch.from_numpy(values).bfloat16().view(torch.int16)
        some = torch.from_numpy(rng.random(values.shape) < 0.01)
        chosen = rng.choice(np.array(_SPECIAL, np.uint16), int(some.sum()))
        bits[some] = torch.from_numpy(chosen.view(np.int16))
        tensors.append(bits.view(torch.bfloat16).view(count, heads, dim).transpose(0, 1))
    return BlockInfo(model.layout, tokens, start), tensors


def _spread(part: LinearPredictor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Standard deviations of the values, float64 [C], as 8-bit inputs that reach five of them say."""
    fix = 0.0 if part.fix is None else part.fix.astype(np.float64) + 14
    spread: np.ndarray[tuple[int], np.dtype[np.float64]] = 25 / (part.in_scale.astype(np.float64) * np.exp2(fix))
    return spread


def _view(info: BlockInfo, tensors: list[Tensor]) -> KVView:
    return KVView.of_layers(info.layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
