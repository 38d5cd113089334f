"""The rate of the lossy mode: whatever blocks are like, they take about as many bits as were asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import profilecases
import pytest
import torch
from cpulevels import cpu_levels

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.predictive import _lossy
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.lossy import native_encoder, native_model
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_rate import Rate
from kvstore.codecs.predictive.lossy_reference import HEADER, Block, header, sections_of
from kvstore.codecs.predictive.lossy_rows import Engine, quantise
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.core.layout import SINKS

ROPE = json.dumps({"rope_theta": 10000.0, "rope_type": "default"})
LAYOUT = KVLayout.uniform(4, 2, 32, rope=ROPE)
STEPS = (0.2, 0.4, 0.8, 1.2, 1.8, 2.6)
BITS = 3.0


def layers_of(count: int, size: float, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2 * len(LAYOUT.layers), 2, count, 32, generator=generator)
    rows = (rows - 0.5) * size * (0.5 + torch.rand(1, 1, count, 1, generator=generator))
    return list(zip(rows[::2].bfloat16(), rows[1::2].bfloat16(), strict=True))


def coded(codec: PredictiveCodec, size: float, count: int = 64, start: int = 64, seed: int = 0) -> memoryview:
    info = BlockInfo(LAYOUT, np.arange(count, dtype=np.uint32) % 50, start)
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(LAYOUT, layers_of(count, size, seed)), memory)
    assert sizes is not None
    return memory[: sum(sizes)].toreadonly()


def bits_of(payload: memoryview, count: int = 64) -> float:
    return 8 * len(payload) / (count * LAYOUT.bytes_per_token // 2)


@pytest.fixture(scope="module")
def model() -> LossyModel:
    """With a ladder of what blocks of numbers of size 2 take."""
    base = PredictiveModel.from_arrays(LAYOUT, profilecases.profile_of(LAYOUT, "lossless").section("lossless"))
    arrays = profilecases.lossy_arrays(base, 1)
    for name in arrays:  # nothing is predicted, and all components are alike
        if name.endswith((".scale", ".focus", ".bias", ".adapt", ".weight")):
            arrays[name] = np.zeros_like(arrays[name])
    found = LossyModel.from_arrays(base, arrays)
    rates = [bits_of(coded(PredictiveCodec(base, found, (step, step)), 2.0)) for step in STEPS]
    ladder = np.array([[s, s, bits, 0.01 * s, 0.01 * s] for s, bits in zip(STEPS, rates, strict=True)], np.float32)
    return replace(found, ladder=ladder)


def held(model: LossyModel, bits: float = BITS) -> PredictiveCodec:
    return PredictiveCodec(model.base, model, model.steps_for(bits=bits), bits=bits)


@pytest.mark.parametrize(("size", "within", "alike"), [(0.5, 0.05, 0.12), (1.0, 0.05, 0.1), (6.0, 0.12, 0.3)])
def test_blocks_of_all_sizes_take_the_bits_that_were_asked_for(
    model: LossyModel, size: float, within: float, alike: float
) -> None:
    same_steps = PredictiveCodec(model.base, model, model.steps_for(bits=BITS))
    assert abs(bits_of(coded(same_steps, size)) / BITS - 1) > alike
    found = np.mean([bits_of(coded(held(model), size, seed=seed)) for seed in range(6)])
    assert found == pytest.approx(BITS, rel=within)


def test_the_same_block_has_the_same_bytes_whatever_came_before(model: LossyModel) -> None:
    codec = held(model)
    first = bytes(coded(codec, 1.0))
    coded(codec, 6.0)
    assert bytes(coded(codec, 1.0)) == first == bytes(coded(held(model), 1.0))


@pytest.mark.parametrize(("count", "start"), [(1, 64), (1, 0), (3, 0), (5, 0), (9, 2), (64, 0), (123, 64)])
def test_short_blocks_and_those_with_sinks_decode(model: LossyModel, count: int, start: int) -> None:
    codec = held(model)
    info = BlockInfo(LAYOUT, np.arange(count, dtype=np.uint32) % 50, start)
    given, memory = layers_of(count, 2.0), memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(LAYOUT, given), memory)
    assert sizes is not None
    out = layers_of(count, 0.0)
    codec.decode(info, memory[: sum(sizes)].toreadonly(), sizes, KVView.of_layers(LAYOUT, out))
    pairs = [(a, b) for x, y in zip(given, out, strict=True) for a, b in zip(x, y, strict=True)]
    lost = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    assert lost <= codec.error_bound(memory[: sum(sizes)], sizes) + 0.05


@pytest.mark.parametrize(("count", "start", "every"), [(1, 0, 2), (8, 3, 8), (13, 0, 2), (8, 900, 15)])
def test_a_sample_of_rows_takes_the_bytes_of_the_plain_program(
    model: LossyModel, count: int, start: int, every: int
) -> None:
    engine, steps = Engine(model), Steps.of(0.2, 0.1)
    encoder = native_encoder(native_model(model), engine)
    given, tokens = layers_of(count, 2.0), np.arange(count) % 50
    bits = [[x.transpose(0, 1).flatten(1).view(torch.int16).long() & 0xFFFF for x in pair] for pair in given]
    positions = start + every * torch.arange(count)
    exact, block = positions < SINKS, Block(torch.from_numpy(tokens), start, [(k, v) for k, v in bits])
    rows = quantise(engine, steps, block.tokens, positions, exact, bits)
    want = b"".join(sections_of(engine, steps, rows, slice(0, count), int(exact.sum()), block))
    table = KVView.of_layers(LAYOUT, given).rows
    for level in cpu_levels():
        out = bytearray(1 << 20)
        sizes = _lossy.encode(
            encoder, tokens, start, table, (steps.k, steps.v), steps.quarters, out, level=level, every=every
        )
        assert isinstance(sizes, tuple)
        assert bytes(out[: sum(sizes)]) == want


def test_a_rate_is_followed_beyond_the_ladder(model: LossyModel) -> None:
    lowest = float(model.ladder[-1, 2]) * 1.01
    rate = Rate(lowest, model.ladder)
    values, beside = 64 * 512, HEADER.size + 4 + 64
    twice = rate.steps_for(round(2 * lowest * values / 8) + beside, 4, values, 8 * values)
    assert twice.k > 1.2 * model.ladder[-1, 0]
    once = rate.steps_for(round(lowest * values / 8) + beside, 4, values, 8 * values)
    assert once.k == pytest.approx(rate.steps.k, rel=0.02)
    assert rate.steps_for(1 << 40, 4, values, values).k < 1e6


def test_a_quality_keeps_its_steps(model: LossyModel) -> None:
    codec = PredictiveCodec(model.base, model, model.steps_for(kl=0.004))
    steps = {header(coded(codec, size))[0] for size in (0.5, 6.0)}
    assert len(steps) == 1
