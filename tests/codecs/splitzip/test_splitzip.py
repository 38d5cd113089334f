"""splitzip against its reference in numpy: every twin, byte for byte and bit for bit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from cpulevels import cpu_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.codecs import KVView, _native
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.registry import codec_by_name
from kvstore.codecs.splitzip.codec import bound_values, decode_values, encode_values
from kvstore.codecs.splitzip.reference import CHUNK, DTYPES, HEADER, UNSIGNED, decode_layer, encode_layer, split, window
from kvstore.core.layout import ITEM_BYTES, KVLayout, LayerLayout
from kvstore.errors import CodecError

pytestmark = pytest.mark.native


LEVELS = cpu_levels()
KINDS = ("random", "normal", "zeros", "escapes", "one-outlier", "tiny", "constant", "subnormal")


def values_of(kind: str, count: int, dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, count])
    item = ITEM_BYTES[dtype]
    unsigned = UNSIGNED[item]
    if kind == "random":
        return rng.integers(0, 1 << (8 * item), count, unsigned)
    if kind == "constant":
        return np.full(count, rng.integers(0, 1 << (8 * item)), unsigned)
    plain = rng.standard_normal(count) * (1e-30 if kind == "tiny" else 1.0)
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]
    bits = torch.from_numpy(plain).to(getattr(torch, dtype)).view(signed).numpy().view(unsigned).copy()
    if kind == "zeros":
        bits[rng.random(count) < 0.05] = 0
    if kind == "escapes":
        some = rng.random(count) < 0.02
        bits[some] = rng.integers(0, 1 << (8 * item), int(some.sum()), unsigned)
    if kind == "one-outlier" and count:
        bits[count // 2] = (1 << (8 * item)) - 1
    if kind == "subnormal":
        bits[rng.random(count) < 0.3] = 1
    return bits


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def encoded(values: np.ndarray, dtype: str, level: str | None = None) -> bytes:
    out = bytearray(bound_values(len(values), dtype))
    size = encode_values(values, dtype, level, out)
    assert not any(out[size:])
    return bytes(out[:size])


def decoded(stream: bytes, count: int, dtype: str, level: str | None = None) -> np.ndarray:
    out = np.full(count, 0xAB, UNSIGNED[ITEM_BYTES[dtype]])
    decode_values(stream, dtype, out, level)
    return out


def check(values: np.ndarray, dtype: str) -> bytes:
    want = encode_layer([values], dtype)
    (back,) = decode_layer(want, [len(values)], dtype)
    assert np.array_equal(back, values)
    for level in LEVELS:
        assert encoded(values, dtype, level) == want
        assert np.array_equal(decoded(want, len(values), dtype, level), values)
    return want


def test_this_machine_runs_its_best_twin() -> None:
    assert LEVELS[0] == "scalar"
    with pytest.raises(ValueError, match="level: expected scalar, avx2, avx512, amx or neon, found 'best'"):
        encode_values(np.zeros(1, np.uint16), "bfloat16", "best", bytearray(100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_twins_give_the_bytes_of_the_reference_at_every_length(kind: str, dtype: str) -> None:
    for count in [*range(70), 127, 128, 129, 191, 1000, 4063, *range(4094, 4099), 8192, 8200, 12_345]:
        check(values_of(kind, count, dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_lengths_up_to_a_chunk_come_back(dtype: str) -> None:
    everything = values_of("escapes", 4097, dtype, seed=5)
    for count in range(4098):
        values = everything[:count]
        streams = {encoded(values, dtype, level) for level in LEVELS}
        assert len(streams) == 1
        stream = streams.pop()
        for level in LEVELS:
            assert np.array_equal(decoded(stream, count, dtype, level), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_comes_back(dtype: str) -> None:
    rng = np.random.default_rng(3)
    in_order = np.arange(1 << 16, dtype=np.uint16)
    for values in (in_order, in_order[::-1].copy(), rng.permutation(in_order)):
        check(values, dtype)


def test_every_e5m2_pattern_comes_back() -> None:
    check(np.arange(256, dtype=np.uint8), "float8_e5m2")
    check(np.random.default_rng(3).permutation(np.arange(256, dtype=np.uint8).repeat(33)), "float8_e5m2")


@settings(max_examples=part(300), deadline=None)
@given(
    st.sampled_from(list(DTYPES)),
    st.integers(0, 9000),
    st.lists(st.tuples(st.integers(0, 255), st.floats(0, 1)), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
)
def test_mixtures_of_exponents(dtype: str, count: int, spikes: list[tuple[int, float]], seed: int) -> None:
    """Any distribution of exponents: the choice of the window could differ."""
    rng = np.random.default_rng(seed)
    values = values_of("random", count, dtype, seed)
    _, low_bytes, rest_bits = DTYPES[dtype]
    shift = 8 * low_bytes + rest_bits - 1
    mask = (0xFF if rest_bits == 8 else 0x1F) << shift
    wanted = np.array([e & (mask >> shift) for e, _ in spikes], np.uint64)
    share = np.array([p + 1e-9 for _, p in spikes])
    exponents = rng.choice(wanted, count, p=share / share.sum()) + rng.integers(0, 3, count).astype(np.uint64)
    exponents &= np.uint64(mask >> shift)
    bits = (values.astype(np.uint64) & ~np.uint64(mask)) | (exponents << np.uint64(shift))
    check(bits.astype(values.dtype), dtype)


def test_ordinary_values_take_three_quarters_and_nothing_takes_more_than_itself() -> None:
    ratios = {}
    for dtype in DTYPES:
        values = values_of("normal", 200_000, dtype)
        ratios[dtype] = values.nbytes / len(encoded(values, dtype))
        noise = values_of("random", 200_000, dtype)
        assert len(encoded(noise, dtype)) <= 1.002 * noise.nbytes + 64
    assert ratios["bfloat16"] > 1.33
    assert ratios["float8_e5m2"] > 1.13
    assert ratios["float32"] > 1.14
    assert ratios["float16"] > 1.065


def test_zeros_and_a_few_outliers_cost_little() -> None:
    plain = len(encoded(values_of("normal", 100_000, "bfloat16"), "bfloat16"))
    assert len(encoded(values_of("zeros", 100_000, "bfloat16"), "bfloat16")) < 1.001 * plain
    assert len(encoded(values_of("escapes", 100_000, "bfloat16"), "bfloat16")) < 1.05 * plain


def test_the_window_moves_below_outliers_and_keeps_a_code_for_zero() -> None:
    ordinary = np.full(CHUNK, 120, np.uint8)
    assert window(ordinary) == (105, False)
    with_zero = ordinary.copy()
    with_zero[7] = 0
    assert window(with_zero) == (105, True)
    outliers = ordinary.copy()
    outliers[:100] = 250
    assert window(outliers) == (105, False)
    outliers[100:200] = 250  # more than 1/32 of the chunk
    assert window(outliers) == (235, False)
    assert window(np.zeros(5, np.uint8)) == (0, False)


def test_a_chunk_that_is_stored_raw_is_counted() -> None:
    codec = codec_by_name("splitzip")
    layout = KVLayout((LayerLayout(1, 64, 64), LayerLayout(1, 64, 64)), "bfloat16")
    info = BlockInfo(layout, np.arange(64, dtype=np.uint32), 0)
    noise = (
        torch.from_numpy(values_of("random", 4096, "bfloat16").view(np.int16)).view(torch.bfloat16).reshape(1, 64, 64)
    )
    plain = torch.ones(1, 64, 64, dtype=torch.bfloat16)
    for layers, raw in (([(plain, plain)] * 2, 0), ([(plain, noise), (noise, noise)], 3)):
        out = memoryview(bytearray(codec.bound(info)))
        sizes = codec.encode(info, KVView.of_layers(layout, layers), out)
        assert sizes is not None
        assert codec.fallbacks(out[: sum(sizes)], sizes) == raw


def test_too_little_room_is_said_and_the_usual_is_enough_for_ordinary_values() -> None:
    codec = codec_by_name("splitzip")
    layout = KVLayout.uniform(3, 2, 64)
    info = BlockInfo(layout, np.arange(64, dtype=np.uint32), 0)
    shape = (2, 64, 64)
    plain = [(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in range(3)]
    noise = as_tensor(values_of("random", 8192, "bfloat16")).reshape(shape)
    assert codec.usual(info) < 0.8 * codec.bound(info)
    usual = memoryview(bytearray(codec.usual(info)))
    assert codec.encode(info, KVView.of_layers(layout, plain), usual) is not None
    assert codec.encode(info, KVView.of_layers(layout, [(noise, noise)] * 3), usual) is None
    for room in range(0, codec.bound(info), 997):
        memory = bytearray(codec.bound(info) + 64)
        memory[room:] = b"\x5a" * (len(memory) - room)
        sizes = codec.encode(info, KVView.of_layers(layout, [(noise, noise)] * 3), memoryview(memory)[:room])
        assert sizes is None
        assert memory[room:] == b"\x5a" * (len(memory) - room), "written beyond its end"


# ---- hostile streams ----


@settings(max_examples=part(300), deadline=None)
@given(st.sampled_from(list(DTYPES)), st.sampled_from([1, 31, 64, 700, 5000]), st.data())
def test_damaged_streams_are_refused_or_decode_to_something(dtype: str, count: int, data: st.DataObject) -> None:
    values = values_of("escapes", count, dtype)
    stream = bytearray(encoded(values, dtype))
    for _ in range(data.draw(st.integers(1, 6))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        stream = stream[: data.draw(st.integers(0, len(stream)))]
    outcomes = []
    for level in LEVELS:
        try:
            outcomes.append(decoded(bytes(stream), count, dtype, level).tobytes())
        except CodecError:
            outcomes.append(b"refused")
    try:
        outcomes.append(decode_layer(bytes(stream), [count], dtype)[0].tobytes())
    except CodecError:
        outcomes.append(b"refused")
    assert len(set(outcomes)) == 1, "the twins disagree"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, 2, "header"),
        (4, 3, "header"),
        (8, 1 << 31, "header"),
        (8, 0, "header|impossible"),
    ],
)
def test_headers_that_contradict_the_layer_are_refused(field: int, value: int, message: str) -> None:
    stream = bytearray(encoded(values_of("escapes", 5000, "bfloat16"), "bfloat16"))
    assert HEADER.unpack_from(stream)[2] > 16
    struct.pack_into("<I", stream, field, value)
    with pytest.raises(CodecError, match=message):
        decoded(bytes(stream), 5000, "bfloat16")


def test_escapes_that_point_outside_of_their_chunk_are_refused() -> None:
    values = values_of("escapes", 5000, "bfloat16")
    stream = bytearray(encoded(values, "bfloat16"))
    _, chunks, _, raw = HEADER.unpack_from(stream)
    assert (chunks, raw) == (2, 0)
    padded = -(-5000 // 32) * 32
    first = 16 + padded // 2 + padded + 5 * chunks
    struct.pack_into("<H", stream, first, 4096)
    with pytest.raises(CodecError, match="outside of its chunk"):
        decoded(bytes(stream), 5000, "bfloat16")


def test_bad_arguments_are_refused() -> None:
    values = np.zeros(10, np.uint16)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        encode_values(values, "int8", None, bytearray(100))
    with pytest.raises(ValueError, match="contiguous run of 2-byte integers"):
        encode_values(values[::2], "bfloat16", None, bytearray(100))
    with pytest.raises(ValueError, match="out: too short"):
        encode_values(values, "bfloat16", None, bytearray(10))
    with pytest.raises(ValueError, match="one dimension without gaps"):
        encode_values(values, "bfloat16", None, np.zeros(1000, np.uint8)[::-1])
    fixed = np.zeros(10, np.uint16)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="out: cannot be written to"):
        decode_values(encoded(values, "bfloat16"), "bfloat16", fixed)
    with pytest.raises(ValueError, match="more values than can be coded at once"):
        bound_values(1 << 32, "bfloat16")
    assert bound_values((1 << 32) - (1 << 22), "bfloat16") > 1 << 32
    with pytest.raises(ValueError, match="more values than can be coded at once"):
        _native.bounds("bfloat16", np.array([1 << 16, 0], np.uint32), np.array([1 << 31, 2], np.uint32), 1 << 32)
    heads, row_bytes = np.array([1, 1], np.uint32), np.array([2, 2], np.uint32)
    rows = np.zeros((3, 2), np.int64)
    with pytest.raises(ValueError, match="wanted: more tokens"):
        _native.decode("bfloat16", heads, row_bytes, 1, b"", [0], rows, 2)
    with pytest.raises(ValueError, match="sizes: expected one a layer"):
        _native.decode("bfloat16", heads, row_bytes, 1, b"", [], rows, 1)


def test_the_exponent_of_the_reference_is_the_one_of_the_format() -> None:
    """The positive control of the reference itself."""
    exponent, rest, low = split(np.array([0xBF80, 0x4049], np.uint16), "bfloat16")
    assert (exponent.tolist(), rest.tolist(), low.tolist()) == ([127, 128], [0x80, 0x49], [0, 0])
    exponent, rest, low = split(np.array([0xC045], np.uint16), "float16")
    assert (exponent.tolist(), rest.tolist(), low.tolist()) == ([16], [4], [0x45])


def test_e4m3_has_nothing_to_save_and_is_stored_as_it_is_and_counted() -> None:
    codec = codec_by_name("splitzip")
    layout = KVLayout((LayerLayout(3, 64, 32),) * 2, "float8_e4m3fn")
    info = BlockInfo(layout, np.arange(70, dtype=np.uint32), 0)
    kv = [tuple(torch.randn(3, 70, dim).to(torch.float8_e4m3fn) for dim in (64, 32)) for _ in range(2)]
    out = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(layout, kv), out)
    assert sizes == (16 + 3 * 70 * 96,) * 2
    assert codec.usual(info) == codec.bound(info) == sum(sizes)
    assert codec.fallbacks(out, sizes) == 2 * 3 * (2 + 1)
    assert codec.encode(info, KVView.of_layers(layout, kv), out[:-1]) is None
    out[0] = 1
    with pytest.raises(CodecError, match="header"):
        codec.decode(info, out, sizes, KVView.of_layers(layout, kv))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["normal", "escapes", "random"])
@pytest.mark.parametrize(("tokens", "wanted", "gap"), [(3, 2, 0), (70, 70, 0), (70, 67, 0), (70, 69, 8)])
def test_blocks_decode_past_the_caches_to_the_same_bits(
    level: str, dtype: str, kind: str, tokens: int, wanted: int, gap: int
) -> None:
    """In place where that is aligned and nothing is escaped, else by way of the first cache; with gaps in rows, too.
    Nothing is written beside the rows."""
    heads, dim = 2, 72
    item = ITEM_BYTES[dtype]
    values = values_of(kind, 2 * heads * tokens * dim, dtype).reshape(2, heads, tokens, dim)
    shape = [np.full(2, heads, np.uint32), np.full(2, dim * item, np.uint32)]
    source = np.array([[v.ctypes.data for v in values], [v.strides[0] for v in values], [v.strides[1] for v in values]])
    out = bytearray(_native.bounds(dtype, *shape, tokens)[0])
    sizes = _native.encode(dtype, *shape, tokens, source.astype(np.int64), out, level=level)
    room = 2 * heads * wanted * (dim + gap)
    for shift in (0, 1, 24, 32):
        memory = np.full(room + 256, 7, values.dtype)
        begin = -memory.ctypes.data // item % (64 // item) + shift
        target = memory[begin : begin + room].reshape(2, heads, wanted, dim + gap)
        table = np.array([[t.ctypes.data for t in target], [target.strides[1]] * 2, [target.strides[2]] * 2], np.int64)
        coded = out[: sum(sizes)]
        assert _native.decode(dtype, *shape, tokens, coded, sizes, table, wanted, level=level, large=True) is None
        assert np.array_equal(target[..., :dim], values[:, :, :wanted])
        target[..., :dim] = 7
        assert (memory == 7).all()
