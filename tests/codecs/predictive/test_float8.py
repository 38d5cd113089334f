"""float8 by the predictive codec: the C++ against its reference, damage, and the codec as the store sees it."""

from __future__ import annotations

from functools import partial

import exactcases
import numpy as np
import predictcases
import pytest
import torch
from cpulevels import cpu_levels
from damaged_layers import damage_found
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcases import Layers
from predictcases import Block, Shapes

from kvstore.codecs import BlockInfo
from kvstore.codecs.predictive import float8_reference
from kvstore.codecs.predictive.codec import EXACT_MODES, PredictiveCodec
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.words import FLOAT8, float8_words, words_of
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
DTYPES = tuple(FLOAT8)
SHAPES = ([(2, 8, 8)] * 3, [(2, 16, 24)] * 2, [(1, 10, 7)] * 3, [(2, 2, 1)])


def block_of(model: PredictiveModel, dtype: str, kind: str, tokens: np.ndarray, seed: int) -> Block:
    """Codes, [n, C], of K and V of every layer; kind: as predictcases'."""
    if kind == "random":
        rng = np.random.default_rng(seed)
        widths = [tuple(part.width for part in pair) for pair in model.parts]
        return [tuple(rng.integers(0, 256, (len(tokens), c), np.uint8) for c in pair) for pair in widths]  # type: ignore[misc]
    words = predictcases.block_of(model, kind, tokens, 3, seed)
    return [tuple(float8_of(bits, dtype) for bits in pair) for pair in words]  # type: ignore[misc]


def float8_of(words: np.ndarray, dtype: str) -> np.ndarray:
    numbers = torch.from_numpy((words.astype(np.uint32) << 16).view(np.float32))
    return numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_are_the_numbers_and_rise_with_the_codes(dtype: str) -> None:
    words = float8_words(dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    assert np.array_equal(words_of(codes), words.numpy())
    numbers, finite = codes.float(), codes.float().isfinite()
    assert torch.equal((words << 16).int().view(torch.float32)[finite], numbers[finite])
    assert (words[:128].diff() > 0).all()
    assert torch.equal(words[128:], words[:128] | 0x8000)
    assert torch.equal(float8_reference.Axis(dtype).code(words), torch.arange(256) & 127)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.booleans(),
    st.sampled_from(["predicted", "alike", "random", "special", "zeros"]), st.sampled_from([1, 5, 64]),
    st.sampled_from([0.1, 0.3, 1.0]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    dtype: str, shapes: Shapes, rope: bool, kind: str, n: int, reach: float, seed: int
) -> None:
    model = predictcases.model_of(shapes, rope, seed, reach)
    tokens = np.random.default_rng(seed).integers(-5, predictcases.VOCABULARY + 20, n)
    block = block_of(model, dtype, kind, tokens, seed)
    exactcases.agrees_with_twins(float8_reference, model, dtype, tokens, block, 1 + seed % n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_and_limit(dtype: str) -> None:
    model, tokens = predictcases.model_of(SHAPES[0], True, 1), np.arange(64)
    exactcases.keeps_to_room_and_limit(model, dtype, tokens, block_of(model, dtype, "alike", tokens, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["predicted", "special", "random"])
def test_damage_is_found_and_harms_nothing(dtype: str, kind: str) -> None:
    model, rng = predictcases.model_of(SHAPES[0], True, 2), np.random.default_rng(3)
    tokens = rng.integers(0, predictcases.VOCABULARY, 20)
    block = block_of(model, dtype, kind, tokens, 5)
    layers, decode = exactcases.coded(model, dtype, tokens, block)
    right = partial(predictcases.same, b=block)
    assert damage_found(layers, 400, rng, 7, LEVELS, decode, right) > 390


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_and_escapes_that_cannot_be_are_refused(dtype: str) -> None:
    model, tokens = predictcases.model_of(SHAPES[0], True, 2), np.arange(20)
    block, ids = block_of(model, dtype, "random", tokens, 5), torch.arange(20)
    layers, decode = exactcases.coded(model, dtype, tokens, block)
    counts = np.frombuffer(layers[1][12:20], "<u4")
    assert counts.min() > 0

    def refused(second: bytes) -> str:
        bad = [layers[0], second, layers[2]]
        with pytest.raises(CodecError):
            float8_reference.decode(model, dtype, ids, 3, bad)
        texts = set()
        for level in LEVELS:
            with pytest.raises(CodecError) as caught:
                decode(bad, level)
            texts.add(str(caught.value))
        assert len(texts) == 1
        return texts.pop()

    other = 29 - EXACT_MODES[dtype]
    for mode in (4, other):
        assert "another mode" in refused(bytes([mode]) + layers[1][1:])
    assert "left over" in refused(layers[1][:4] + b"\1\0\0\0" + layers[1][8:28] + b"\0" + layers[1][28:])
    for word in (0x3F81, 0x7F80, 0xFFFF):  # no code has such a word
        refused(layers[1][:28] + word.to_bytes(2, "little") + layers[1][30:])
    for size in (0, 3, 27, 28, 60):
        refused(layers[1][:size])


def made(dtype: str) -> tuple[PredictiveCodec, BlockInfo, Layers]:
    """A codec of a profile of this dtype, and a block that it predicts."""
    codec, info, near = exactcases.codec_and_block(dtype)
    return codec, info, [tuple(t.to(getattr(torch, dtype)) for t in pair) for pair in near]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_predicts_the_dtype_of_its_profile(dtype: str) -> None:
    exactcases.predicts(*made(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_predicted_is_coded_as_by_entropy_and_counted(dtype: str) -> None:
    exactcases.codes_the_rest_as_entropy_does(*made(dtype))
