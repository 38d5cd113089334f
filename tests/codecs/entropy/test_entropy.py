"""The entropy codec against its reference in numpy: every twin and every dtype, byte for byte and bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from codeccontract import special_of
from cpulevels import cpu_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.codecs import KVView, _native
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.entropy import reference as entropy_reference
from kvstore.codecs.entropy import tables as spec
from kvstore.codecs.registry import codec_by_name
from kvstore.codecs.tensor_memory import row_shapes
from kvstore.core.layout import ITEM_BYTES, KVLayout, LayerLayout
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
CODEC = codec_by_name("entropy")
LEVELS = cpu_levels()
KINDS = ("channels", "normal", "random", "constant", "outliers", "short")
DTYPES = ("bfloat16", "float32", "float16", "float8_e5m2", "float8_e4m3fn")
ITEMS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}
MODES = {dtype: form.mode for dtype, form in entropy_reference.FORMS.items()}


def heads_of(kind: str, heads: int, tokens: int, dim: int, seed: int, dtype: str = "bfloat16") -> np.ndarray:
    """[heads, tokens, dim] unsigned integers, the bits of values of `dtype`."""
    rng = np.random.default_rng([seed, heads, tokens, dim])
    item = ITEM_BYTES[dtype]
    unsigned, shape = ITEMS[item][0], (heads, tokens, dim)
    if kind == "random":
        return rng.integers(0, 1 << 8 * item, shape, unsigned)
    if kind == "constant":
        return np.full(shape, rng.integers(0, 1 << 8 * item), unsigned)
    scale = np.exp2(rng.uniform(-6, 6, (heads, 1, dim))) if kind == "channels" else 1.0
    mean = rng.exponential(1.0, (heads, 1, dim)) * rng.choice([-1, 1], (heads, 1, dim)) if kind == "channels" else 0.0
    numbers = torch.from_numpy((rng.standard_normal(shape) + mean) * scale)
    if kind == "short":  # of fewer mantissa bits than the dtype has room for
        numbers = numbers.to(torch.float16 if seed % 2 else torch.bfloat16)
    bits = as_bits(numbers.to(getattr(torch, dtype)))
    if kind == "outliers":
        some = rng.random(bits.shape) < 0.004
        bits[some] = rng.integers(0, 1 << 8 * item, int(some.sum()), unsigned)
        some = rng.random(bits.shape) < 0.004
        bits[some] = rng.choice(special_of(dtype).view(ITEMS[item][1]).numpy().view(unsigned), int(some.sum()))
    return bits


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    unsigned, signed = ITEMS[tensor.itemsize]
    return tensor.view(signed).numpy().view(unsigned).copy()


def as_tensor(bits: np.ndarray, dtype: str = "bfloat16") -> torch.Tensor:
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize]
    return torch.from_numpy(bits.view(signed)).view(getattr(torch, dtype))


def block(
    kind: str, shape: tuple[int, int, int, int], tokens: int, seed: int = 0, dtype: str = "bfloat16"
) -> tuple[BlockInfo, KVView, Any]:
    """A block of two layers: its description, a view of it, and the bits."""
    key_heads, key_dim, value_heads, value_dim = shape
    assert key_heads == value_heads
    layout = KVLayout((LayerLayout(key_heads, key_dim, value_dim),) * 2, dtype)
    bits = [
        (
            heads_of(kind, key_heads, tokens, key_dim, seed + 2 * i, dtype),
            heads_of(kind, key_heads, tokens, value_dim, seed + 2 * i + 10, dtype),
        )
        for i in range(2)
    ]
    view = KVView.of_layers(layout, [(as_tensor(k, dtype), as_tensor(v, dtype)) for k, v in bits])
    return BlockInfo(layout, np.arange(tokens, dtype=np.uint32), 0), view, bits


def model() -> _native.EntropyModel:
    return _native.EntropyModel(*spec.tables())


def encoded(info: BlockInfo, view: KVView, level: str) -> list[bytes]:
    out = bytearray(CODEC.bound(info))
    sizes = _native.encode(info.layout.dtype, *row_shapes(info.layout), info.count, view.rows, out, model(), level)
    assert sizes is not None
    ends = np.cumsum(sizes)
    return [bytes(out[end - size : end]) for end, size in zip(ends.tolist(), sizes, strict=True)]


def decoded(info: BlockInfo, layers: list[bytes], level: str, wanted: int | None = None) -> list[Any]:
    wanted = info.count if wanted is None else wanted
    dtype = info.layout.dtype
    out = [
        tuple(torch.full((x.heads, wanted, dim), 7.0).to(getattr(torch, dtype)) for dim in (x.key_dim, x.value_dim))
        for x in info.layout.layers
    ]
    rows = KVView.of_layers(info.layout, out).rows
    sizes = [len(layer) for layer in layers]
    payload = b"".join(layers)
    shapes = row_shapes(info.layout)
    wrong = _native.decode(dtype, *shapes, info.count, payload, sizes, rows, wanted, model(), level)
    if wrong is not None:
        raise CodecError(wrong)
    return [(as_bits(k), as_bits(v)) for k, v in out]


def same(found: list[Any], want: list[Any], tokens: int) -> bool:
    return all(
        np.array_equal(a, b[:, :tokens])
        for mine, theirs in zip(found, want, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@settings(max_examples=part(250), deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 150),
    st.sampled_from([1, 3, 16, 64, 80]), st.sampled_from([1, 16, 64, 300]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    dtype: str, kind: str, heads: int, tokens: int, key_dim: int, value_dim: int, seed: int
) -> None:
    shape = heads, key_dim, heads, value_dim
    info, view, bits = block(kind, shape, tokens, seed, dtype)
    found = [encoded(info, view, level) for level in LEVELS]
    assert all(one == found[0] for one in found)
    for layer, (keys, values) in zip(found[0], bits, strict=True):
        want = entropy_reference.encode_layer(list(keys), list(values), dtype)
        if layer[0] == MODES[dtype]:
            assert layer == want
            back = entropy_reference.decode_layer(layer, shape, tokens, dtype)
            assert np.array_equal(np.stack(back[0]), keys)
            assert np.array_equal(np.stack(back[1]), values)
        else:
            assert len(want) > 0.7 * (keys.nbytes + values.nbytes)
    for level in LEVELS:
        assert same(decoded(info, found[0], level), bits, tokens)
        some = max(1, tokens // 3)
        assert same(decoded(info, found[0], level, some), bits, some)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [("bfloat16", 1.5), ("float32", 1.19), ("float16", 1.17), ("float8_e5m2", 1.39), ("float8_e4m3fn", 1.2)],
)
def test_channels_of_one_size_and_sign_are_coded_well_and_noise_is_left_to_splitzip(dtype: str, least: float) -> None:
    shape = (3, 64, 3, 64)
    raw = 2 * 6 * 64 * 64 * ITEM_BYTES[dtype]
    modes, sizes = {}, {}
    for kind in ("channels", "normal", "random"):
        info, view, _ = block(kind, shape, 64, dtype=dtype)
        layers = encoded(info, view, LEVELS[-1])
        modes[kind] = {layer[0] for layer in layers}
        fallbacks = CODEC.fallbacks(memoryview(b"".join(layers)), [len(layer) for layer in layers])
        assert (fallbacks > 0) == (kind == "random")
        sizes[kind] = raw / sum(map(len, layers))
    left = 3 if dtype == "float8_e4m3fn" else 1
    assert modes == {"channels": {MODES[dtype]}, "normal": {MODES[dtype]}, "random": {left}}
    assert sizes["channels"] > least
    assert sizes["normal"] > least
    assert sizes["random"] > 0.998 - 0.002 * (ITEM_BYTES[dtype] == 1)


@pytest.mark.parametrize(("bits", "lower"), [(16, 0), (15, 1), (9, 1), (8, 1), (7, 2), (0, 2)])
def test_lower_halves_of_fp32_are_kept_as_far_as_they_are_not_zero(bits: int, lower: int) -> None:
    """What was computed in bf16 and is held as fp32 takes what bf16 takes."""
    numbers = heads_of("channels", 6, 64, 64, 5, "float32") >> np.uint32(bits) << np.uint32(bits)
    layout = KVLayout.uniform(1, 3, 64, "float32")
    info = BlockInfo(layout, np.arange(64, dtype=np.uint32), 0)
    strided = as_tensor(np.concatenate([numbers, ~numbers], axis=2), "float32")[:, :, :64]
    sizes = set()
    for tensor in (as_tensor(numbers, "float32"), strided):
        (layer,) = encoded(info, KVView.of_layers(layout, [(tensor[:3], tensor[3:])]), LEVELS[-1])
        assert tuple(layer[:4]) == (8, lower, 0, 0)
        assert same(decoded(info, [layer], LEVELS[-1]), [(numbers[:3], numbers[3:])], 64)
        sizes.add(len(layer))
    (size,) = sizes
    if lower == 0:
        small = KVLayout.uniform(1, 3, 64)
        halves = as_tensor((numbers >> 16).astype(np.uint16))
        view = KVView.of_layers(small, [(halves[:3], halves[3:])])
        assert size == len(encoded(BlockInfo(small, info.tokens, 0), view, LEVELS[-1])[0])


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "float16", "bfloat16"])
def test_every_bit_pattern_comes_back(dtype: str) -> None:
    item = ITEM_BYTES[dtype]
    every = np.arange(1 << 16, dtype=np.uint32).astype(ITEMS[item][0])
    every = np.random.default_rng(1).permutation(every).reshape(2, 512, 64)
    ordinary = heads_of("normal", 2, 512, 64, 3, dtype)
    # Rare enough in between for the layer to be coded.
    mixed = np.concatenate([*[ordinary] * 40, every, *[ordinary] * 19], axis=1)
    layout = KVLayout.uniform(1, 2, 64, dtype)
    info = BlockInfo(layout, np.arange(mixed.shape[1], dtype=np.uint32), 0)
    view = KVView.of_layers(layout, [(as_tensor(mixed, dtype), as_tensor(mixed, dtype))])
    for level in LEVELS:
        layers = encoded(info, view, level)
        assert layers[0][0] == MODES[dtype]
        assert same(decoded(info, layers, level), [(mixed, mixed)], mixed.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_splitzip_writes_is_read_and_it_does_not_read_what_only_this_codec_writes(dtype: str) -> None:
    """Records of fp16, fp32 and float8 were splitzip's before they had modes of their own."""
    info, view, bits = block("channels", (3, 64, 3, 64), 64, dtype=dtype)
    splitzip = codec_by_name("splitzip")
    out = memoryview(bytearray(splitzip.bound(info)))
    sizes = splitzip.encode(info, view, out)
    assert sizes is not None
    ends = np.cumsum(sizes).tolist()
    layers = [bytes(out[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    assert same(decoded(info, layers, LEVELS[-1]), bits, 64)
    layers = encoded(info, view, LEVELS[-1])
    assert layers[0][0] == MODES[dtype]
    with pytest.raises(CodecError):
        splitzip.decode(info, memoryview(b"".join(layers)), [len(x) for x in layers], view)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_another_dtype_is_refused(dtype: str) -> None:
    info, view, _ = block("channels", (3, 64, 3, 64), 64, dtype=dtype)
    first, second = encoded(info, view, LEVELS[-1])
    for mode in {*MODES.values(), 0, 12, 255} - {MODES[dtype]}:
        for wrong in (bytes([mode]) + first[1:], bytes([mode, 1]) + first[2:]):
            with pytest.raises(CodecError):
                decoded(info, [wrong, second], LEVELS[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_that_claim_other_bytes_than_there_are_are_refused(dtype: str) -> None:
    info, view, _ = block("outliers", (2, 48, 2, 64), 50, dtype=dtype)
    first, second = encoded(info, view, LEVELS[-1])
    assert first[0] == MODES[dtype]
    for at, claim in [(1, 1), (1, 2), (1, 3), (1, 255), (2, 1), (3, 1), (4, 1), (7, 255), (8, 1), (11, 255), (12, 1)]:
        hostile = bytearray(first)
        hostile[at] = (hostile[at] + claim) & 0xFF
        for level in LEVELS:
            with pytest.raises(CodecError):
                decoded(info, [bytes(hostile), second], level)
        with pytest.raises(CodecError):
            entropy_reference.decode_layer(bytes(hostile), (2, 48, 2, 64), 50, dtype)


@settings(max_examples=part(400), deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(["channels", "outliers"]), st.data())
def test_damaged_layers_are_refused_or_decode_to_something(dtype: str, kind: str, data: st.DataObject) -> None:
    info, view, _ = block(kind, (2, 48, 2, 64), 50, dtype=dtype)
    layers = encoded(info, view, LEVELS[-1])
    assert layers[0][0] == MODES[dtype]
    layer = bytearray(layers[0])
    for _ in range(data.draw(st.integers(0, 5))):
        layer[data.draw(st.integers(0, len(layer) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        layer = layer[: data.draw(st.integers(0, len(layer)))]
    outcomes = set()
    for level in LEVELS:
        try:
            (keys, values), _ = decoded(info, [bytes(layer), layers[1]], level)
            outcomes.add(keys.tobytes() + values.tobytes())
        except CodecError:
            outcomes.add(b"refused")
    if layer[:1] == bytes([MODES[dtype]]):
        try:
            found = entropy_reference.decode_layer(bytes(layer), (2, 48, 2, 64), 50, dtype)
            outcomes.add(b"".join(np.stack(heads).tobytes() for heads in found))
        except CodecError:
            outcomes.add(b"refused")
    assert len(outcomes) == 1, "the twins disagree"


def test_the_shipped_tables_are_those_of_the_format() -> None:
    freqs, costs = spec.tables()
    assert (freqs.sum(axis=-1, dtype=np.int64) == 1 << spec.PROB_BITS).all()
    assert (freqs[..., spec.ESCAPE] > 0).all()
    assert int(costs.max()) * spec.MOST_SAMPLES < 1 << 16
    known = np.maximum(freqs, 1).astype(float)
    want = np.where(freqs > 0, np.log2(4096 / known), np.log2(4096 / known[..., spec.ESCAPE :]) + 16)
    want[..., spec.ESCAPE] = np.log2(4096 / known[..., spec.ESCAPE]) + 16
    assert np.abs(costs - want * spec.COST_UNIT).max() <= 0.5
    broken = freqs.copy()
    broken[0, 0, :2] = broken[0, 0, :2][::-1] + np.array([1, 0], np.uint16)
    with pytest.raises(ValueError, match="frequencies must sum"):
        _native.EntropyModel(broken, costs)
