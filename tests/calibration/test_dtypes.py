"""Calibration of models in float32 and float16, and of caches in float8, and what profiles make of such caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import calibrated
import numpy as np
import pytest
import torch
from codeccontract import round_trip
from kvcases import same_kv

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration.calibrate import calibrate
from kvstore.codecs import BlockInfo, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive import wide_reference
from kvstore.codecs.predictive.codec import EXACT_MODES
from kvstore.codecs.words import FLOAT8, KEPT_BITS, words_of
from kvstore.core.layout import ITEM_BYTES
from kvstore.errors import ConfigError, ProfileError

MIB = 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "float16", *FLOAT8])
def test_a_profile_of_caches_in_another_dtype_predicts_them(tmp_path: Path, dtype: str) -> None:
    model, tokenizer = calibrated.model(), calibrated.tokenizer()
    kv_dtype = dtype if dtype in FLOAT8 else None
    if kv_dtype is None:
        model = model.to(getattr(torch, dtype))
    told: list[str] = []
    sizes = {"windows": calibrated.WINDOWS, "length": calibrated.LENGTH}
    profile = calibrate(
        model,
        tokenizer,
        calibrated.text(),
        tmp_path / "p",
        **sizes,
        kv_dtype=kv_dtype,
        progress=lambda what, _a, _b: told.append(what),
    )
    assert profile.sections == ("lossless",)
    assert "lossy: for caches in bfloat16 alone, left out" in told
    report = profile.report["parts"]["lossless"]
    assert report["ratio"] == pytest.approx(8 * ITEM_BYTES[dtype] / report["bits_per_value"])
    assert report["bits_per_value"] > KEPT_BITS[dtype]
    assert profile.layout.dtype == dtype
    codec = codec_by_name("predictive", profile)
    tokens = np.array(tokenizer(calibrated.text()).input_ids[100:140], np.uint32)
    with torch.inference_mode():
        cache = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=True).past_key_values
    kv = [tuple(x[0].to(getattr(torch, dtype)) for x in (layer.keys, layer.values)) for layer in cache.layers]
    info = BlockInfo(profile.layout, tokens, 0)
    found = []
    for each in (codec, EntropyCodec()):
        payload = round_trip(each, info, kv)
        found.append(len(payload))
        if each is codec:
            assert payload[0] == EXACT_MODES[dtype]
    assert found[0] < found[1]
    with pytest.raises(ProfileError, match="lossy"):
        codec_by_name("predictive@2", profile)
    identity = replace(ModelIdentity.from_transformers(model, tokenizer), layout=profile.layout)
    tiers = {"host": TierConfig(0), "disk": TierConfig(16 * MIB, "predictive")}
    config = StoreConfig(**tiers, segment_bytes=MIB, block_tokens=32, profile=tmp_path / "p")
    layers = [(k[None], v[None]) for k, v in kv]
    with KVStore(tmp_path / "store", identity, config) as store:
        store.put(tokens, layers)
    with KVStore(tmp_path / "store", identity, config) as store:
        hit = store.get(tokens)
        assert hit is not None
        assert hit.tokens == len(tokens)
        assert same_kv([(k[0], v[0]) for k, v in hit.layers], kv)
        assert "fallback_raw_chunks" not in store.stats()["counters"]


def test_only_caches_of_bf16_are_rounded_to_float8(tmp_path: Path) -> None:
    sizes = {"windows": calibrated.WINDOWS, "length": calibrated.LENGTH}
    for model, kv_dtype in ((calibrated.model().half(), "float8_e5m2"), (calibrated.model(), "float16")):
        with pytest.raises(ConfigError, match="kv_dtype"):
            calibrate(
                model, calibrated.tokenizer(), calibrated.text(), tmp_path / "p", **sizes, parts=("lossless",),
                kv_dtype=kv_dtype,
            )  # fmt: skip
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_words_are_those_of_the_codec(dtype: str) -> None:
    item = ITEM_BYTES[dtype]
    bits = np.random.default_rng(1).integers(0, 1 << 8 * item, 4096, {2: np.uint16, 4: np.uint32}[item])
    bits[:9] = [0, 1, 2, 3, 0x8000, 0x7C00, 0xFFFF, 0x03FF, 0x83FF]
    tensor = torch.from_numpy(bits.view({2: np.int16, 4: np.int32}[item])).view(getattr(torch, dtype))
    found = words_of(tensor)
    assert found.dtype == np.uint16
    want = bits if dtype == "bfloat16" else wide_reference.word(torch.from_numpy(bits.astype(np.int64)), dtype).numpy()
    assert np.array_equal(found, want)
