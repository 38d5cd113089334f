"""The entropy codec against its reference in numpy: every twin, byte for byte and bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from cpulevels import cpu_levels
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs import KVView, _native
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.entropy import reference as entropy_reference
from kvstore.codecs.entropy import tables as spec
from kvstore.codecs.registry import codec_by_name
from kvstore.codecs.view import row_shapes
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
CODEC = codec_by_name("entropy")
LEVELS = cpu_levels()
KINDS = ("channels", "normal", "random", "constant", "outliers")


def heads_of(kind: str, heads: int, tokens: int, dim: int, seed: int) -> np.ndarray:
    """[heads, tokens, dim] uint16 bits of bf16."""
    rng = np.random.default_rng([seed, heads, tokens, dim])
    if kind == "random":
        return rng.integers(0, 1 << 16, (heads, tokens, dim), np.uint16)
    if kind == "constant":
        return np.full((heads, tokens, dim), rng.integers(0, 1 << 16), np.uint16)
    scale = np.exp2(rng.uniform(-6, 6, (heads, 1, dim))) if kind == "channels" else 1.0
    mean = rng.exponential(1.0, (heads, 1, dim)) * rng.choice([-1, 1], (heads, 1, dim)) if kind == "channels" else 0.0
    bits = as_bits(torch.from_numpy((rng.standard_normal((heads, tokens, dim)) + mean) * scale).bfloat16())
    if kind == "outliers":
        some = rng.random(bits.shape) < 0.01
        bits[some] = rng.choice([0, 0x8000, 1, 0x7F80, 0xFFC1, 0x0100, 0x7F00], int(some.sum()))
    return bits


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16).copy()


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def block(kind: str, shape: tuple[int, int, int, int], tokens: int, seed: int = 0) -> tuple[BlockInfo, KVView, Any]:
    """A block of two layers: its description, a view of it, and the bits."""
    key_heads, key_dim, value_heads, value_dim = shape
    assert key_heads == value_heads
    layout = KVLayout((LayerLayout(key_heads, key_dim, value_dim),) * 2, "bfloat16")
    bits = [
        (
            heads_of(kind, key_heads, tokens, key_dim, seed + i),
            heads_of(kind, key_heads, tokens, value_dim, seed + i + 9),
        )
        for i in range(2)
    ]
    view = KVView.of_layers(layout, [(as_tensor(k), as_tensor(v)) for k, v in bits])
    return BlockInfo(layout, np.arange(tokens, dtype=np.uint32), 0), view, bits


def model() -> _native.EntropyModel:
    return _native.EntropyModel(*spec.tables())


def encoded(info: BlockInfo, view: KVView, level: str) -> list[bytes]:
    out = bytearray(CODEC.bound(info))
    sizes = _native.encode("bfloat16", *row_shapes(info.layout), info.count, view.rows, out, model(), level)
    assert sizes is not None
    ends = np.cumsum(sizes)
    return [bytes(out[end - size : end]) for end, size in zip(ends.tolist(), sizes, strict=True)]


def decoded(info: BlockInfo, layers: list[bytes], level: str, wanted: int | None = None) -> list[Any]:
    wanted = info.count if wanted is None else wanted
    out = [
        tuple(torch.full((x.heads, wanted, dim), 7.0).bfloat16() for dim in (x.key_dim, x.value_dim))
        for x in info.layout.layers
    ]
    rows = KVView.of_layers(info.layout, out).rows
    sizes = [len(layer) for layer in layers]
    payload = b"".join(layers)
    shapes = row_shapes(info.layout)
    wrong = _native.decode("bfloat16", *shapes, info.count, payload, sizes, rows, wanted, model(), level)
    if wrong is not None:
        raise CodecError(wrong)
    return [(as_bits(k), as_bits(v)) for k, v in out]


def same(found: list[Any], want: list[Any], tokens: int) -> bool:
    return all(
        np.array_equal(a, b[:, :tokens])
        for mine, theirs in zip(found, want, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 150), st.sampled_from([1, 3, 16, 64, 80]),
    st.sampled_from([1, 16, 64, 300]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    kind: str, heads: int, tokens: int, key_dim: int, value_dim: int, seed: int
) -> None:
    shape = heads, key_dim, heads, value_dim
    info, view, bits = block(kind, shape, tokens, seed)
    found = [encoded(info, view, level) for level in LEVELS]
    assert all(one == found[0] for one in found)
    for layer, (keys, values) in zip(found[0], bits, strict=True):
        want = entropy_reference.encode_layer(list(keys), list(values))
        if struct.unpack_from("<I", layer)[0] == entropy_reference.MODE_ENTROPY:
            assert layer == want
            back = entropy_reference.decode_layer(layer, shape, tokens)
            assert np.array_equal(np.stack(back[0]), keys)
            assert np.array_equal(np.stack(back[1]), values)
        else:
            assert len(want) > 0.7 * (keys.nbytes + values.nbytes)
    for level in LEVELS:
        assert same(decoded(info, found[0], level), bits, tokens)
        some = max(1, tokens // 3)
        assert same(decoded(info, found[0], level, some), bits, some)


def test_channels_of_one_size_and_sign_are_coded_well_and_noise_is_left_to_splitzip() -> None:
    shape = (3, 64, 3, 64)
    raw = 2 * 6 * 64 * 64 * 2
    modes, sizes = {}, {}
    for kind in ("channels", "normal", "random"):
        info, view, _ = block(kind, shape, 64)
        layers = encoded(info, view, LEVELS[-1])
        modes[kind] = {struct.unpack_from("<I", layer)[0] for layer in layers}
        sizes[kind] = raw / sum(map(len, layers))
    assert modes == {"channels": {2}, "normal": {2}, "random": {1}}
    assert sizes["channels"] > 1.5
    assert sizes["normal"] > 1.5
    assert sizes["random"] > 0.998


def test_every_16_bit_pattern_comes_back() -> None:
    every = np.random.default_rng(1).permutation(np.arange(1 << 16, dtype=np.uint16)).reshape(2, 512, 64)
    ordinary = heads_of("normal", 2, 512, 64, 3)
    # Rare enough in between for the layer to be coded.
    mixed = np.concatenate([*[ordinary] * 20, every, *[ordinary] * 9], axis=1)
    layout = KVLayout.uniform(1, 2, 64)
    info = BlockInfo(layout, np.arange(mixed.shape[1], dtype=np.uint32), 0)
    view = KVView.of_layers(layout, [(as_tensor(mixed), as_tensor(mixed))])
    for level in LEVELS:
        layers = encoded(info, view, level)
        assert struct.unpack_from("<I", layers[0])[0] == 2
        assert same(decoded(info, layers, level), [(mixed, mixed)], mixed.shape[1])


def test_other_dtypes_are_splitzips() -> None:
    splitzip = codec_by_name("splitzip")
    for dtype in ("float16", "float32"):
        layout = KVLayout.uniform(2, 2, 16, dtype)
        kv = [(torch.randn(2, 9, 16).to(getattr(torch, dtype)),) * 2] * 2
        info = BlockInfo(layout, np.arange(9, dtype=np.uint32), 0)
        outs = [memoryview(bytearray(codec.bound(info))) for codec in (CODEC, splitzip)]
        sizes = [
            codec.encode(info, KVView.of_layers(layout, kv), out)
            for codec, out in zip((CODEC, splitzip), outs, strict=True)
        ]
        assert sizes[0] == sizes[1]
        assert bytes(outs[0]) == bytes(outs[1])


def test_splitzip_does_not_read_what_only_this_codec_writes() -> None:
    info, view, _ = block("channels", (3, 64, 3, 64), 64)
    layers = encoded(info, view, LEVELS[-1])
    with pytest.raises(CodecError):
        codec_by_name("splitzip").decode(info, memoryview(b"".join(layers)), [len(x) for x in layers], view)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["channels", "outliers"]), st.data())
def test_damaged_layers_are_refused_or_decode_to_something(kind: str, data: st.DataObject) -> None:
    info, view, _ = block(kind, (2, 48, 2, 64), 50)
    layers = encoded(info, view, LEVELS[-1])
    assert struct.unpack_from("<I", layers[0])[0] == 2
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
    if layer[:4] == struct.pack("<I", 2):
        try:
            found = entropy_reference.decode_layer(bytes(layer), (2, 48, 2, 64), 50)
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
