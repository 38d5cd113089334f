"""The body of speculative archives: exact, hostile bytes, other predictors, other profiles."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore import KVLayout, ModelIdentity
from kvstore.codecs import Profile
from kvstore.codecs.speculative.codec import SECTION, SpeculativeCodec, sum_of_prediction
from kvstore.errors import CodecError, ProfileError

LAYOUT = KVLayout.uniform(num_layers=3, heads=2, head_dim=16)
COUNTS = [32, 32, 9]
TOKENS = np.arange(sum(COUNTS), dtype=np.uint32)
NAME = bytes(range(16))
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def _noise(seed: int) -> torch.Tensor:
    """Numbers that are the same on every machine, float32 [3, 2, 2, 73, 16]."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(-4096, 4096, (3, 2, 2, len(TOKENS), 16)).astype(np.float32) / 1024)


def _layers(numbers: torch.Tensor) -> Layers:
    return [(k.contiguous(), v.contiguous()) for k, v in numbers.bfloat16()]


CACHE = _layers(_noise(1))
NEAR = _layers(_noise(1) + _noise(2) / 64)


def _predictions(of: Layers) -> list[Layers]:
    ends = np.cumsum([0, *COUNTS]).tolist()
    return [[(k[:, i:j].contiguous(), v[:, i:j].contiguous()) for k, v in of] for i, j in pairwise(ends)]


def _encoded(codec: SpeculativeCodec, sure: tuple[bool, ...] = (True, True, True)) -> bytes:
    return codec.encode(TOKENS, CACHE, COUNTS, _predictions(NEAR), sure)


def _decoded(codec: SpeculativeCodec, body: bytes, of: Layers = NEAR) -> Layers:
    out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in CACHE]
    codec.decode(TOKENS, body, COUNTS, _predictions(of), out)
    return out


def _same(left: Layers, right: Layers) -> bool:
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_what_is_encoded_comes_back_bit_for_bit() -> None:
    codec = SpeculativeCodec(LAYOUT, NAME)
    body = _encoded(codec)
    assert _same(_decoded(codec, body), CACHE)
    assert len(body) < len(_encoded(codec, (False, False, False)))


def test_values_that_no_prediction_is_near_come_back() -> None:
    strange = [(k.clone(), v.clone()) for k, v in CACHE]
    for number, bits in enumerate((0x7F80, 0xFF80, 0x7FC1, 0x8000, 0x0001)):
        strange[1][0].view(torch.int16)[1, 40, number] = bits - 0x10000 if bits > 0x7FFF else bits
    codec = SpeculativeCodec(LAYOUT, NAME)
    body = codec.encode(TOKENS, strange, COUNTS, _predictions(NEAR), [True] * 3)
    assert _same(_decoded(codec, body), strange)


def test_old_bytes_are_read_for_ever() -> None:
    """Written once; only ever added to."""
    body = (Path(__file__).parents[2] / "golden/speculative/chunks.bin").read_bytes()
    codec = SpeculativeCodec(LAYOUT, NAME)
    assert _same(_decoded(codec, body), CACHE)
    assert hashlib.sha256(body).digest() == hashlib.sha256(_encoded(codec, (True, False, True))).digest()


def test_a_chunk_that_is_not_predicted_alike_is_coded_without() -> None:
    codec = SpeculativeCodec(LAYOUT, NAME)
    body = _encoded(codec, (True, False, True))
    assert codec.plain_chunks(body) == 1
    wrong = _predictions(NEAR)
    wrong[1][0][0].add_(1)
    out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in CACHE]
    codec.decode(TOKENS, body, COUNTS, wrong, out)
    assert _same(out, CACHE)


def test_one_bit_of_a_prediction_is_told() -> None:
    codec = SpeculativeCodec(LAYOUT, NAME)
    other = [(k.clone(), v.clone()) for k, v in NEAR]
    other[2][1].view(torch.int16)[1, 70, 3] ^= 1
    with pytest.raises(CodecError, match="predicts other bits"):
        _decoded(codec, _encoded(codec), other)
    assert sum_of_prediction(other) != sum_of_prediction(NEAR)


def test_another_predictor_and_other_chunks_are_told() -> None:
    body = _encoded(SpeculativeCodec(LAYOUT, NAME))
    with pytest.raises(CodecError, match="another predictor"):
        _decoded(SpeculativeCodec(LAYOUT, bytes(16)), body)
    out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in CACHE]
    with pytest.raises(CodecError, match="expected 1 chunks, found 3"):
        SpeculativeCodec(LAYOUT, NAME).decode(TOKENS, body, [73], [NEAR], out)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bodies_are_refused_or_other_values(seed: int) -> None:
    """Never a crash, and never a loop: the archive's checksum of the cache tells what this lets pass."""
    codec, random = SpeculativeCodec(LAYOUT, NAME), np.random.default_rng(seed)
    body = _encoded(codec, (True, False, True))
    for _ in range(60):
        damaged = bytearray(body)
        for at in random.integers(len(body), size=random.integers(1, 4)):
            damaged[at] = random.integers(256)
        cut = bytes(damaged[: random.integers(len(body))] if random.integers(2) else damaged)
        try:
            _decoded(codec, cut)
        except CodecError:
            continue
    for cut in (b"", body[:35], body[:-1], body + b"\0"):
        with pytest.raises(CodecError):
            _decoded(codec, cut)


def test_layouts_and_profiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        SpeculativeCodec(KVLayout.uniform(num_layers=1, heads=2, head_dim=16, dtype="float16"), NAME)
    with pytest.raises(ValueError, match="16 bytes"):
        SpeculativeCodec(LAYOUT, b"short")
    identity = ModelIdentity("model", "main", "weights", "", LAYOUT)
    profile = Profile.new(identity, {"other": {"scale": np.ones(3, np.float32)}})
    with pytest.raises(ProfileError, match=SECTION):
        SpeculativeCodec(LAYOUT, NAME, profile)
