"""The predictive codec's kernels in triton's interpreter, against the reference: `interpreted_predict.py GROUP...`.

The interpreter is chosen before triton is imported, for a whole process; its programs run one after the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import numpy as np
import pytest
import torch
import triton.language as tl
from length import FULL as AT_LENGTH
from predictcases import VOCABULARY, Block, block_of, longs, model_of, native

from kvstore.codecs import KVView
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.predictive import _predict
from kvstore.codecs.predictive import reference as predictive_reference
from kvstore.codecs.predictive.kernels import (
    blocks as predict_blocks,
)
from kvstore.codecs.predictive.kernels import (
    decode as predict_decode,
)
from kvstore.codecs.predictive.kernels import (
    device as predict_device,
)
from kvstore.codecs.predictive.kernels import (
    encode as predict_encode,
)
from kvstore.codecs.predictive.kernels import (
    launch as predict_launch,
)
from kvstore.codecs.predictive.kernels.launch import DeviceModel, decode_blocks, encode_blocks
from kvstore.errors import CodecError

Layers = list[tuple[torch.Tensor, torch.Tensor]]
PLENTY = 1 << 40


@dataclass
class Case:
    """Blocks of one model and what the reference makes of them."""

    model: Any
    device: Any
    tokens: list[np.ndarray]
    starts: list[int]
    blocks: list[Block]
    coded: list[list[bytes]]

    @property
    def sizes(self) -> list[list[int]]:
        return [list(map(len, layers)) for layers in self.coded]

    @property
    def launch(self) -> ModuleType:
        """Decodes and encodes."""
        return predict_launch

    def says(self, layers: Sequence[bytes], out: Layers) -> str | None:
        """What the CPU says of the first block's layers."""
        rows, sizes = KVView.of_layers(self.model.layout, out).rows, list(map(len, layers))
        coder, start, count = native(self.model), self.starts[0], len(self.tokens[0])
        return _predict.decode(coder, self.tokens[0], start, count, b"".join(layers), sizes, rows, out[0][0].shape[1])


def make(
    shapes: list[tuple[int, int, int]],
    rope: bool,
    kinds: Sequence[str],
    counts: Sequence[int],
    seed: int = 0,
    reach: float = 1.0,
) -> Case:
    model, (tokens, starts) = model_of(shapes, rope, seed, reach), places_of(counts, seed)
    blocks = [
        block_of(model, kind, ids, start, seed + i)
        for i, (kind, ids, start) in enumerate(zip(kinds, tokens, starts, strict=True))
    ]
    coded = [
        predictive_reference.encode(model, torch.from_numpy(ids), start, longs(block))
        for ids, start, block in zip(tokens, starts, blocks, strict=True)
    ]
    return Case(model, DeviceModel(model, "cpu"), tokens, starts, blocks, coded)


def places_of(counts: Sequence[int], seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Tokens of blocks, some unknown, and where they begin."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(-5, VOCABULARY + 20, n).astype(np.int64) for n in counts]
    return tokens, [int(start) for start in rng.integers(0, 6000, len(counts))]


def tensors_of(case: Case, number: int) -> Layers:
    """[heads, n, dim], of K with the tokens apart, of V with the heads."""
    layers = []
    for x, pair in zip(case.model.layout.layers, case.blocks[number], strict=True):
        tensors = [
            torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(len(bits), x.heads, dim).transpose(0, 1)
            for bits, dim in zip(pair, (x.key_dim, x.value_dim), strict=True)
        ]
        layers.append((tensors[0], tensors[1].contiguous()))
    return layers


def room_for(case: Case, number: int, wanted: int) -> Layers:
    """Sevens, of which a stripe on each side of every tensor is not to be written."""
    return [
        tuple(
            torch.full((x.heads, wanted + 2, dim + 2), 7.0).bfloat16()[:, 1:-1, 1:-1]
            for dim in (x.key_dim, x.value_dim)
        )
        for x in case.model.layout.layers
    ]  # type: ignore[misc]


def untouched(tensor: torch.Tensor) -> bool:
    inside = torch.zeros(tensor.shape[0], tensor.shape[1] + 2, tensor.shape[2] + 2, dtype=torch.bool)
    inside[:, 1:-1, 1:-1] = True
    assert tensor._base is not None
    return bool((tensor._base[~inside] == 7).all())


def decoded(
    case: Case,
    coded: Sequence[Sequence[bytes]],
    wanted: Sequence[int] | None = None,
    payload: torch.Tensor | None = None,
) -> tuple[list[int], list[Layers]]:
    wanted = [len(ids) for ids in case.tokens] if wanted is None else wanted
    out = [room_for(case, i, n) for i, n in enumerate(wanted)]
    if payload is None:
        payload = torch.from_numpy(np.frombuffer(b"".join(b for layers in coded for b in layers), np.uint8).copy())
    sizes = [list(map(len, layers)) for layers in coded]
    status = case.launch.decode_blocks(case.device, payload, sizes, case.tokens, case.starts, out)
    assert all(untouched(tensor) for layers in out for pair in layers for tensor in pair)
    return status.tolist(), out


def same(case: Case, number: int, layers: Layers) -> bool:
    return all(
        torch.equal(found.view(torch.int16), right[:, : found.shape[1]].view(torch.int16))
        for pair, wanted in zip(layers, tensors_of(case, number), strict=True)
        for found, right in zip(pair, wanted, strict=True)
    )


def check(case: Case) -> None:
    status, out = decoded(case, case.coded)
    assert status == [0] * len(out)
    assert all(same(case, i, layers) for i, layers in enumerate(out))
    everything = range(len(case.blocks))
    payload, sizes = case.launch.encode_blocks(
        case.device, [tensors_of(case, i) for i in everything], case.tokens, case.starts, [PLENTY] * len(out)
    )
    assert sizes == [tuple(of) for of in case.sizes]
    found = payload.numpy().tobytes()
    assert found == b"".join(b for layers in case.coded for b in layers)


def shapes() -> None:
    """Heads of several sizes, with and without rotation, V of other widths than K, layers that differ."""
    if AT_LENGTH:
        check(make([(2, 16, 16)] * 3, True, ["predicted", "special"], [5, 2], seed=1))
        check(make([(2, 32, 32)] * 3, True, ["special"], [2], seed=2, reach=8.0))
        check(make([(1, 10, 7)] * 4, True, ["alike", "zeros"], [3, 2], seed=4))
    check(make([(2, 16, 24)] * 2, False, ["predicted"], [3], seed=3))
    check(make([(2, 2, 1), (1, 2, 1), (3, 2, 5)], True, ["special", "predicted", "random"], [1, 2, 3], seed=5))


def wide() -> None:
    """More inputs than the product takes at once, more pairs of columns, and all five sources of V."""
    assert predict_device.BLOCK_K < 3 * 64 < 2 * predict_device.BLOCK_K
    check(make([(1, 64, 64), (1, 64, 40), (3, 64, 64)], True, ["predicted"], [5], seed=6))
    check(make([(1, 136, 8), (1, 136, 8)], True, ["predicted"], [3], seed=6))


def long() -> None:
    """More rows than a program of the product has and than are added up at once; rows of many tiles."""
    predict_device.TILE, predict_device.BLOCK_M = 8, 16
    predict_decode.AHEAD = predict_encode.AHEAD = tl.constexpr(8)
    check(make([(1, 4, 17)] * 2, True, ["special", "predicted"], [17, 1], seed=7))


def prefixes() -> None:
    case = make([(2, 16, 8)] * 2, True, ["predicted", "special"], [9, 5], seed=8)
    status, out = decoded(case, case.coded, [1, 4])
    assert status == [0, 0]
    assert all(same(case, i, layers) for i, layers in enumerate(out))


def refusals() -> None:
    """Positions that the model does not know, blocks without tokens, and limits to the byte."""
    case = make([(1, 8, 8)] * 2, True, ["alike"] * 5, [4] * 5, seed=9)
    everything, plenty = [tensors_of(case, i) for i in range(5)], [PLENTY] * 5
    size = sum(case.sizes[1])
    assert size > 300
    last = case.model.positions - 4
    for starts, limits, kept in (
        (case.starts, [PLENTY, size, 0, PLENTY, -1], [0, 3]),
        (case.starts, [PLENTY, size + 1, 300, 1, 150], [0, 1]),
        ([-1, case.starts[1], last + 1, 1 << 62, -(1 << 62)], plenty, [1]),
        ([-1] * 5, plenty, []),
    ):
        payload, sizes = encode_blocks(case.device, everything, case.tokens, starts, limits)
        assert [i for i, of in enumerate(sizes) if of is not None] == kept
        assert payload.numpy().tobytes() == b"".join(b for i in kept for b in case.coded[i])
        if limits is plenty:  # limits are the encoder's alone
            status, _ = decoded(replace(case, starts=starts), case.coded)
            assert [i for i, bad in enumerate(status) if bad == 0] == kept
    assert decoded(case, case.coded)[0] == [0] * 5
    none = [torch.empty(1, 0, 8, dtype=torch.bfloat16)] * 2
    payload, sizes = encode_blocks(case.device, [[tuple(none)] * 2], [np.empty(0, np.int64)], [0], [PLENTY])  # type: ignore[list-item]
    assert (payload.numel(), sizes) == (0, [None])


def hostile() -> None:
    """What the CPU refuses is refused, what it decodes is decoded alike, beside blocks that are sound. Nothing beyond
    the payload is read: it ends where unreadable memory begins."""
    refuse_damage(make([(1, 4, 3), (1, 4, 6)], True, ["special"], [3], seed=10))


def refuse_damage(one: Case, step: int = 1) -> None:
    """one: of a block of three tokens and two layers. step: of what may be damaged, one in so many is."""
    good, rng = one.coded[0], np.random.default_rng(0)
    coded = [good, [good[0], b""], [good[0][:27], good[1]], [good[1], good[0]], [good[0], good[1] + b"\0\0"]]
    for field in range(7):
        for value in (1, 5, (1 << 31) + 3, (1 << 32) - 1)[field % 2 :: 2]:
            bad = [bytearray(layer) for layer in good]
            struct.pack_into("<I", bad[field % 2], 4 * field, value)
            coded.append([bytes(layer) for layer in bad])
    for turn in range(24 if AT_LENGTH else 6):
        bad = [bytearray(layer) for layer in good]
        which = bad[turn % 2]
        at = int(rng.integers(28, len(which)))
        if turn % 3 == 0:
            which[at] ^= 1 << int(rng.integers(8))
        elif turn % 3 == 1:
            which[at:] = rng.bytes(len(which) - at)
        else:
            del which[at:]
        coded.append([bytes(layer) for layer in bad])
    coded = [good, *coded[1::step]]
    for place in range(8 * len(good[0])):  # a bit that nothing is made of
        changed = bytearray(good[0])
        changed[place // 8] ^= 1 << place % 8
        if one.says([bytes(changed), good[1]], room_for(one, 0, 3)) is None:
            break
    coded += [[bytes(changed), good[1]], good]
    many = replace(one, tokens=one.tokens * len(coded), starts=one.starts * len(coded), blocks=one.blocks * len(coded))

    text = b"".join(layer for layers in coded for layer in layers)
    room = -(-len(text) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
    payload = torch.from_numpy(np.frombuffer(memory, np.uint8, len(text), room - len(text)))
    payload.numpy()[:] = np.frombuffer(text, np.uint8)
    status, out = decoded(many, coded, payload=payload)
    refused = 0
    for layers, bad, found in zip(coded, status, out, strict=True):
        right = room_for(one, 0, 3)
        wrong = one.says(layers, right)
        assert (bad != 0) == (wrong is not None), wrong
        refused += bad != 0
        pairs = [(a, b) for mine, theirs in zip(found, right, strict=True) for a, b in zip(mine, theirs, strict=True)]
        assert bad or all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
    assert status[0] == status[-1] == status[-2] == 0
    assert len(coded) - 10 < refused


def views() -> None:
    """From views and back to them, by way of memory on the host."""
    case = make([(2, 8, 6)] * 2, True, ["alike", "predicted"], [5, 2], seed=12)
    layout, model = case.model.layout, predict_blocks.load(case.model, torch.device("cpu"))
    infos = [BlockInfo(layout, *of) for of in zip(case.tokens, case.starts, strict=True)]
    views = [KVView.of_layers(layout, tensors_of(case, i)) for i in range(2)]
    right = [b"".join(layers) for layers in case.coded]
    size = len(right[0])
    out = memoryview(bytearray(size + 9))
    assert predict_blocks.encode_into(model, infos[0], views[0], out, PLENTY) == tuple(case.sizes[0])
    assert out[:size] == right[0]
    assert predict_blocks.encode_into(model, infos[0], views[0], out[:size], size + 1) == tuple(case.sizes[0])
    assert predict_blocks.encode_into(model, infos[0], views[0], out[:size], size) == _predict.FALL_BACK
    assert predict_blocks.encode_into(model, infos[0], views[0], out[: size - 1], PLENTY) is None
    nowhere = replace(infos[0], start=case.model.positions)
    assert predict_blocks.encode_into(model, nowhere, views[0], out, PLENTY) == _predict.FALL_BACK

    rooms = [room_for(case, i, n) for i, n in enumerate((3, 2))]
    targets = [KVView.of_layers(layout, room) for room in rooms]
    payloads = [memoryview(text) for text in right]
    assert predict_blocks.decode_from(model, infos, payloads, case.sizes, targets) == []
    assert all(same(case, i, room) for i, room in enumerate(rooms))
    payloads[1] = memoryview(right[1][:-2] + b"ab")
    assert predict_blocks.decode_from(model, infos, payloads, case.sizes, targets) == [1]


def arguments() -> None:
    case = make([(1, 4, 4)], True, ["alike"], [3], seed=11)
    block, model = tensors_of(case, 0), case.device
    payload = torch.from_numpy(np.frombuffer(case.coded[0][0], np.uint8).copy())
    good = (payload, case.sizes, case.tokens, case.starts, [block])
    for index, other in (
        (0, payload.int()),
        (0, torch.stack([payload, payload])[:, ::2][0]),
        (0, payload.to("meta")),
        (0, payload[:-1]),
        (1, [[]]),
        (1, [[-1]]),
        (2, []),
        (2, [case.tokens[0][:2]]),
        (4, [block * 2]),
        (4, [[(block[0][0].half(), block[0][1])]]),
        (4, [[(block[0][0][:, :, :3], block[0][1])]]),
        (4, [[(block[0][0][:, :2], block[0][1])]]),
        (4, [[(block[0][0].mT.contiguous().mT, block[0][1])]]),
        (4, [[(block[0][0].to("meta"), block[0][1])]]),
    ):
        with pytest.raises(CodecError, match="predictive"):
            decode_blocks(model, *(other if i == index else value for i, value in enumerate(good)))  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="tokens"):
        encode_blocks(model, [block], [case.tokens[0][:2]], case.starts, [PLENTY])
    with pytest.raises(CodecError, match="lists"):
        encode_blocks(model, [block], case.tokens, case.starts, [])


if __name__ == "__main__":
    # What is scaled beyond all numbers is clamped after that.
    with np.errstate(over="ignore"):
        kernelgroups.run({f.__name__: f for f in (shapes, wide, long, prefixes, refusals, hostile, views, arguments)})
