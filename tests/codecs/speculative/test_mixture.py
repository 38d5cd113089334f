"""The mixture coder of fp8: exact, near its ideal, and safe to give any bytes."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from kvstore import KVLayout
from kvstore.codecs.speculative import mixture
from kvstore.codecs.speculative.codec import SpeculativeCodec
from kvstore.codecs.speculative.mixture import Scales, codes_of, decode, encode, ranks_of
from kvstore.errors import CodecError

ALL = np.arange(256, dtype=np.uint8)


def _values(codes: mixture.U8) -> mixture.F32:
    found: mixture.F32 = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    return found


def _case(rows: int = 200, channels: int = 48) -> tuple[mixture.U8, mixture.F32, Scales]:
    """Codes, predictions that they lie around, every channel with a scale of its own, and what is measured."""
    random = np.random.default_rng(0)
    mean = random.integers(-4000, 4000, (rows, channels)).astype(np.float32) / 1024
    scale = np.float32(2.0) ** random.integers(-7, 0, channels).astype(np.float32)
    near = mean + random.normal(0, 1, mean.shape).astype(np.float32) * scale
    codes = torch.from_numpy(near).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes, mean, Scales.of(codes, mean, _values(codes))


def test_ranks_are_the_order_of_numbers() -> None:
    ordered = _values(codes_of(np.arange(1, 255)))
    assert np.array_equal(codes_of(ranks_of(ALL)), ALL)
    assert (np.diff(ordered) >= 0).all()
    assert [math.copysign(1, x) for x in ordered[126:128]] == [-1, 1]


def test_what_is_encoded_comes_back() -> None:
    codes, mean, scales = _case()
    assert np.array_equal(decode(encode(codes, mean, scales), mean, scales), codes)


def test_every_code_comes_back_around_any_prediction() -> None:
    codes = np.tile(ALL, (8, 1))
    mean = np.repeat(np.array([[0.0], [-0.0], [1e-9], [3.0], [-448.0], [1e30], [-3e38], [17.5]], np.float32), 256, 1)
    for eighths in (0, 160, 255):
        scales = Scales(np.full(256, eighths, np.uint8), _case()[2].seen)
        assert np.array_equal(decode(encode(codes, mean, scales), mean, scales), codes)


def test_a_stream_is_near_the_ideal_of_the_mixture() -> None:
    codes, mean, scales = _case(2000)
    deviation = (_values(codes) - mean).std(0)
    edges = mixture.edges_of_codes()
    ranks = ranks_of(codes)

    def below(z: float) -> float:
        return 0.95 * math.erfc(-z / math.sqrt(2)) / 2 + 0.03 * math.erfc(-z / 3 / math.sqrt(2)) / 2

    share = np.bincount(ranks.ravel(), minlength=256) / ranks.size
    ideal = 0.0
    for row, column in np.ndindex(100, codes.shape[1]):
        rank = ranks[row, column]
        low, high = ((float(edges[rank + i]) - float(mean[row, column])) / deviation[column] for i in (0, 1))
        ideal -= math.log2(below(high) - below(low) + 0.02 * share[rank])
    spent = (
        8 * (len(encode(codes, mean, scales)) - 3 * mixture._LANES) / codes.size
    )  # without what the lanes begin with
    assert spent < 1.03 * ideal / (100 * codes.shape[1])


def test_the_bytes_stay_the_same() -> None:
    """Written once; what decodes them must not change."""
    codes, mean, scales = _case()
    data = scales.pack() + encode(codes, mean, scales)
    assert hashlib.sha256(data).hexdigest() == "70903e9897988567667d4d42252215d02395d32c8a49980b7b93bc876b501710"


@pytest.mark.parametrize("seed", range(3))
def test_damaged_streams_are_refused_or_other_codes(seed: int) -> None:
    codes, mean, scales = _case(60)
    data, random = encode(codes, mean, scales), np.random.default_rng(seed)
    for _ in range(10):
        damaged = bytearray(data)
        damaged[random.integers(len(data))] ^= 1 << int(random.integers(8))
        with pytest.raises(CodecError):
            decode(bytes(damaged), mean, scales)
    for cut in (b"", data[:-2], data[:-1], data + b"\0\0"):
        with pytest.raises(CodecError):
            decode(cut, mean, scales)


def test_damaged_scales_are_refused() -> None:
    packed = _case()[2].pack()
    assert Scales.parse(packed, 48).pack() == packed
    for wrong in (packed[:-1], packed + b"\0", packed[:48] + bytes(512), packed[:48] + b"\xff" * 512):
        with pytest.raises(CodecError):
            Scales.parse(wrong, 48)


def test_a_cache_of_fp8_comes_back() -> None:
    layout = KVLayout.uniform(num_layers=2, heads=2, head_dim=12, dtype="float8_e4m3fn")
    codes, mean, _ = _case(90, 96)
    parts = [x.reshape(90, 2, 12).transpose(1, 0, 2).copy() for x in np.split(codes, 4, 1)]
    near = [torch.from_numpy(x.reshape(90, 2, 12).transpose(1, 0, 2).copy()).bfloat16() for x in np.split(mean, 4, 1)]
    cache = [tuple(torch.from_numpy(x).view(torch.float8_e4m3fn) for x in parts[i : i + 2]) for i in (0, 2)]
    chunks = [[(near[i][:, a:b], near[i + 1][:, a:b]) for i in (0, 2)] for a, b in ((0, 64), (64, 90))]
    codec, tokens = SpeculativeCodec(layout, bytes(16)), np.arange(90, dtype=np.uint32)
    for sure in ([True, True], [True, False]):
        body = codec.encode(tokens, cache, [64, 26], chunks, sure)
        out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in cache]
        codec.decode(tokens, body, [64, 26], chunks, out)
        for left, right in zip(out, cache, strict=True):
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True))
        assert codec.plain_chunks(body) == sure.count(False)
    for cut in (body[:40], body[:-1]):
        with pytest.raises(CodecError):
            codec.decode(tokens, cut, [64, 26], chunks, out)
