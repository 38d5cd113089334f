"""Calibration of models in float32 and float16, and what their profiles make of their caches."""

from __future__ import annotations

from pathlib import Path

import calibrated
import numpy as np
import pytest
import torch
from kvcases import same_kv

from kvstore.calibration.calibrate import calibrate
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive import wide_reference
from kvstore.codecs.predictive.codec import EXACT_MODES
from kvstore.codecs.words import KEPT_BITS, words_of
from kvstore.core.layout import ITEM_BYTES
from kvstore.errors import ProfileError


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_profile_of_a_model_in_another_dtype_predicts_its_caches(tmp_path: Path, dtype: str) -> None:
    model, tokenizer = calibrated.model().to(getattr(torch, dtype)), calibrated.tokenizer()
    told: list[str] = []
    sizes = {"windows": calibrated.WINDOWS, "length": calibrated.LENGTH}
    profile = calibrate(
        model, tokenizer, calibrated.text(), tmp_path / "p", **sizes, progress=lambda what, _a, _b: told.append(what)
    )
    assert profile.sections == ("lossless",)
    assert "lossy: for models in bfloat16 alone, left out" in told
    report = profile.report["parts"]["lossless"]
    assert report["ratio"] == pytest.approx(8 * ITEM_BYTES[dtype] / report["bits_per_value"])
    assert report["bits_per_value"] > KEPT_BITS[dtype]
    assert profile.layout.dtype == dtype
    codec = codec_by_name("predictive", profile)
    tokens = np.array(tokenizer(calibrated.text()).input_ids[100:140], np.uint32)
    with torch.inference_mode():
        cache = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=True).past_key_values
    kv = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    info, view = BlockInfo(profile.layout, tokens, 0), KVView.of_layers(profile.layout, kv)
    found = []
    for each in (codec, EntropyCodec()):
        out = memoryview(bytearray(each.bound(info)))
        sizes_found = each.encode(info, view, out)
        assert sizes_found is not None
        found.append(sum(sizes_found))
        back = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
        each.decode(info, out[: sum(sizes_found)], sizes_found, KVView.of_layers(profile.layout, back))
        assert same_kv(back, kv)
        if each is codec:
            assert out[0] == EXACT_MODES[dtype]
    assert found[0] < found[1]
    with pytest.raises(ProfileError, match="lossy"):
        codec_by_name("predictive@2", profile)


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
