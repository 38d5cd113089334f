"""float8 by the predictive codec: the C++ against its reference, damage, and the codec as the store sees it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import predictcases
import pytest
import torch
from cpulevels import cpu_levels
from damaged_layers import damaged, levels_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcases import random_kv, same_kv
from predictcases import Block, decoded, encoded, longs
from profilecases import predicted_kv, profile_of

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive import _predict, float8_reference
from kvstore.codecs.predictive.codec import EXACT_MODES, PredictiveCodec
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.words import FLOAT8, float8_words, words_of
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
DTYPES = tuple(FLOAT8)
SHAPES = ([(2, 8, 8)] * 3, [(2, 16, 24)] * 2, [(1, 10, 7)] * 3, [(2, 2, 1)])
ROPE = '{"rope_theta": 10000.0, "rope_type": "default"}'


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


def view_of(model: PredictiveModel, dtype: str, block: Block) -> KVView:
    """A view of [heads, n, dim] tensors; every other one has its tokens apart."""
    layers = []
    for x, pair in zip(model.layout.layers, block, strict=True):
        k, v = (
            torch.from_numpy(codes).view(getattr(torch, dtype)).view(len(codes), x.heads, dim)
            for codes, dim in zip(pair, (x.key_dim, x.value_dim), strict=True)
        )
        layers.append((k.transpose(0, 1), v.transpose(0, 1).contiguous()))
    return KVView.of_layers(replace(model.layout, dtype=dtype), layers)


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
    dtype: str, shapes: list[tuple[int, int, int]], rope: bool, kind: str, n: int, reach: float, seed: int
) -> None:
    model = predictcases.model_of(shapes, rope, seed, reach)
    tokens = np.random.default_rng(seed).integers(-5, predictcases.VOCABULARY + 20, n)
    block = block_of(model, dtype, kind, tokens, seed)
    ids = torch.from_numpy(tokens)
    want = float8_reference.encode(model, dtype, ids, 3, longs(block))
    coder, view = predictcases.native(model), view_of(model, dtype, block)
    for level in LEVELS:
        assert encoded(coder, tokens, 3, view, level, dtype) == want
        assert predictcases.same(decoded(model, coder, tokens, 3, want, level, dtype=dtype), block)
        wanted = 1 + seed % n
        assert predictcases.same(decoded(model, coder, tokens, 3, want, level, wanted, dtype), block, wanted)
    found = float8_reference.decode(model, dtype, ids, 3, want)
    assert all(
        torch.equal(a, b)
        for mine, theirs in zip(found, longs(block), strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_and_limit(dtype: str) -> None:
    model, tokens = predictcases.model_of(SHAPES[0], True, 1), np.arange(64)
    coder, view = predictcases.native(model), view_of(model, dtype, block_of(model, dtype, "alike", tokens, 1))
    size = sum(map(len, encoded(coder, tokens, 3, view, LEVELS[-1], dtype)))
    code = partial(_predict.encode, coder, tokens, 3, view.rows, dtype=dtype)
    for room in (0, 1, 50, 500, size // 2, size - 1):
        assert code(bytearray(room)) is None
        assert code(bytearray(room), room) == _predict.FALL_BACK
    assert isinstance(code(bytearray(size)), tuple)
    assert isinstance(code(bytearray(size), size + 1), tuple)
    assert code(bytearray(size), size) == _predict.FALL_BACK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["predicted", "special", "random"])
def test_damage_is_found_and_harms_nothing(dtype: str, kind: str) -> None:
    model, rng = predictcases.model_of(SHAPES[0], True, 2), np.random.default_rng(3)
    tokens = rng.integers(0, predictcases.VOCABULARY, 20)
    block = block_of(model, dtype, kind, tokens, 5)
    coder = predictcases.native(model)
    layers = encoded(coder, tokens, 3, view_of(model, dtype, block), LEVELS[-1], dtype)
    found_out = 0
    for turn in range(400):
        bad = damaged(layers, turn, rng, 7)
        if bad != layers:
            decode = partial(decoded, model, coder, tokens, 3, bad, dtype=dtype)
            found_out += levels_agree(LEVELS, decode, lambda found: predictcases.same(found, block))
    assert found_out > 390


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_and_escapes_that_cannot_be_are_refused(dtype: str) -> None:
    model, tokens = predictcases.model_of(SHAPES[0], True, 2), np.arange(20)
    block, ids = block_of(model, dtype, "random", tokens, 5), torch.arange(20)
    coder = predictcases.native(model)
    layers = encoded(coder, tokens, 3, view_of(model, dtype, block), LEVELS[-1], dtype)
    counts = np.frombuffer(layers[1][12:20], "<u4")
    assert counts.min() > 0

    def refused(second: bytes) -> str:
        bad = [layers[0], second, layers[2]]
        with pytest.raises(CodecError):
            float8_reference.decode(model, dtype, ids, 3, bad)
        texts = set()
        for level in LEVELS:
            with pytest.raises(CodecError) as caught:
                decoded(model, coder, tokens, 3, bad, level, dtype=dtype)
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


def made(dtype: str) -> tuple[PredictiveCodec, BlockInfo, list[Any]]:
    """A codec of a profile of this dtype, and a block that it predicts."""
    layout = KVLayout.uniform(3, 2, 16, dtype, ROPE)
    codec = codec_by_name("predictive", profile_of(layout, "lossless"))
    info = BlockInfo(layout, np.arange(37, dtype=np.uint32), 0)
    near = predicted_kv(profile_of(replace(layout, dtype="bfloat16"), "lossless"), info.tokens, 0)
    return codec, info, [tuple(t.to(getattr(torch, dtype)) for t in pair) for pair in near]  # type: ignore[return-value]


def coded(codec: Any, info: BlockInfo, kv: list[Any]) -> tuple[bytes, tuple[int, ...]]:
    out = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(info.layout, kv), out)
    assert sizes is not None
    return bytes(out[: sum(sizes)]), sizes


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_predicts_the_dtype_of_its_profile(dtype: str) -> None:
    codec, info, kv = made(dtype)
    payload, sizes = coded(codec, info, kv)
    assert payload[0] == EXACT_MODES[dtype]
    assert codec.fallbacks(memoryview(payload), sizes) == 0
    assert not codec.kernels_decode(memoryview(payload), sizes)
    assert not codec.codes_on(torch.device("cuda", 0), dtype)
    assert not codec.has_kernels
    assert codec.usual(info) <= codec.bound(info)
    for wanted in (1, 20, 37):
        out = [tuple(torch.zeros(2, wanted, 16).to(getattr(torch, dtype)) for _ in "kv") for _ in range(3)]
        codec.decode(info, memoryview(payload), sizes, KVView.of_layers(info.layout, out))  # type: ignore[arg-type]
        assert same_kv(out, kv, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_predicted_is_coded_as_by_entropy_and_counted(dtype: str) -> None:
    codec, info, kv = made(dtype)
    other = BlockInfo(replace(info.layout, rope="none"), info.tokens, 0)
    for block, given_ in ((info, random_kv(37, info.layout)), (other, kv)):
        payload, sizes = coded(codec, block, given_)
        assert payload == coded(EntropyCodec(), block, given_)[0]
        assert codec.fallbacks(memoryview(payload), sizes) == 3
