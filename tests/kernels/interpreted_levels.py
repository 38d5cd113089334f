"""The kernels of the predictive codec's levels in triton's interpreter, against the reference and golden records:
`interpreted_levels.py GROUP...`."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import levelcases
import numpy as np
import torch
from goldenmodels import GOLDEN, LAYOUTS, block_kept, opened, profile_kept
from interpreted_predict import PLENTY, Case, Layers, check, decoded, places_of, refuse_damage, same, tensors_of
from kvcases import random_kv, same_kv
from length import FULL as AT_LENGTH
from predictcases import longs, model_of

from kvstore.codecs import KVView
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.predictive import _levels
from kvstore.codecs.predictive.codec import LevelModes, PredictiveCodec
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.levels import reference
from kvstore.codecs.predictive.levels.kernels import blocks as level_blocks
from kvstore.codecs.predictive.levels.kernels import launch as level_launch
from kvstore.codecs.predictive.levels.kernels.device import DeviceLevelModel
from kvstore.codecs.predictive.levels.mode import LevelMode, native_model
from kvstore.codecs.predictive.levels.model import LEVELS, LevelModel


class LevelCase(Case):
    @property
    def launch(self) -> ModuleType:
        return level_launch

    def says(self, layers: Sequence[bytes], out: Layers) -> str | None:
        rows, sizes = KVView.of_layers(self.model.layout, out).rows, list(map(len, layers))
        return _levels.decode(
            native_model(self.model), self.tokens[0], self.starts[0], b"".join(layers), sizes, rows, out[0][0].shape[1]
        )


def make(
    shapes: levelcases.Shapes, rope: bool, level: int, kinds: Sequence[str], counts: Sequence[int], seed: int
) -> LevelCase:
    model, (tokens, starts) = levelcases.model_of(shapes, rope, level, seed), places_of(counts, seed)
    blocks = [
        levelcases.block_of(model, kind, ids, start, seed + i)
        for i, (kind, ids, start) in enumerate(zip(kinds, tokens, starts, strict=True))
    ]
    coded = [
        reference.encode(model, torch.from_numpy(ids), start, longs(block))
        for ids, start, block in zip(tokens, starts, blocks, strict=True)
    ]
    return LevelCase(model, DeviceLevelModel(model, "cpu"), tokens, starts, blocks, coded)


def shapes() -> None:
    """Every level, with and without rotation, V of other widths than K, layers that differ, narrow groups."""
    check(make([(2, 8, 6)] * 2, True, 1, ["predicted", "special"], [5, 2], 1))
    check(make([(2, 16, 24)] * 2, False, 2, ["predicted"], [3], 3))
    check(make([(2, 2, 1), (1, 2, 1), (3, 2, 5)], True, 3, ["special", "predicted", "random"], [1, 2, 3], 5))
    if AT_LENGTH:
        for level in (1, 2, 3):
            check(make([(2, 16, 16)] * 4, True, level, ["predicted", "special"], [5, 2], 1))
            check(make([(1, 10, 7)] * 4, True, level, ["zeros", "random"], [3, 2], 4))
            check(make([(3, 64, 64)] * 2, True, level, ["predicted"], [70], 6))


def long() -> None:
    """More rows than a program has at once, of several blocks; more residuals than a product takes."""
    predict_device.TILE, predict_device.BLOCK_M = 64, 16
    check(make([(1, 8, 8), (1, 8, 72)], True, 1, ["special", "predicted"], [17, 2], 7))


def prefixes() -> None:
    case = make([(2, 8, 8)] * 2, True, 2, ["predicted", "special"], [9, 5], 8)
    status, out = decoded(case, case.coded, [1, 4])
    assert status == [0, 0]
    assert all(same(case, i, layers) for i, layers in enumerate(out))


def limits() -> None:
    """Blocks that come to too much, and positions that the model does not know, have no payload."""
    case = make([(1, 8, 8)] * 2, True, 1, ["predicted"] * 3, [4] * 3, 9)
    size = sum(case.sizes[1])
    starts = [case.starts[0], case.starts[1], case.model.positions - 3]
    for limit, kept in ((size, [0]), (size + 1, [0, 1])):
        payload, sizes = level_launch.encode_blocks(
            case.device, [tensors_of(case, i) for i in range(3)], case.tokens, starts, [PLENTY, limit, PLENTY]
        )
        assert [i for i, of in enumerate(sizes) if of is not None] == kept
        assert payload.numpy().tobytes() == b"".join(b for i in kept for b in case.coded[i])
    status, _ = decoded(replace(case, starts=starts), case.coded)
    assert status == [0, 0, 1]


def hostile() -> None:
    refuse_damage(make([(1, 4, 3), (1, 4, 18)], True, 1, ["special"], [3], 10), 1 if AT_LENGTH else 4)


def trial() -> None:
    """A device that writes other bytes than the CPU codes nothing in that level, and is not asked again."""
    predict_blocks.TRIAL_TOKENS = 64 if AT_LENGTH else 4
    shapes = [(2, 8, 6)] * 2
    model = levelcases.model_of(shapes, True, 3, 12)
    native, cpu = native_model(model), torch.device("cpu")
    assert level_blocks.tried(model, native, cpu) is not None
    wrong, encode = [], level_blocks.encode_parts

    def damaged(run, limits):  # type: ignore[no-untyped-def]
        coded = encode(run, limits)
        coded.symbols[-1] ^= 1
        wrong.append(run)
        return coded

    level_blocks.encode_parts = damaged
    assert level_blocks.tried(model, native, cpu) is None
    mode = LevelMode(model)
    assert not mode.codes_on(cpu)
    assert not mode.codes_on(cpu)
    assert len(wrong) == 2
    codec = PredictiveCodec(model_of(shapes, True, 12), levels=LevelModes((3,), lambda _: model))
    payload = memoryview(struct.pack("<I", 23))
    assert codec.kernels_decode(payload, (4,))
    assert not codec.decodes_on(cpu, "bfloat16", payload, (4,))  # so that what the CPU does is counted
    assert not codec.kernels_decode(memoryview(struct.pack("<I", 21)), (4,))  # a level that the profile lacks


def golden() -> None:
    """Golden records of every level to the blocks that they hold; by way of the codec, back to the same bytes, too."""
    predict_blocks.TRIAL_TOKENS = 4
    for level in LEVELS:
        for name in (f"level-{level}-special", f"level-{level}", f"level-{level}-one-token")[: 3 if AT_LENGTH else 1]:
            header, payload = opened(GOLDEN / f"predictive-{level}" / f"{name}.rec")
            info, kv = BlockInfo(LAYOUTS["levels"], header.tokens, header.start), block_kept(name)
            sections = [profile_kept("levels").section(of) for of in ("lossless", "levels")]
            model = LevelModel.from_arrays(info.layout, level, *sections)
            device = level_blocks.load(model, torch.device("cpu"))
            room, data = random_kv(info.count, info.layout, seed=9), torch.tensor(list(payload), dtype=torch.uint8)
            of_blocks = ([header.layer_sizes], [header.tokens], [header.start], [room])
            assert not device.decode_blocks(data, *of_blocks).any()
            assert same_kv(room, kv)
            if AT_LENGTH or level == 2:
                by_way_of_the_codec(level, info, payload, header.layer_sizes, kv)


def by_way_of_the_codec(level: int, info: BlockInfo, payload: memoryview, sizes: Sequence[int], kv: Layers) -> None:
    codec, cpu = PredictiveCodec.from_profile(profile_kept("levels"), level=level), torch.device("cpu")
    assert codec.codes_on(cpu, "bfloat16")
    out = memoryview(bytearray(codec.bound(info)))
    assert codec.encode(info, posing(info, kv), out) == tuple(sizes)
    assert out[: len(payload)] == payload
    room = random_kv(info.count, info.layout, seed=9)
    codec.decode(info, payload, sizes, posing(info, room))
    assert same_kv(room, kv)
    assert codec.decodes_on(cpu, "bfloat16", payload, sizes)  # nothing failed, so that the kernels did it


def posing(info: BlockInfo, kv: Layers) -> KVView:
    """As of tensors on a device: it has no rows, which the CPU would need."""
    tensors = [tensor for pair in kv for tensor in pair]
    return KVView(info.layout, info.count, None, tensors, tensors)


if __name__ == "__main__":
    # What is scaled beyond all numbers is clamped after that.
    with np.errstate(over="ignore"):
        kernelgroups.run({f.__name__: f for f in (shapes, long, prefixes, limits, hostile, trial, golden)})
