"""Models with parts for images or sound: their text is stored, and prompts with images or sound are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import causal_models
import pytest
import torch
import transformers
from causal_sizes import TEXT
from kvcases import SMALL

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import ConfigError, UnsupportedModel, UnsupportedTokens
from kvstore.integrations.transformers import generate, layout_from_config

CONFIG = StoreConfig(
    host=TierConfig(1 << 24, "raw"), disk=TierConfig(1 << 26, "raw"), segment_bytes=4 << 20, block_tokens=8
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
TEXT_ONLY: dict[str, Any] = {"suppress_tokens": [0, 2, *range(TEXT, 96)], **GREEDY}
MEDIA = {
    "Fuyu": "image_token_id",
    "Gemma3": "image_token_index",
    "Gemma4": "video_token_id",
    "GotOcr2": "image_token_index",
    "MossTranscribeDiarize": "audio_token_id",
    "Phi4Multimodal": "audio_token_id",
}
OWN = (
    "Blt",
    "CpmAnt",
    "MiniMax",
    "OpenAIGPT",
    "ProphetNet",
    "RecurrentGemma",
    "Reformer",
    "Rwkv",
    "XLM",
    "XLNet",
    "xLSTM",
)


def config_of(name: str, **changes: Any) -> Any:
    return causal_models.tiny_config(getattr(transformers, f"{name}Config"), **changes)


def model_of(name: str) -> Any:
    config = config_of(name)
    causal_models.MOST_PARAMETERS = 8_000_000
    return causal_models.build(config)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(4, TEXT, (1, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", ["Fuyu", "Gemma3", "Gemma4"])
def test_text_turns_of_a_model_that_sees_equal_turns_with_the_cache_in_memory(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    identity = ModelIdentity.from_transformers(model)
    ids, memory = tokens(11), transformers.DynamicCache(config=model.config)
    for turn in range(2):
        want = model.generate(ids, past_key_values=memory, attention_mask=torch.ones_like(ids), **TEXT_ONLY)
        with KVStore(tmp_path / "s", identity, CONFIG) as store:
            got = generate(model, ids, store=store, **TEXT_ONLY)
            assert store.stats()["counters"].get("get_hits", 0) == turn
        assert torch.equal(got, want)
        ids = torch.cat([want, tokens(9)], 1)


@pytest.mark.parametrize("name", MEDIA)
def test_prompts_with_images_or_sound_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    identity = ModelIdentity.from_transformers(model)
    ids = tokens(20)
    with torch.no_grad(), causal_models.quiet():
        cache = model(ids, use_cache=True).past_key_values
    prompt = ids[0].tolist()
    seen = [*prompt[:12], dict(identity.layout.media)[MEDIA[name]], *prompt[13:]]
    with KVStore(tmp_path / "s", identity, CONFIG) as store:
        with pytest.raises(UnsupportedTokens, match=f"position 12 has the {MEDIA[name]}"):
            store.put(seen, cache)
        with pytest.raises(UnsupportedTokens, match=MEDIA[name]):
            generate(model, torch.tensor([seen]), store=store, **GREEDY)
        assert store.stats()["counters"].get("put_tokens", 0) == 0
        store.put(prompt, cache)
        assert store.contains(seen) == 12


def test_an_answer_is_stored_up_to_its_first_image(tmp_path: Path) -> None:
    model = model_of("Fuyu")
    identity = ModelIdentity.from_transformers(model)
    image = dict(identity.layout.media)["image_token_id"]
    ids = tokens(20)
    with KVStore(tmp_path / "s", identity, CONFIG) as store:
        out = generate(model, ids, store=store, prefix_allowed_tokens_fn=lambda *_: [image], **GREEDY)
        assert (out[0, 20:] == image).all()
        assert store.contains(out[0].tolist()) == 20


def test_images_that_the_config_names_no_token_for_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="names no token"):
        layout_from_config(config_of("Emu3"), "float32")


@pytest.mark.parametrize("name", OWN)
def test_models_with_caches_of_their_own_are_refused_by_name(name: str) -> None:
    with causal_models.quiet():
        config = getattr(transformers, f"{name}Config")()
    if hasattr(config, "is_decoder"):
        config.is_decoder, config.is_encoder_decoder = True, False
    with pytest.raises(UnsupportedModel, match="such caches are not supported"):
        layout_from_config(config, "float32")


@pytest.mark.parametrize(
    "media",
    [
        (("image", -1),),
        (("image", 1 << 32),),
        ((3, 4),),
        (("b", 1), ("a", 2)),
        (("a", 1), ("a", 2)),
        [("a", 1)],
        (("a", 1, 2),),
    ],
)
def test_media_of_a_layout_are_checked(media: Any) -> None:
    with pytest.raises(ConfigError, match=r"KVLayout\.media"):
        replace(SMALL, media=media)


def test_media_are_part_of_the_layout_s_text_and_change_no_other_layout() -> None:
    layout = replace(SMALL, media=(("audio_token_id", 7), ("image_token_id", 9)))
    assert KVLayout.from_canonical(layout.canonical()) == layout
    assert layout != SMALL
    assert "media" not in SMALL.canonical()
