"""AQUA-KV: what is predicted costs less, the first tokens are exact, hostile bytes are refused; and its calibration."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from aquacases import LAYOUT, LENGTH, ROPE, cache_of, decode, dump_of, encode, error, info_of, smooth_rows
from damaged_layers import noticed
from kvcases import mixed_layout, same_kv

from kvstore import KVLayout, LayerLayout
from kvstore.calibration.aqua.fit import Ridge, fit
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.aqua.predictors import AquaPredictors, weight_shapes
from kvstore.errors import CodecError, ConfigError, ProfileError


@pytest.fixture(scope="module")
def predictors() -> AquaPredictors:
    return fit(dump_of(4), 2)


@pytest.fixture(params=["aqua", "higgs", "quanto", "rtn"])
def codec(request: pytest.FixtureRequest, predictors: AquaPredictors) -> AquaCodec:
    return AquaCodec(predictors, 2) if request.param == "aqua" else AquaCodec(None, 4, request.param)


# -- what it does ------------------------------------------------------------------------------------------------------


def test_predictions_spare_bits_on_text_that_nothing_was_fitted_to(predictors: AquaPredictors) -> None:
    kv, info = cache_of(smooth_rows(64, seed=50)), info_of(64)
    codecs = [AquaCodec(predictors, 2), AquaCodec(None, 2), AquaCodec(None, 4)]
    coded = [encode(codec, info, kv) for codec in codecs]
    aqua, two, four = (error(decode(c, info, *e), kv) for c, e in zip(codecs, coded, strict=True))
    assert aqua < 0.3 * four < 0.1 * two
    # The first layer takes 4 bits; headers and the fingerprint are all else.
    assert len(coded[0][0]) == len(coded[1][0]) + 60 * 2 * 64 * 2 // 8


def test_predictors_of_other_maps_are_worse(predictors: AquaPredictors) -> None:
    mixed = AquaPredictors(LAYOUT, tuple(tuple(w[::-1].copy() for w in pair) for pair in predictors.weights))
    kv, info = cache_of(smooth_rows(64, seed=50)), info_of(64)
    errors = [error(decode(c, info, *encode(c, info, kv)), kv) for c in (AquaCodec(predictors, 2), AquaCodec(mixed, 2))]
    assert errors[0] * 10 < errors[1]


@pytest.mark.parametrize("start", [0, 2, 3, 4, 64, 4096])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 64])
def test_the_first_four_tokens_of_a_sequence_come_back_exactly(codec: AquaCodec, start: int, count: int) -> None:
    kv, info = cache_of(smooth_rows(count, seed=7), start=start), info_of(count, start=start)
    found = decode(codec, info, *encode(codec, info, kv))
    sinks = min(count, max(0, 4 - start))
    assert same_kv([tuple(t[:, :sinks] for t in p) for p in found], [tuple(t[:, :sinks] for t in p) for p in kv])
    if sinks < count:
        for f, e in (
            (f[:, sinks:].float(), e[:, sinks:].float())
            for p, q in zip(found, kv, strict=True)
            for f, e in zip(p, q, strict=True)
        ):
            assert (f - e).pow(2).sum() < 0.3 * e.pow(2).sum()
        assert not same_kv(found, kv)


def test_positions_matter_and_are_taken_from_the_block(predictors: AquaPredictors) -> None:
    codec, kv = AquaCodec(predictors, 2), cache_of(smooth_rows(64, seed=3), start=1000)
    right, wrong = info_of(64, start=1000), info_of(64, start=100)
    errors = [error(decode(codec, i, *encode(codec, i, kv)), kv) for i in (right, wrong)]
    assert errors[0] * 3 < errors[1]


@pytest.mark.parametrize("wanted", [1, 4, 5, 37])
def test_the_first_tokens_of_a_block_can_be_decoded_alone(codec: AquaCodec, wanted: int) -> None:
    kv, info = cache_of(smooth_rows(37)), info_of(37)
    coded = encode(codec, info, kv)
    whole = decode(codec, info, *coded)
    assert same_kv(decode(codec, info, *coded, wanted), whole, wanted)


def test_the_same_block_gives_the_same_bytes_whatever_its_strides(codec: AquaCodec) -> None:
    kv, info = cache_of(smooth_rows(20)), info_of(20)
    assert not kv[0][0].is_contiguous()
    assert encode(codec, info, kv) == encode(codec, info, [tuple(t.contiguous() for t in pair) for pair in kv])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("backbone", ["higgs", "quanto", "rtn"])
def test_layers_of_any_shape_and_type(dtype: str, backbone: str) -> None:
    codec = AquaCodec(None, 4, backbone)
    for layout in (mixed_layout(dtype), KVLayout((LayerLayout(5, 123, 7),), dtype), KVLayout.uniform(1, 1, 1, dtype)):
        kv, info = cache_of(smooth_rows(37, layout), layout), info_of(37, layout)
        payload, sizes = encode(codec, info, kv)
        assert len(payload) <= codec.usual(info) <= codec.bound(info)
        found = decode(codec, info, payload, sizes)
        for pair, expected in zip(found, kv, strict=True):
            for f, e in zip(pair, expected, strict=True):
                assert (f.float() - e.float()).abs().mean() < 0.2 * e.float().std() + 0.1


def test_bits_a_value_are_as_published(predictors: AquaPredictors) -> None:
    layout = KVLayout.uniform(30, 3, 64)
    values, info = 64 * layout.bytes_per_token // 2, info_of(64, layout, start=64)
    for bits in (2, 3, 4):
        assert AquaCodec(None, bits).usual(info) * 8 / values == pytest.approx(bits + 16 / 192, abs=0.003)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_layer_that_cannot_be_coded_is_kept_as_it_is(codec: AquaCodec, bad: float) -> None:
    kv, info = cache_of(smooth_rows(20)), info_of(20)
    kv[1][0][0, 9, 3] = bad
    kv[1][1][:] = bad
    payload, sizes = encode(codec, info, kv)
    assert codec.fallbacks(memoryview(payload), sizes) in (1, 2)  # the next may be predicted from it
    found = decode(codec, info, payload, sizes)
    assert same_kv(found[1:2], kv[1:2])
    assert not same_kv(found[:1], kv[:1])
    assert codec.fallbacks(memoryview(encode(codec, info, cache_of(smooth_rows(20)))[0]), sizes[:1]) == 0


def test_a_buffer_that_does_not_do_gives_none(codec: AquaCodec) -> None:
    kv, info = cache_of(smooth_rows(20)), info_of(20)
    payload, _ = encode(codec, info, kv)
    view = KVView.of_layers(LAYOUT, kv)
    assert codec.encode(info, view, memoryview(bytearray(len(payload) - 1))) is None
    assert codec.encode(info, view, memoryview(bytearray(len(payload)))) is not None


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(None, 5), (None, 1), (None, 2, "zip"), (None, True)])
def test_unknown_settings_are_refused(arguments: tuple) -> None:
    with pytest.raises(ConfigError):
        AquaCodec(*arguments)


def test_damaged_bytes_are_refused_or_decoded_and_never_fatal(codec: AquaCodec) -> None:
    info = info_of(16)
    payload, sizes = encode(codec, info, cache_of(smooth_rows(16)))
    rng, starts = np.random.default_rng(0), np.cumsum([0, *sizes[:-1]])

    def changed() -> Iterator[tuple[int, bytes]]:
        for trial in range(600):
            damaged = bytearray(payload)
            where = int(starts[trial % 3]) + trial % 9 if trial % 2 else int(rng.integers(len(payload)))
            damaged[where] ^= int(rng.integers(1, 256))
            yield where, bytes(damaged)

    refused = noticed(changed(), lambda bad: decode(codec, info, bad, sizes), lambda *_: True)
    assert refused > 100


def test_sizes_that_do_not_fit_are_refused(codec: AquaCodec) -> None:
    info = info_of(16)
    payload, (a, b, c) = encode(codec, info, cache_of(smooth_rows(16)))
    for sizes in ((a - 1, b + 1, c), (0, a + b, c), (-1, a + b + 1, c), (a, b), (a, b, c + 1), (a + b + c, 0, 0)):
        with pytest.raises(CodecError):
            decode(codec, info, payload, sizes)
    for cut in (0, 3, len(payload) // 2, len(payload) - 1):
        with pytest.raises(CodecError):
            decode(codec, info, payload[:cut], (a, b, c))
        with pytest.raises(CodecError):
            decode(codec, info, payload[:cut], (cut, 0, 0))
    for other in (15, 17):
        with pytest.raises(CodecError):
            decode(codec, info_of(other), payload, (a, b, c))


def test_a_tiny_payload_of_a_huge_block_is_refused_before_memory_is_taken() -> None:
    layout = KVLayout.uniform(2, 64, 256)
    info = BlockInfo(layout, np.zeros(1 << 20, np.uint32), 4)
    out = KVView.of_layers(layout, [(torch.zeros(64, 1, 256, dtype=torch.bfloat16),) * 2] * 2)
    with pytest.raises(CodecError):
        AquaCodec().decode(info, memoryview(struct.pack("<BBBBI", 1, 2, 0, 0, 0) * 2), (8, 8), out)


def test_what_was_coded_with_other_predictors_is_refused(predictors: AquaPredictors) -> None:
    info, kv = info_of(16), cache_of(smooth_rows(16))
    changed = [[w.copy() for w in pair] for pair in predictors.weights]
    changed[1][1][3, 3] += 1
    other = AquaCodec(AquaPredictors(LAYOUT, tuple(tuple(pair) for pair in changed)), 2)
    coded = encode(AquaCodec(predictors, 2), info, kv)
    for codec in (other, AquaCodec()):
        with pytest.raises(CodecError, match="other predictors"):
            decode(codec, info, *coded)
    assert decode(AquaCodec(predictors, 4), info, *coded)  # bits are in the bytes
    unlike = KVLayout.uniform(3, 2, 32)
    with pytest.raises(CodecError, match="layout"):
        encode(AquaCodec(predictors, 2), info_of(16, unlike), kv)


def test_a_predicted_layer_in_a_codec_without_predictors_is_refused() -> None:
    info = info_of(16)
    payload, sizes = encode(AquaCodec(None, 2), info, cache_of(smooth_rows(16)))
    for mode in (2, 3, 4, 255):
        with pytest.raises(CodecError):
            decode(AquaCodec(None, 2), info, bytes([mode]) + payload[1:], sizes)


# -- predictors --------------------------------------------------------------------------------------------------------


def test_predictors_survive_being_kept_as_arrays(predictors: AquaPredictors) -> None:
    again = AquaPredictors.from_arrays(LAYOUT, predictors.to_arrays())
    assert again.fingerprint == predictors.fingerprint
    assert [w.shape for pair in again.weights for w in pair] == [(65, 64), (129, 64)] * 2


def _without(arrays: dict, name: str) -> None:
    del arrays[name]


HOSTILE: dict[str, Callable[[dict], object]] = {
    "missing": lambda a: _without(a, "key.1"),
    "unknown": lambda a: a.update({"key.3": a["key.2"]}),
    "other-type": lambda a: a.update({"key.1": a["key.1"].astype(np.float32)}),
    "other-shape": lambda a: a.update({"value.2": a["value.2"][:-1]}),
    "no-array": lambda a: a.update({"value.2": [1.0]}),
    "not-a-number": lambda a: a["value.1"].__setitem__((0, 0), np.nan),
    "infinite": lambda a: a["key.2"].__setitem__((64, 63), -np.inf),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_arrays_that_are_no_predictors_are_refused(predictors: AquaPredictors, change: str) -> None:
    arrays = {name: array.copy() for name, array in predictors.to_arrays().items()}
    AquaPredictors.from_arrays(LAYOUT, arrays)
    HOSTILE[change](arrays)
    with pytest.raises(ProfileError):
        AquaPredictors.from_arrays(LAYOUT, arrays)


@pytest.mark.parametrize("rope", ['{"rope_theta": 1e4, "rope_type": "yarn"}', "{}", "no json"])
def test_rotary_embeddings_that_are_not_understood_are_refused(rope: str) -> None:
    with pytest.raises(ProfileError, match="rotary"):
        AquaPredictors(KVLayout.uniform(1, 2, 32, rope=rope), ())
    AquaPredictors(KVLayout.uniform(1, 2, 32, rope=ROPE), ())


def test_absurd_layouts_are_refused() -> None:
    with pytest.raises(ProfileError):
        weight_shapes(KVLayout.uniform(2, 65536, 65536))


# -- calibration -------------------------------------------------------------------------------------------------------


def test_the_fit_is_the_ridge_of_all_windows_at_once() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((300, 10)).astype(np.float32), rng.standard_normal((300, 4)).astype(np.float32)
    sums = Ridge()
    for begin in range(0, 300, 100):
        sums.add([x[begin : begin + 100, :6], x[begin : begin + 100, 6:]], y[begin : begin + 100])
    wide = np.concatenate([x, np.ones((300, 1))], axis=1)
    gram = wide.T @ wide
    expected = np.linalg.solve(gram + np.eye(11) * 1e-3 * gram.diagonal().mean(), wide.T @ y)
    assert np.allclose(sums.solve(), expected, atol=2e-3)


def test_files_and_memory_give_the_same_predictors(tmp_path: Path) -> None:
    found = fit(dump_of(2), 3, scratch=tmp_path)
    assert found.fingerprint == fit(dump_of(2), 3).fingerprint
    assert found.fingerprint != fit(dump_of(2), 2).fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.0", "key.1", "value.0", "value.1"]


def test_the_first_tokens_do_not_count() -> None:
    odd = dump_of(2)
    inner = odd.layer

    def layer(number: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (t.clone() for t in inner(number, window))
        k[:4], v[:4] = 1e4, -1e4
        return k, v

    odd.layer = layer
    assert fit(odd, 2).fingerprint == fit(dump_of(2), 2).fingerprint


def test_windows_that_cannot_be_fitted_are_refused() -> None:
    short, bad = dump_of(1), dump_of(1)
    short.length = 4
    bad.layer = lambda number, window: (torch.full((LENGTH, 64), torch.nan),) * 2
    none = dump_of(1)
    none.windows = 0
    for dump in (short, bad, none):
        with pytest.raises(ProfileError):
            fit(dump, 2)
