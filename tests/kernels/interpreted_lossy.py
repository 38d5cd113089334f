"""The kernels of the predictive codec's lossy mode in triton's interpreter, against the scalar loops of the CPU and the
plain program: `interpreted_lossy.py GROUP...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import lossycases
import numpy as np
import pytest
import torch
from length import FULL as AT_LENGTH
from lossycases import SHAPES, Case, Shapes, case_of

from kvstore.codecs import KVView
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.lossy import LossyMode
from kvstore.codecs.predictive.lossy_kernels import blocks as lossy_blocks
from kvstore.codecs.predictive.lossy_kernels import launch
from kvstore.codecs.predictive.lossy_kernels.device import DeviceLossyModel
from kvstore.errors import CodecError

CPU = torch.device("cpu")
FINE, COARSE = (0.2, 0.1), (1.5, 3.0)


def on_device(case: Case, sections: Sequence[bytes] | None = None, wanted: int | None = None) -> list[torch.Tensor]:
    """As `lossycases.decoded`, by the kernels."""
    sections = case.sections if sections is None else sections
    count = len(case.block.tokens) if wanted is None else wanted
    _view, tensors = lossycases.target_of(case.model, count)
    out = list(zip(tensors[::2], tensors[1::2], strict=True))
    device = DeviceLossyModel(case.model, "cpu")
    payload, sizes = memoryview(b"".join(sections)), list(map(len, sections))
    if launch.decode_block(device, payload, sizes, case.block.tokens.numpy(), case.block.start, out):
        raise CodecError("predictive: damaged")
    return [x.transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF for x in tensors]


def check(shapes: Shapes, rope: bool, n: int, start: int, steps: tuple[float, float], seed: int) -> None:
    case = case_of(shapes, rope, n, start, steps, seed)
    right = lossycases.decoded(case, "scalar")
    found = on_device(case)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    lossycases.assert_close(case, found, lossycases.reference(case))
    wanted = 1 + n // 2
    assert all(torch.equal(a[:wanted], b) for a, b in zip(found, on_device(case, wanted=wanted), strict=True))


def shapes() -> None:
    """With and without rotation, K and V of other widths, layers that differ; with escapes and without, exact rows."""
    check(SHAPES[0], True, 5, 0, FINE, 1)
    check(SHAPES[0], False, 3, 2, COARSE, 2)
    check(SHAPES[3], True, 3, 5000, (0.02, 0.05), 3)  # escapes
    check(SHAPES[4], True, 5, 1, FINE, 4)
    check([(1, 10, 7), (3, 10, 5), (2, 10, 3)], False, 2, 0, COARSE, 5)  # exact rows alone
    if AT_LENGTH:
        for seed, given in enumerate(SHAPES):
            for rope in (True, False):
                check(given, rope, 40, 1, FINE, seed)


def long() -> None:
    """More rows and columns than a program has at once, and more inputs than a product takes."""
    predict_device.TILE, predict_device.BLOCK_M, launch.ROWS = 32, 16, 16
    check([(1, 40, 70), (2, 40, 66)], True, 19, 2, FINE, 7)


def hostile() -> None:
    """What the CPU refuses is refused, what it decodes is decoded alike."""
    case, rng = case_of([(1, 4, 3), (1, 4, 5)], True, 7, 2, (0.02, 0.05), 10), np.random.default_rng(0)
    good = case.sections
    coded = [[good[0], b""], [good[0][:29], good[1]], [good[1], good[0]], [good[0], good[1] + b"\0\0"]]
    coded += [[good[0], good[1] + b"\0"], [good[0], b"\xff" * 6 + good[1]]]
    for at, text in ((4, b"\x08"), (4, b"\x03"), (6, b"\x91\x01"), (10, bytes(4)), (10, b"\0\0\xc0\x7f"), (0, b"\x04")):
        coded.append([good[0][:at] + text + good[0][at + len(text) :], good[1]])
    for turn in range(90 if AT_LENGTH else 18):
        bad = [bytearray(layer) for layer in good]
        which = bad[turn % 2]
        at = int(rng.integers(30 * (1 - turn % 2), len(which)))
        if turn % 3 == 0:
            which[at] ^= 1 << int(rng.integers(8))
        elif turn % 3 == 1:
            which[at:] = rng.bytes(len(which) - at)
        else:
            del which[at:]
        coded.append([bytes(layer) for layer in bad])
    refused = 0
    for sections in coded:
        try:
            right = lossycases.decoded(case, "scalar", sections=sections)
        except CodecError:
            refused += 1
            with pytest.raises(CodecError):
                on_device(case, sections)
        else:
            assert all(torch.equal(a, b) for a, b in zip(on_device(case, sections), right, strict=True))
    assert len(coded) // 2 < refused < len(coded)  # there are no sums over values: some damage is decoded


def posing(view: KVView) -> KVView:
    """As of tensors on a device: it has no rows, which the CPU would need."""
    return KVView(view.layout, view.tokens, None, view.tensors(), view.tensors())


def mode() -> None:
    """A device that reads other values than the CPU decodes nothing; one that fails after its trial is left."""
    predict_blocks.TRIAL_TOKENS = 4
    case = case_of(SHAPES[0], True, 5, 2, FINE, 1)
    info = BlockInfo(case.model.layout, case.block.tokens.numpy().astype(np.uint32), case.block.start)
    payload, right = memoryview(b"".join(case.sections)), lossycases.decoded(case, "scalar")

    def read(of: LossyMode, posed: bool = True) -> list[torch.Tensor]:
        view, tensors = lossycases.target_of(case.model, 5)
        of.decode(info, payload, case.sizes, posing(view) if posed else view)
        return [x.transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF for x in tensors]

    good = LossyMode(case.model)
    assert good.decodes_on(CPU)
    assert all(torch.equal(a, b) for a, b in zip(read(good), right, strict=True))
    assert good.decodes_on(CPU)  # nothing failed, so that the kernels did it
    kept = lossy_blocks.decode_block

    def wrong(*arguments: Any) -> Any:
        found = kept(*arguments)
        arguments[-1][0][0].view(torch.int16)[0, -1, 0] ^= 1
        return found

    def broken(*_: Any) -> Any:
        raise RuntimeError("launch failed")

    lossy_blocks.decode_block = wrong
    other = LossyMode(case.model)
    assert not other.decodes_on(CPU)
    lossy_blocks.decode_block = broken
    by_cpu = read(good, posed=False)
    assert all(torch.equal(a, b) for a, b in zip(read(good), by_cpu, strict=True))
    assert not good.decodes_on(CPU)
    lossy_blocks.decode_block = kept
    assert all(torch.equal(a, b) for a, b in zip(read(other), by_cpu, strict=True))


def codec() -> None:
    """By way of the codec: it says that kernels decode, and decodes; damage is refused, the CPU encodes."""
    predict_blocks.TRIAL_TOKENS = 4
    case = case_of(SHAPES[0], True, 9, 2, FINE, 1)
    codec = PredictiveCodec(case.model.base, case.model, FINE)
    info = BlockInfo(case.model.layout, case.block.tokens.numpy().astype(np.uint32), case.block.start)
    payload = memoryview(b"".join(case.sections))
    assert codec.kernels_decode(payload, case.sizes)
    assert codec.decodes_on(CPU, "bfloat16", payload, case.sizes)
    assert codec.reads_on(CPU, "bfloat16")
    assert not codec.codes_on(CPU, "bfloat16")
    assert not PredictiveCodec(case.model.base).kernels_decode(payload, case.sizes)
    view, tensors = lossycases.target_of(case.model, 9)
    codec.decode(info, payload, case.sizes, posing(view))
    found = [x.transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(found, lossycases.decoded(case, "scalar"), strict=True))
    damaged = bytearray(payload)
    damaged[-1] ^= 16
    with pytest.raises(CodecError):
        codec.decode(info, memoryview(damaged), case.sizes, posing(view))
    assert codec.decodes_on(CPU, "bfloat16", payload, case.sizes)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        kernelgroups.run({f.__name__: f for f in (shapes, long, hostile, mode, codec)})
