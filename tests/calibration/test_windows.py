"""Calibration of models with windows: the exact predictor, a model of its own for each group of layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from kvcases import INTEGERS, same_kv

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration.calibrate import calibrate
from kvstore.calibration.dump import KVDump
from kvstore.codecs import BlockInfo, codec_by_name
from kvstore.codecs.group_sections import joined, profile_of_group
from kvstore.codecs.groups import GroupedView
from kvstore.codecs.profile import Profile
from kvstore.config import MIB
from kvstore.errors import ConfigError, ProfileError, UnsupportedModel

SIZES = {"windows": calibrated.WINDOWS, "length": calibrated.LENGTH}
WINDOW = 24
LENGTHS = (7, WINDOW - 1, WINDOW, WINDOW + 1, 40, 100)  # below, at and above the window


def model(kind: str = "gemma3", dtype: torch.dtype = torch.bfloat16) -> Any:
    return calibrated.of_kind(kind, dtype)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[str]]:
    """The model, the file of its profile, what calibration told."""
    one, path = model(), tmp_path_factory.mktemp("windows") / "p"
    return one, path, calibrated.told(one, path)


def ids_of(count: int) -> Any:
    return np.array(calibrated.tokenizer()(calibrated.text()).input_ids[100 : 100 + count], np.uint32)


@torch.inference_mode()
def cache_of(one: Any, ids: Any, **how: Any) -> Any:
    """The model's cache of tokens, and its layers as it keeps them."""
    cache = one(torch.from_numpy(ids.astype(np.int64))[None], use_cache=True, **how).past_key_values
    return cache, [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def check_comes_back(one: Any, folder: Path, config: StoreConfig, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Puts, closes, opens, gets prompts of these lengths; what the store says of itself at last."""
    identity = ModelIdentity.from_transformers(one, calibrated.tokenizer())
    for count in lengths:
        ids = ids_of(count)
        cache, kv = cache_of(one, ids)
        with KVStore(folder, identity, config) as store:
            store.put(ids, cache)
            assert not store.flush().dropped_blocks
        with KVStore(folder, identity, config) as store:
            hit = store.get(ids)
            assert hit is not None
            assert hit.tokens == count
            assert same_kv([(k[0], v[0]) for k, v in hit.layers], kv)
            assert store.check(deep=True).ok
            stats = store.stats()
            assert not {name for name in stats["counters"] if name.startswith(("fallback", "damaged", "unknown"))}
    return stats


def test_every_group_has_a_model_of_its_layers_with_their_rotary_embedding(made: tuple[Any, Path, list[str]]) -> None:
    one, path, told = made
    profile = Profile.load(path)
    assert profile.sections == ("levels", "lossless")
    assert "lossy: not for layers with windows, left out" in told
    bases = one.config.rope_parameters
    for number, (kind, layers) in enumerate((("full_attention", 1), ("sliding_attention", 2))):
        part = profile_of_group(profile, number)
        assert part.id == profile.id
        assert len(part.layout.layers) == layers
        assert json.loads(part.layout.rope)["rope_theta"] == bases[kind]["rope_theta"]
        assert f"{layers - 1}.k.scale" in part.section("lossless")
    fine = [profile_of_group(profile, number).section("lossless")["rope_fine"] for number in range(2)]
    assert (fine[0] != fine[1]).any()


def test_the_report_is_of_all_layers_and_better_than_without_a_profile(made: tuple[Any, Path, list[str]]) -> None:
    parts = Profile.load(made[1]).report["parts"]
    assert parts["levels"]["bits_per_value"] < parts["lossless"]["bits_per_value"] < 9
    assert set(parts["levels"]["levels"]) == {"1", "2", "3"}
    assert len(parts["lossless"]["curve"]) == 4


@pytest.mark.parametrize("codec", ["auto", "predictive", "predictive:1"])
def test_prompts_below_at_and_above_the_window_come_back_bit_for_bit(
    made: tuple[Any, Path, list[str]], tmp_path: Path, codec: str
) -> None:
    one, path, _ = made
    config = StoreConfig(block_tokens=16, profile=path, disk=TierConfig(16 * MIB, codec))
    records = check_comes_back(one, tmp_path, config)["disk"]
    assert records["bytes"] > 0
    with KVStore(tmp_path, ModelIdentity.from_transformers(one, calibrated.tokenizer()), config) as store:
        coded = {block.codec for block in store.explain(ids_of(100)).blocks}
    assert coded == {"predictive"}


def test_a_sequence_that_was_put_while_it_grew_is_usable_at_every_turn(
    made: tuple[Any, Path, list[str]], tmp_path: Path
) -> None:
    one, path, _ = made
    identity = ModelIdentity.from_transformers(one, calibrated.tokenizer())
    ids, cache = ids_of(90), None
    with KVStore(tmp_path, identity, StoreConfig(block_tokens=16, profile=path)) as store, torch.inference_mode():
        for end in range(15, 91, 15):
            step = torch.from_numpy(ids[end - 15 : end].astype(np.int64))[None]
            cache = one(step, past_key_values=cache, use_cache=True).past_key_values
            store.put(ids[:end], cache)
        store.flush()
    _, want = cache_of(one, ids)
    kept = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    with KVStore(tmp_path, identity, StoreConfig(block_tokens=16, profile=path)) as store:
        hit = store.get(ids)
        assert hit is not None
        assert hit.tokens == 90
        assert same_kv([(k[0], v[0]) for k, v in hit.layers], kept)
        assert [k.shape for k, _ in kept] == [k.shape for k, _ in want]
        assert store.contains(ids[:60]) == 60


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("mistral", torch.bfloat16), ("gpt-oss", torch.bfloat16), ("llama4", torch.bfloat16), ("gemma3", torch.float32)],
)
def test_other_models_with_windows_and_other_dtypes(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    one = model(kind, dtype)
    profile = calibrate(one, calibrated.tokenizer(), calibrated.text(), tmp_path / "p", **SIZES, parts=("lossless",))
    assert profile.report["parts"]["lossless"]["ratio"] > (1.1 if dtype == torch.float32 else 1.5)
    check_comes_back(one, tmp_path / "s", StoreConfig(block_tokens=16, profile=tmp_path / "p"), (WINDOW, 100))


def test_what_a_block_lacks_is_coded_as_nothing_and_a_part_of_a_group_decodes(
    made: tuple[Any, Path, list[str]],
) -> None:
    profile = Profile.load(made[1])
    layout, ids = profile.layout, ids_of(64)
    kv = tuple(cache_of(made[0], ids)[1])
    codec = codec_by_name("predictive", profile)
    view = GroupedView.of_cache(layout, kv, 64)
    for start, missing in ((0, 32), (32, 9), (48, 0)):
        info = BlockInfo(layout, ids[start : start + 32], start, cut=64)
        block = view.narrow(start, info.count)
        out = memoryview(bytearray(codec.bound(info)))
        sizes = codec.encode(info, block, out)
        assert sizes is not None
        assert all(sizes) == (missing < 32)
        payload = out[: sum(sizes)]
        assert codec.fallbacks(payload, sizes) == 0
        back = [tuple(torch.zeros_like(t) for t in pair) for pair in kv]
        for count in (info.count, 9):  # a prefix of the block
            target = GroupedView.of_cache(layout, tuple(back), 64).narrow(start, count)
            codec.decode(info, payload, sizes, target)
            same = zip(target.tensors(), view.narrow(start, count).tensors(), strict=True)
            bits = INTEGERS[layout.dtype]
            assert all(bool((a.contiguous().view(bits) == b.contiguous().view(bits)).all()) for a, b in same)


def test_codecs_with_loss_are_refused_by_name_and_nothing_changes(
    made: tuple[Any, Path, list[str]], tmp_path: Path
) -> None:
    one, path, _ = made
    identity = ModelIdentity.from_transformers(one, calibrated.tokenizer())
    lossy = replace(identity, codec_family="lossy")
    for codec in ("predictive@0.7", "predictive@kl0.01", "aqua@2"):
        with pytest.raises(ConfigError, match=f"'{codec}' does not code layouts with windows; use predictive, entropy"):
            KVStore(tmp_path, lossy, StoreConfig(profile=path, disk=TierConfig(16 * MIB, codec)))
        with pytest.raises(ProfileError, match="windows are coded without loss alone"):
            codec_by_name(codec, Profile.load(path))
    assert not any(tmp_path.iterdir())


def test_a_profile_that_lacks_a_group_is_refused(made: tuple[Any, Path, list[str]]) -> None:
    one, path, _ = made
    identity, whole = ModelIdentity.from_transformers(one, calibrated.tokenizer()), Profile.load(path)
    part = joined([profile_of_group(whole, 0).section("lossless")])
    for arrays in (part, profile_of_group(whole, 0).section("lossless")):
        with pytest.raises(ProfileError, match='no section "lossless"'):
            codec_by_name("predictive", Profile.new(identity, {"lossless": arrays}))


def test_models_that_cannot_be_calibrated_say_why(tmp_path: Path) -> None:
    def refused(one: Any) -> None:
        calibrate(one, calibrated.tokenizer(), calibrated.text(), tmp_path / "p", **SIZES)

    with pytest.raises(UnsupportedModel, match="layers with states"):
        refused(model("qwen3-next"))
    one = model()
    del one.model.layers[0].self_attn.k_proj
    with pytest.raises(UnsupportedModel, match="gemma3_text: layer 0: self_attn: has no k_proj"):
        refused(one)


def test_a_dump_holds_all_tokens_of_layers_with_windows(tmp_path: Path) -> None:
    one = model()
    dump = KVDump.make(one, calibrated.tokenizer(), calibrated.text(), tmp_path, windows=2, length=48)
    full, sliding = dump.groups()
    assert (full.group, sliding.group) == ((1,), (0, 2))
    for part in (full, sliding):
        for number, whole in enumerate(part.group or ()):
            for mine, want in zip(part.layer(number, 1), dump.layer(whole, 1), strict=True):
                assert mine.shape == (48, 32)
                assert (mine == want).all()
    assert dump.tensors(0)[0][0].shape == (2, 48, 16)
