"""Calibration of models with latents: the exact predictor alone, which predicts latents as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from codeccontract import round_trip
from kvcases import same_kv

from kvstore import KVStore, ModelIdentity, StoreConfig
from kvstore.calibration.calibrate import calibrate
from kvstore.codecs import BlockInfo, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.codec import MODE
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.profile import Profile
from kvstore.codecs.words import words_of
from kvstore.errors import ProfileError, UnsupportedModel

SIZES = {"windows": calibrated.WINDOWS, "length": calibrated.LENGTH}


def model() -> Any:
    return calibrated.of_kind("deepseek-v3")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[str]]:
    """The model, the file of its profile, what calibration told."""
    one, path = model(), tmp_path_factory.mktemp("latents") / "p"
    return one, path, calibrated.told(one, path)


@torch.inference_mode()
def cache_of(one: Any, count: int) -> tuple[Any, Any, Any]:
    """Tokens, the model's cache of them, and its layers."""
    tokens = np.array(calibrated.tokenizer()(calibrated.text()).input_ids[100 : 100 + count], np.uint32)
    cache = one(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=True).past_key_values
    return tokens, cache, [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def words(tensor: torch.Tensor) -> torch.Tensor:
    """`[1, tokens, dim]` as the reference takes it: bits, int64 `[tokens, dim]`."""
    return torch.from_numpy(words_of(tensor[0].contiguous()).astype(np.int64))


def test_latents_are_predicted_and_come_back(made: tuple[Any, Path, list[str]]) -> None:
    one, path, told = made
    profile = Profile.load(path)
    assert profile.sections == ("lossless",)
    assert "lossy: not for latents, left out" in told
    arrays = profile.section("lossless")
    assert not {"rope_fine", "rope_coarse", "0.k.fix"} & set(arrays)
    tokens, _, kv = cache_of(one, 40)
    assert profile.layout.is_latent
    info = BlockInfo(profile.layout, tokens, 0)
    sizes = []
    for codec in (codec_by_name("predictive", profile), EntropyCodec()):
        payload = round_trip(codec, info, kv)
        sizes.append(len(payload))
        if len(sizes) == 1:
            assert payload[0] == MODE
            parts = [(words(k), words(v)) for k, v in kv]
            ids = torch.from_numpy(tokens.astype(np.int64))
            coded = reference.encode(PredictiveModel.from_arrays(profile.layout, arrays), ids, 0, parts)
            assert b"".join(coded) == payload
    assert sizes[0] < sizes[1]


def test_a_store_of_latents_takes_the_profile_and_gives_back_every_bit(
    made: tuple[Any, Path, list[str]], tmp_path: Path
) -> None:
    one, path, _ = made
    identity = ModelIdentity.from_transformers(one, calibrated.tokenizer())
    tokens, cache, kv = cache_of(one, 150)
    for _ in range(2):
        with KVStore(tmp_path, identity, StoreConfig(profile=path)) as store:
            store.put(tokens, cache)
            assert not store.flush().dropped_blocks
            hit = store.get(tokens)
            assert hit is not None
            assert hit.tokens == len(tokens)
            assert same_kv([(k[0], v[0]) for k, v in hit.layers], kv)
            assert store.stats()["counters"].get("fallback_profile", 0) == 0


def test_what_cannot_be_fitted_to_latents_is_refused_by_name(made: tuple[Any, Path, list[str]], tmp_path: Path) -> None:
    one, path, _ = made
    with pytest.raises(ProfileError, match='no section "lossy"; latents are coded without loss alone'):
        codec_by_name("predictive@0.7", Profile.load(path))
    with pytest.raises(UnsupportedModel, match="leave donor out"):
        calibrate(one, calibrated.tokenizer(), calibrated.text(), tmp_path / "p", parts=["lossless", "donor"], **SIZES)
    other = model()
    del other.model.layers[0].self_attn.kv_a_layernorm
    with pytest.raises(UnsupportedModel, match="deepseek_v3: layer 0: self_attn: has no kv_a_layernorm"):
        calibrate(other, calibrated.tokenizer(), calibrated.text(), tmp_path / "p", **SIZES)


def test_latents_of_more_than_the_token_are_refused(tmp_path: Path) -> None:
    one = model()
    one.model.embed_tokens.register_forward_hook(lambda _module, _inputs, out: out + 1)
    with pytest.raises(UnsupportedModel, match="embedding of the token alone"):
        calibrate(one, calibrated.tokenizer(), calibrated.text(), tmp_path / "p", **SIZES)
