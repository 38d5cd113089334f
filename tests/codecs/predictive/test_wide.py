"""fp32 and fp16 by the predictive codec: the C++ against its reference, damage, and the codec as the store sees it."""

from __future__ import annotations

import exactcases
import numpy as np
import predictcases
import pytest
import torch
from codeccontract import decode, encode
from cpulevels import cpu_levels
from damaged_layers import damage_found
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcases import Layers
from length import part
from predictcases import WORDS, Block, Shapes, longs, view_of
from profilecases import ROPE, profile_of

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive import _predict, wide_reference
from kvstore.codecs.predictive.codec import EXACT_MODES, PredictiveCodec
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.errors import CodecError, ProfileError

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
DTYPES = ("float32", "float16")
SHAPES = ([(2, 8, 8)] * 3, [(2, 16, 24)] * 2, [(1, 10, 7)] * 3, [(2, 2, 1)])


def block_of(model: PredictiveModel, dtype: str, kind: str, tokens: np.ndarray, seed: int) -> Block:
    """Bits, [n, C], of K and V of every layer. kind: as predictcases', or "upcast" for what is predicted in bf16."""
    rng = np.random.default_rng(seed)
    unsigned = WORDS[dtype][1]
    words = predictcases.block_of(model, "predicted" if kind == "upcast" else kind, tokens, 3, seed)
    if dtype == "float16":
        return [tuple(fp16_of(bits, rng) if kind != "random" else any_of(bits, rng) for bits in pair) for pair in words]  # type: ignore[misc]
    low = {"upcast": 0, "alike": 0xFF00}.get(kind, 0xFFFF)
    return [
        tuple(bits.astype(unsigned) << 16 | rng.integers(0, 1 << 16, bits.shape, unsigned) & low for bits in pair)  # type: ignore[misc]
        for pair in words
    ]


def fp16_of(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    numbers = (words.astype(np.uint32) << 16).view(np.float32) * (1 + rng.uniform(0, 1 / 128, words.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float16).view(np.uint16)


def any_of(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 1 << 16, words.shape, np.uint16)


@settings(max_examples=part(60), deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.booleans(),
    st.sampled_from(["predicted", "upcast", "alike", "random", "special", "zeros"]), st.sampled_from([1, 5, 64]),
    st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    dtype: str, shapes: Shapes, rope: bool, kind: str, n: int, seed: int
) -> None:
    model = predictcases.model_of(shapes, rope, seed, 0.3)
    tokens = np.random.default_rng(seed).integers(-5, predictcases.VOCABULARY + 20, n)
    block = block_of(model, dtype, kind, tokens, seed)
    want = exactcases.agrees_with_twins(wide_reference, model, dtype, tokens, block, 1 + seed % n)
    if dtype == "float32":
        assert {layer[1] for layer in want} <= {"upcast": {0}, "alike": {0, 1}}.get(kind, {0, 1, 2})


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_and_limit(dtype: str) -> None:
    model, tokens = predictcases.model_of(SHAPES[0], True, 1), np.arange(64)
    block = block_of(model, dtype, "alike", tokens, 1)
    exactcases.keeps_to_room_and_limit(model, dtype, tokens, block)
    rows = view_of(model, block, dtype).rows
    with pytest.raises(ValueError, match="dtype: expected"):
        _predict.encode(predictcases.native(model), tokens, 3, rows, bytearray(1 << 20), dtype="float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["predicted", "special"])
def test_damage_is_found_or_in_what_is_kept_and_harms_nothing(dtype: str, kind: str) -> None:
    """The two sums of a layer are over words; of the low bits that are kept the record's checksum knows."""
    model, rng = predictcases.model_of(SHAPES[0], True, 2), np.random.default_rng(3)
    tokens = rng.integers(0, predictcases.VOCABULARY, 20)
    block = block_of(model, dtype, kind, tokens, 5)
    layers, decode = exactcases.coded(model, dtype, tokens, block)
    words = words_of(block, dtype)
    assert damage_found(layers, 800, rng, 1, LEVELS, decode, lambda found: words_of(found, dtype) == words) > 400


def words_of(block: Block, dtype: str) -> list[list[int]]:
    return [wide_reference.word(x, dtype).flatten().tolist() for pair in longs(block) for x in pair]


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_that_cannot_be_are_refused(dtype: str) -> None:
    model, tokens = predictcases.model_of(SHAPES[0], True, 2), np.arange(20)
    block, ids = block_of(model, dtype, "predicted", tokens, 5), torch.arange(20)
    layers, decode = exactcases.coded(model, dtype, tokens, block)
    other = 25 - EXACT_MODES[dtype]
    for start in (b"\x04\0\0\0", bytes([other, layers[1][1], 0, 0]), bytes([EXACT_MODES[dtype], 3, 0, 0])):
        bad = [layers[0], start + layers[1][4:], layers[2]]
        with pytest.raises(CodecError, match="does not fit its dtype"):
            decode(bad, LEVELS[-1])
        with pytest.raises(CodecError, match="does not fit its dtype"):
            wide_reference.decode(model, dtype, ids, 3, bad)
    for at in (2, 3):
        bad = [layers[0], layers[1][:at] + b"\1" + layers[1][at + 1 :], layers[2]]
        with pytest.raises(CodecError):
            decode(bad, LEVELS[-1])
    for size in (0, 3, 4, 100):
        bad = [layers[0], layers[1][:size], layers[2]]
        with pytest.raises(CodecError):
            decode(bad, LEVELS[-1])
        with pytest.raises(CodecError):
            wide_reference.decode(model, dtype, ids, 3, bad)
    coder, view = predictcases.native(model), view_of(model, block, dtype)
    for sizes in ([1, 1, 1 << 40], [len(layers[0]), 0, 0], [1 << 63, 0, 0]):
        assert _predict.decode(coder, tokens, 3, 20, b"".join(layers), sizes, view.rows, 20, dtype=dtype) is not None


def made(dtype: str) -> tuple[PredictiveCodec, BlockInfo, Layers]:
    """A codec of a profile of this dtype, and a block that it predicts."""
    codec, info, near = exactcases.codec_and_block(dtype)
    noise = torch.Generator().manual_seed(1)
    kv = [
        tuple((t.float() * (1 + torch.rand(t.shape, generator=noise) / 128)).to(getattr(torch, dtype)) for t in pair)
        for pair in near
    ]
    return codec, info, kv  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_predicts_the_dtype_of_its_profile(dtype: str) -> None:
    codec, info, kv = made(dtype)
    assert len(exactcases.predicts(codec, info, kv)) < len(encode(EntropyCodec(), info, kv)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_predicted_is_coded_as_by_entropy_and_counted(dtype: str) -> None:
    exactcases.codes_the_rest_as_entropy_does(*made(dtype))


def test_a_block_of_another_dtype_than_the_profile_s_is_not_read_as_its_own() -> None:
    codec, info, kv = made("float32")
    payload, sizes = encode(codec, info, kv)
    half, halves, _ = made("float16")
    with pytest.raises(CodecError):
        decode(half, halves, payload, sizes)


def test_lossy_profiles_of_other_dtypes_are_refused_by_name() -> None:
    layout = KVLayout.uniform(3, 2, 16, "float32", ROPE)
    profile = profile_of(layout, "lossless", "lossy")
    with pytest.raises(ProfileError, match="expected lossy caches of bfloat16, found float32"):
        codec_by_name("predictive@2", profile)
    model = PredictiveModel.from_arrays(layout, profile.section("lossless"))
    with pytest.raises(ProfileError, match="bfloat16"):
        PredictiveCodec(model, LossyModel.from_arrays(model, profile.section("lossy")))
