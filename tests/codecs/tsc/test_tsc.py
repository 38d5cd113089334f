"""Codec 6: errors are as small as records say however long a sequence is, and no bytes can harm."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from codeccontract import block_info, decode, encode
from kvcases import config, identity, same_kv

from kvstore import KVLayout, KVStore, LayerLayout, ModelIdentity, TierConfig
from kvstore.codecs import codec_by_name
from kvstore.codecs.tsc.codec import TscCodec, _rows
from kvstore.codecs.tsc.frames import Frames, bytes_of, floats_of
from kvstore.codecs.tsc.reference import decode as plain_decode
from kvstore.codecs.tsc.reference import encode as plain_encode
from kvstore.config import MIB
from kvstore.errors import CodecError, ConfigError

HEADER = 8
WIDE = KVLayout((LayerLayout(5, 123, 61),), "bfloat16")  # pages of 256 and what is left of them, odd ones too


def drifting(layout: KVLayout, count: int, seed: int = 0):
    """Values that wander ever further away, so that an error that grew with the tokens would be seen."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(
            torch.randn(x.heads, count, dim, generator=generator).cumsum(1).to(getattr(torch, layout.dtype))
            for dim in (x.key_dim, x.value_dim)
        )
        for x in layout.layers
    ]


def errors_of(found, given) -> np.ndarray:
    """The largest error of each token."""
    return np.max(
        [(a.double() - b.double()).abs().amax(dim=(0, 2)).numpy() for f, g in zip(found, given, strict=True)
         for a, b in zip(f, g, strict=True)],
        axis=0,
    )  # fmt: skip


# -- the bytes are those of the plain program --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize(("kappa", "top"), [(2, 0), (5, 8), (64, 20)])
def test_bytes_and_numbers_are_those_of_the_plain_program(dtype: str, kappa: int, top: int) -> None:
    layout, count = replace(WIDE, dtype=dtype), 7
    (pair,) = drifting(layout, count)
    payload, sizes = encode(TscCodec(kappa, top), block_info(layout, count), [pair])
    rows = [_rows(tensor) for tensor in pair]
    plain = plain_encode([(floats_of(x), bytes_of(x)) for x in rows], kappa, top)
    assert payload[HEADER:] == plain
    (found,) = decode(TscCodec(), block_info(layout, count), payload, sizes)
    again = plain_decode(plain, count, (5 * 123, 5 * 61), kappa, top, pair[0].dtype)
    for tensor, (_, raw) in zip(found, again, strict=True):
        assert np.array_equal(bytes_of(_rows(tensor)), raw)


# -- the error ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_the_error_of_each_token_is_half_a_step_of_its_own_pages(seed: int) -> None:
    """Whatever the numbers, kappa and corrections: of each page the step is in the record, nothing else counts."""
    generator = np.random.default_rng(seed)
    kappa, top, count = (int(generator.integers(*bounds)) for bounds in ((2, 40), (0, 33), (1, 150)))
    layout = KVLayout.uniform(1, 1, int(generator.integers(1, 600)), "float32")
    spread = torch.from_numpy(generator.lognormal(0, 2, (1, count, 1)).astype(np.float32))
    ((k, v),) = drifting(layout, count, seed)
    k, v = k * spread, v * spread
    payload, sizes = encode(TscCodec(kappa, top), block_info(layout, count), [(k, v)])
    found = decode(TscCodec(), block_info(layout, count), payload, sizes)
    bound = TscCodec().error_bound(memoryview(payload), sizes)
    errors = errors_of(found, [(k, v)])
    assert (errors <= bound).all()
    assert errors.max() == pytest.approx(bound) or bound < 1e-44
    if not payload[0]:
        return  # a layer that is not smaller coded is raw
    frames = Frames(count, min(kappa, count), (k.shape[2], v.shape[2]), 4, top)
    _, others = frames._split(np.frombuffer(payload, np.uint8)[HEADER:])
    steps = np.zeros(count)
    at = 0
    for pages in frames.pages:
        for page in pages._pages():
            codes = np.ascontiguousarray(others[:, at + page.at : at + page.at + 2]).view("<u2")[:, 0]
            step = (codes.astype(np.uint32) << 16).view(np.float32)
            steps[frames._others] = np.maximum(steps[frames._others], step)
        at += pages.row_bytes
    rounding = 2**-22 * max(float(k.abs().max()), float(v.abs().max()))
    assert (errors <= steps / 2 + rounding).all()
    assert (errors[:: min(kappa, count)] == 0).all()


def test_the_error_does_not_grow_with_the_length() -> None:
    """2,048 tokens and every beginning of them: the error of a token is the same number in all."""
    layout, count = KVLayout.uniform(1, 2, 32), 2048
    codec, kv = TscCodec(kappa=64), drifting(layout, count)
    payload, sizes = encode(codec, block_info(layout, count), kv)
    errors = errors_of(decode(codec, block_info(layout, count), payload, sizes), kv)
    for short in (65, 128, 1000):
        part = [tuple(t[:, :short] for t in pair) for pair in kv]
        found = decode(codec, block_info(layout, short), *encode(codec, block_info(layout, short), part))
        assert np.array_equal(errors_of(found, part), errors[:short])
    # Keyframes end what came before: late tokens are as near as early ones, though the values have gone far.
    early, late = errors[:512].max(), errors[-512:].max()
    assert late < 1.5 * early + 2**-8 * float(kv[0][0].abs().max())


def test_more_tokens_are_more_bytes_behind_the_same() -> None:
    """`prefer_append_for_growing`: nothing that was coded is coded again."""
    layout = KVLayout.uniform(1, 2, 32)
    kv = drifting(layout, 150)
    whole, _ = encode(TscCodec(16), block_info(layout, 150), kv)
    for short in (17, 64, 65, 149):
        part, _ = encode(TscCodec(16), block_info(layout, short), [tuple(t[:, :short] for t in p) for p in kv])
        assert whole[HEADER : len(part)] == part[HEADER:]


def test_corrections_and_more_keyframes_lose_less_and_take_more() -> None:
    layout, info = KVLayout.uniform(2, 2, 64), block_info(KVLayout.uniform(2, 2, 64), 64)
    kv = drifting(layout, 64)
    found = [encode(codec, info, kv) for codec in (TscCodec(64, 0), TscCodec(64, 8), TscCodec(8, 8))]
    bounds = [TscCodec().error_bound(memoryview(payload), sizes) for payload, sizes in found]
    assert bounds[0] > bounds[1] > bounds[2] > 0
    assert len(found[0][0]) < len(found[1][0]) < len(found[2][0])


def test_a_block_coded_without_loss_does_not_say_that_its_error_is_unknown() -> None:
    layout = KVLayout.uniform(2, 2, 16)
    payload, sizes = encode(TscCodec(), block_info(layout, 9), [(torch.zeros(2, 9, 16).bfloat16(),) * 2] * 2)
    assert 0 < TscCodec().error_bound(memoryview(payload), sizes) < 1e-44


# -- what is refused ---------------------------------------------------------------------------------------------------


def hostile(at: int, value: int) -> bytes:
    """A coded layer of 5 tokens of 2 x 32 values, a byte of which is something else."""
    layout = KVLayout.uniform(1, 1, 32)
    payload, _ = encode(TscCodec(4, 16), block_info(layout, 5), drifting(layout, 5))
    return payload[:at] + bytes([value]) + payload[at + 1 :]


FRAME = HEADER + 2 * 32 * 2  # the first frame that is no keyframe: scale 2, numbers 16, places 2, values 4


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, 7, "unknown header"),
        (1, 65, "unknown header"),
        (2, 0, "unknown header"),
        (3, 9, "unknown header"),
        (7, 0xFF, "unknown header"),
        (7, 0xBF, "unknown header"),
        (2, 2, "bytes, expected"),
        (1, 0, "bytes, expected"),
        (HEADER + 1, 0x7F, "not finite"),
        (FRAME + 1, 0x7F, "a scale that is not finite"),
        (FRAME + 1, 0xC0, "a scale that is not finite"),
        (FRAME + 2, 0x0F, "more than 7 steps"),
        (FRAME + 18, 31, "not in order"),
        (FRAME + 19, 32, "outside of it"),
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(at: int, value: int, match: str) -> None:
    payload = hostile(at, value)
    if match == "not finite":
        payload = payload[:HEADER] + b"\x80\x7f" + payload[HEADER + 2 :]
    with pytest.raises(CodecError, match=match):
        decode(TscCodec(), block_info(KVLayout.uniform(1, 1, 32), 5), payload, (len(payload),))


def test_steps_beyond_what_the_type_holds_become_its_largest_number() -> None:
    layout = KVLayout.uniform(1, 1, 32, "float16")
    payload, sizes = encode(TscCodec(4, 0), block_info(layout, 5), drifting(layout, 5))
    at = HEADER + 2 * 32 * 2
    payload = payload[:at] + struct.pack("<H", 0x7F00) + bytes([0x0E]) + payload[at + 3 :]
    ((k, _),) = decode(TscCodec(), block_info(layout, 5), payload, sizes)
    assert k[0, 1, :2].tolist() == [65504, -65504]


@pytest.mark.parametrize(
    ("kappa", "top", "match"), [(1, 8, "kappa"), (1 << 16, 8, "kappa"), (8, -1, "top"), (8, 65, "top")]
)
def test_settings_that_cannot_be_are_refused(kappa: int, top: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TscCodec(kappa, top)


# -- in a store --------------------------------------------------------------------------------------------------------


def test_a_store_keeps_it_with_its_error_and_only_where_loss_was_asked_for(tmp_path: Path) -> None:
    layout = KVLayout.uniform(2, 2, 32)
    settings = config(disk=TierConfig(16 * MIB, "tsc@4"), host=TierConfig(0))
    exact: ModelIdentity = identity(layout)
    with pytest.raises(ConfigError, match=r"disk\.codec: 'tsc@4' is lossy, but the identity says"):
        KVStore(tmp_path / "exact", exact, settings)
    lossy, kv = replace(exact, codec_family="lossy"), drifting(layout, 24)
    for _ in range(2):  # and after it was opened again
        with KVStore(tmp_path / "lossy", lossy, settings) as store:
            store.put(list(range(24)), kv)
            store.flush()
            hit = store.get(list(range(24)))
            assert hit is not None
            assert hit.tokens == 24
            found = [(k[0], v[0]) for k, v in hit.layers]
            errors = errors_of(found, kv)
            assert errors[::4].max() == 0 < errors.max() < 1
            assert store.check(deep=True).ok
    assert not same_kv(found, kv)
    assert codec_by_name("tsc@4") is codec_by_name("tsc@4")
