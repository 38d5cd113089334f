"""Codec 2 as the store sees it: made from a profile, exact whatever it is given."""

from __future__ import annotations

import dataclasses
import gc
import struct
import weakref
from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from damaged_layers import every_byte_changed, noticed
from kvcases import kv_of, random_kv, same_kv

from kvstore import KVLayout
from kvstore.calibration.calibrate import calibrate
from kvstore.codecs import BlockInfo, Codec, KVView, codec_by_id, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.linear_model import FINE
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.profile import Profile
from kvstore.core.identity import ModelIdentity
from kvstore.errors import CodecError, ProfileError

COUNT = 40
MODEL, TOKENIZER = calibrated.model(), calibrated.tokenizer()
Layers = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    out = tmp_path_factory.mktemp("profile") / "tiny"
    sizes = {"windows": calibrated.WINDOWS, "length": calibrated.LENGTH}
    return calibrate(MODEL, TOKENIZER, calibrated.text(), out, **sizes, parts=["lossless"])


@pytest.fixture(scope="module")
def codec(profile: Profile) -> Codec:
    return codec_by_name("predictive", profile)


def real(count: int = COUNT) -> tuple[np.ndarray, Layers]:
    """Tokens and the model's own cache of them."""
    tokens = np.array(TOKENIZER(calibrated.text()).input_ids[100 : 100 + count], np.uint32)
    with torch.inference_mode():
        cache = MODEL(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=True).past_key_values
    return tokens, [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def encode(codec: Codec, info: BlockInfo, kv: Any) -> tuple[bytes, tuple[int, ...]]:
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(info.layout, kv), memory)
    assert sizes is not None
    return bytes(memory[: sum(sizes)]), sizes


def decode(codec: Codec, info: BlockInfo, payload: bytes, sizes: tuple[int, ...], count: int | None = None) -> Layers:
    n = info.count if count is None else count
    out = [
        (torch.zeros(x.heads, n, x.key_dim, dtype=torch.bfloat16), torch.zeros(x.heads, n, x.value_dim).bfloat16())
        for x in info.layout.layers
    ]
    codec.decode(info, memoryview(payload), sizes, KVView.of_layers(info.layout, out))
    return out


def mode(payload: bytes) -> int:
    return int(struct.unpack_from("<I", payload)[0])


def test_a_profile_gives_one_codec_to_all_who_ask_which_goes_with_it(profile: Profile) -> None:
    again = Profile.from_bytes(profile.data)
    codec = codec_by_name("predictive", again)
    assert codec_by_name("predictive", again) is codec is codec_by_id(PredictiveCodec.id, again)
    assert codec_by_name("predictive", profile) is not codec
    gone = weakref.ref(codec)
    del codec, again
    gc.collect()
    assert gone() is None


def test_a_cache_of_the_model_is_predicted_exact_and_smaller_than_by_entropy(codec: Codec, profile: Profile) -> None:
    tokens, kv = real()
    info = BlockInfo(profile.layout, tokens, 0)
    payload, sizes = encode(codec, info, kv)
    assert mode(payload) == 4
    assert codec.fallbacks(memoryview(payload), sizes) == 0
    assert same_kv(decode(codec, info, payload, sizes), kv)
    assert len(payload) < len(encode(EntropyCodec(), info, kv)[0])
    assert len(payload) <= codec.usual(info) <= codec.bound(info)


def test_the_first_tokens_alone_can_be_decoded(codec: Codec, profile: Profile) -> None:
    tokens, kv = real()
    info = BlockInfo(profile.layout, tokens, 0)
    found = decode(codec, info, *encode(codec, info, kv), 7)
    assert same_kv(found, [(k[:, :7], v[:, :7]) for k, v in kv])


@pytest.mark.parametrize("count", [1, 2, 33])
def test_any_number_of_tokens_at_any_position_comes_back_exactly(codec: Codec, profile: Profile, count: int) -> None:
    tokens, kv = real(count)
    for start in (0, 4097):
        info = BlockInfo(profile.layout, tokens, start)
        assert same_kv(decode(codec, info, *encode(codec, info, kv)), kv)


def test_what_cannot_be_predicted_is_coded_as_by_entropy_and_counted(codec: Codec, profile: Profile) -> None:
    layout = profile.layout
    beyond = FINE * PredictiveModel.from_arrays(layout, profile.section("lossless")).rope_coarse.shape[1]
    tokens, kv = real()
    for info, given in (
        (BlockInfo(layout, tokens, 0), random_kv(COUNT, layout)),  # all bits at random: not smaller
        (BlockInfo(layout, tokens, beyond - 1), kv),  # a position beyond the tables
        (BlockInfo(dataclasses.replace(layout, rope="none"), tokens, 0), kv),  # another layout than the profile's
    ):
        payload, sizes = encode(codec, info, given)
        assert mode(payload) != 4
        assert codec.fallbacks(memoryview(payload), sizes) == len(layout.layers)
        assert same_kv(decode(codec, info, payload, sizes), given)


def test_other_dtypes_are_coded_as_by_entropy(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16, "float16")
    info = BlockInfo(layout, np.arange(9, dtype=np.uint32), 0)
    kv = kv_of(range(9), layout)
    payload, _ = encode(codec, info, kv)
    assert payload == encode(EntropyCodec(), info, kv)[0]


def test_every_damaged_byte_is_noticed_or_harmless(codec: Codec, profile: Profile) -> None:
    tokens, kv = real(3)
    info = BlockInfo(profile.layout, tokens, 0)
    payload, sizes = encode(codec, info, kv)
    # What is harmless is a bit that nobody reads: the padding of raw bits.
    refused = noticed(
        every_byte_changed(payload),
        lambda changed: decode(codec, info, changed, sizes),
        lambda _, found: same_kv(found, kv),
    )
    assert refused > 0.99 * len(payload) - 2 * len(sizes)


def test_truncated_and_lengthened_layers_are_damage(codec: Codec, profile: Profile) -> None:
    tokens, kv = real(3)
    info = BlockInfo(profile.layout, tokens, 0)
    payload, sizes = encode(codec, info, kv)
    last = sizes[-1]
    for length in (*range(0, last, max(1, last // 50)), last - 2, last + 2, last + 64):
        changed = (payload + bytes(64))[: len(payload) - last + length]
        with pytest.raises(CodecError):
            decode(codec, info, changed, (*sizes[:-1], length))


def test_the_wrong_tokens_or_position_are_noticed(codec: Codec, profile: Profile) -> None:
    tokens, kv = real()
    info = BlockInfo(profile.layout, tokens, 0)
    payload, sizes = encode(codec, info, kv)
    for wrong in (BlockInfo(profile.layout, tokens[::-1].copy(), 0), BlockInfo(profile.layout, tokens, 64)):
        with pytest.raises(CodecError):
            decode(codec, wrong, payload, sizes)


def test_a_profile_without_the_section_is_refused(profile: Profile) -> None:
    empty = Profile.new(ModelIdentity.from_transformers(MODEL, TOKENIZER), {"other": {"x": np.zeros(1, np.int8)}})
    with pytest.raises(ProfileError, match="lossless"):
        PredictiveCodec.from_profile(empty)


def test_arrays_that_cannot_be_are_refused_by_name(profile: Profile) -> None:
    good = dict(profile.section("lossless"))
    infinite = np.full_like(good["1.v.out_scale"], np.inf)
    uneven = good["1.k.fix"].copy()
    uneven[0] += 1
    sums = good["freqs"].copy()
    sums[3, 5] += 1
    for name, value in (
        ("1.v.out_scale", infinite),
        ("1.k.fix", uneven),
        ("freqs", sums),
        ("1.k.weight", good["1.k.weight"][:-1]),
        ("0.v.bias", good["0.v.bias"].astype(np.int64)),
        ("2.k.scale", np.full_like(good["2.k.scale"], 32767)),
        ("token_kv", good["token_kv"][:, :-1]),
    ):
        with pytest.raises(ProfileError, match=name):
            PredictiveModel.from_arrays(profile.layout, {**good, name: value})
        with pytest.raises(ProfileError, match=name):
            PredictiveModel.from_arrays(profile.layout, {k: v for k, v in good.items() if k != name})


def test_a_profile_that_was_saved_codes_the_same_bytes(codec: Codec, profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "p")
    again = codec_by_name("predictive", Profile.load(tmp_path / "p"))
    tokens, kv = real()
    info = BlockInfo(profile.layout, tokens, 0)
    assert encode(again, info, kv) == encode(codec, info, kv)
