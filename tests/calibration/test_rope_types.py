"""Calibration takes every rotary type that a store takes, and codecs give back every bit of such caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from calibrated import LENGTH, WINDOWS
from tiny_models import VOCABULARY
from transformers import DynamicCache, StableLmConfig, StableLmForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration.calibrate import calibrate
from kvstore.calibration.donor.passages import check_passages
from kvstore.calibration.dump import KVDump, floats
from kvstore.calibration.targets import target
from kvstore.codecs import BlockInfo, KVView, Profile
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.aqua.predictors import AquaPredictors
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.core.layout import KVLayout
from kvstore.core.rope import attention_scaling, can_code_moved, in_pairs
from kvstore.core.rope_types import TYPES
from kvstore.errors import UnsupportedLength, UnsupportedModel
from kvstore.integrations.transformers import cache_layers, generate, layout_from_config

MIB, FIRST = 1 << 20, 160  # of which the second is the length that models were "first trained on"
TOKENIZER, TEXT = calibrated.tokenizer(), calibrated.text(4 * 2 * FIRST + 100)
_FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.7 * i for i in range(8)]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": FIRST,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": FIRST},
    "longrope": {"original_max_position_embeddings": FIRST, **_FACTORS},
    "dynamic": {"factor": 2.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
CASES = [*ROPES, "longrope, long", "partial", "partial, yarn"]


def model_of(case: str) -> Any:
    """Llama, or StableLM where a part of each head is rotated."""
    kind = case.rpartition(", ")[2] if case.startswith("partial, ") else case.partition(", ")[0]
    if case.startswith("partial"):
        parameters = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
        if kind == "yarn":
            parameters |= {"rope_type": "yarn", **ROPES["yarn"]}
        torch.manual_seed(0)
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
        ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
        config = StableLmConfig(**sizes, **heads, **ends, rope_parameters=parameters)
        return StableLmForCausalLM(config).eval().to(torch.bfloat16)
    most = FIRST if kind == "dynamic" else 512
    parameters = {"rope_theta": 10000.0, "rope_type": kind, **ROPES[kind]}
    return calibrated.model(rope_parameters=parameters, max_position_embeddings=most)


def regime_of(case: str) -> str:
    return "long" if case.endswith(", long") else "short"


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(case: str) -> Any:
    return model_of(case)


@pytest.fixture(scope="module")
def profile(case: str, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "p.safetensors"
    long = regime_of(case) == "long"
    calibrate(
        model,
        TOKENIZER,
        TEXT,
        out,
        windows=4 if long else WINDOWS,
        length=2 * FIRST if long else LENGTH,
        parts=("lossless", "lossy", "donor", "aqua"),
        regime=regime_of(case),
    )
    return out


def tokens_of(case: str, count: int, seed: int = 0) -> torch.Tensor:
    more = FIRST if regime_of(case) == "long" else 0
    return torch.randint(1, VOCABULARY, (1, count + more), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values


def same(left: Any, right: Any) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def config(profile: Path, donors: bool = False) -> StoreConfig:
    disk = TierConfig(16 * MIB, "predictive")
    return StoreConfig(
        host=TierConfig(0), disk=disk, segment_bytes=MIB, block_tokens=32, profile=profile, donors=donors
    )


def test_calibration_takes_the_types_that_a_store_takes() -> None:
    """Of both and of transformers there is one list; each is in `CASES` and thus calibrated here."""
    assert set(ROPES) == set(TYPES) == set(ROPE_INIT_FUNCTIONS) | {"default"}
    for kind in TYPES:
        assert layout_from_config(model_of(kind).config, "bfloat16").rope != "none"


def test_the_first_layer_is_that_of_the_cache_before_the_rotation(case: str, model: Any, tmp_path: Path) -> None:
    """With the factor of the rotary embedding, in pairs: what `token_kv` is made of."""
    long = regime_of(case) == "long"
    identity = ModelIdentity.from_transformers(model, regime=regime_of(case))
    sizes = {"windows": 2, "length": 2 * FIRST if long else LENGTH}
    dump = KVDump.make(model, TOKENIZER, TEXT, tmp_path, identity=identity, **sizes)
    tokens, width = dump.tokens(0), dump.layer(0, 0)[0].shape[1]
    said, found = floats(dump.first_layer[tokens][:, :width]), target(dump, 0, 0, 0, slice(None))
    assert np.square(said - found).mean() < 1e-4 * np.square(found).mean()
    if "yarn" in case or "longrope" in case:
        assert attention_scaling(dump.layout.rope) > 1.1


def test_predictive_gives_back_every_bit_through_a_restart(
    case: str, model: Any, profile: Path, tmp_path: Path
) -> None:
    identity = ModelIdentity.from_transformers(model, TOKENIZER, regime=regime_of(case))
    ids = tokens_of(case, 40)
    cache = prefilled(model, ids)
    with KVStore(tmp_path / "s", identity, config(profile)) as store:
        store.put(ids[0], cache)
    with KVStore(tmp_path / "s", identity, config(profile)) as store:
        hit = store.get(ids[0])
        assert hit is not None
        assert same(hit.layers, cache_layers(cache))
        counters = store.stats()["counters"]
        assert counters["get_hit_tokens_disk"] == ids.shape[1]
        assert "fallback_raw_chunks" not in counters
        short = store.get(ids[0], max_tokens=ids.shape[1] - 5)  # a part of a block
        assert short is not None
        assert same(short.layers, [(k[..., :-5, :], v[..., :-5, :]) for k, v in cache_layers(cache)])


def test_turns_through_predictive_equal_turns_with_the_cache_in_memory(
    case: str, model: Any, profile: Path, tmp_path: Path
) -> None:
    identity = ModelIdentity.from_transformers(model, TOKENIZER, regime=regime_of(case))
    ids, memory = tokens_of(case, 21), DynamicCache()
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}
    for _ in range(2):
        want = model.generate(
            ids, past_key_values=memory, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **given
        )
        with KVStore(tmp_path / "s", identity, config(profile)) as store:
            got = generate(model, ids, store=store, return_dict_in_generate=True, **given)
        assert torch.equal(got.sequences, want.sequences)
        assert same(cache_layers(got.past_key_values), cache_layers(want.past_key_values))
        memory = want.past_key_values
        ids = torch.cat([want.sequences, torch.randint(1, VOCABULARY, (1, 7))], 1)


def test_members_are_coded_against_donors_at_other_positions(
    case: str, model: Any, profile: Path, tmp_path: Path
) -> None:
    """Two beginnings of different lengths before the same passage: keys are rotated, with the factor left in place."""
    identity = ModelIdentity.from_transformers(model, TOKENIZER, regime=regime_of(case))
    passage = tokens_of(case, 96, seed=5)
    prompts = [torch.cat([tokens_of("", n, seed=n), passage], 1) for n in (32, 25)]
    caches = [prefilled(model, ids) for ids in prompts]
    with KVStore(tmp_path / "s", identity, config(profile, donors=True)) as store:
        for ids, cache in zip(prompts, caches, strict=True):
            store.put(ids[0], cache)
            store.flush()
        counters = store.stats()["counters"]
        assert counters["member_records"] > 0
        assert counters["member_bytes"] < 0.45 * counters["member_raw_bytes"]
    with KVStore(tmp_path / "s", identity, config(profile, donors=True)) as store:
        for ids, cache in zip(prompts, caches, strict=True):
            hit = store.get(ids[0])
            assert hit is not None
            assert same(hit.layers, cache_layers(cache))
        assert store.check(deep=True).problems == ()


@pytest.mark.parametrize(("name", "most", "share"), [("predictive", 0.2, 0.85), ("aqua", 0.05, 0.5)])
def test_lossy_caches_come_back_near(
    name: str, most: float, share: float, case: str, model: Any, profile: Path
) -> None:
    identity = ModelIdentity.from_transformers(model, TOKENIZER, regime=regime_of(case))
    read = Profile.load(profile, identity)
    codec: Any = AquaCodec(AquaPredictors.from_arrays(read.layout, read.section("aqua")), bits=4)
    if name == "predictive":
        model_of_rows = PredictiveModel.from_arrays(read.layout, read.section("lossless"))
        lossy = LossyModel.from_arrays(model_of_rows, read.section("lossy"))
        codec = PredictiveCodec(model_of_rows, lossy, tuple((lossy.ladder[0, :2] / 64).tolist()))
    ids = tokens_of(case, 40)
    error, size = _coded(codec, identity, ids, cache_layers(prefilled(model, ids)))
    assert error < most
    assert size < share


def _coded(codec: Any, identity: ModelIdentity, ids: torch.Tensor, layers: Any) -> tuple[float, float]:
    """(relative squared error of K behind the first tokens, share of the raw bytes)."""
    info = BlockInfo(identity.layout, ids[0].numpy().astype(np.uint32), 0)
    view = KVView.of_layers(identity.layout, [(k[0], v[0]) for k, v in layers])
    room = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, view, room)
    assert sizes is not None
    assert codec.fallbacks(room[: sum(sizes)], sizes) == 0
    back = [(torch.zeros_like(k[0]), torch.zeros_like(v[0])) for k, v in layers]
    codec.decode(info, room[: sum(sizes)], sizes, KVView.of_layers(identity.layout, back))
    want, got = (torch.stack([k[:, 4:] for k, _ in x]).float() for x in ([(k[0], v[0]) for k, v in layers], back))
    return float((want - got).square().mean() / want.square().mean()), sum(sizes) / view.nbytes


def test_keys_are_predicted_from_pairs_that_the_model_turned(case: str, model: Any, profile: Path) -> None:
    """With angles of another embedding, layer 0, which follows from the token alone, would be far off."""
    identity = ModelIdentity.from_transformers(model, TOKENIZER, regime=regime_of(case))
    layout = identity.layout
    fitted = PredictiveModel.from_arrays(layout, Profile.load(profile, identity).section("lossless"))
    ids = tokens_of(case, 40)
    walk = reference.Predictor(fitted, ids[0], 0)
    said = floats(walk.predict(0).numpy().astype(np.uint16))
    keys = cache_layers(prefilled(model, ids))[0][0][0].transpose(0, 1).flatten(1).float().numpy()
    want = in_pairs(keys, layout.rope, layout.layers[0].key_dim)
    assert np.square(said - want).mean() < 1e-3 * np.square(want).mean()


def test_windows_of_the_other_regime_are_refused(tmp_path: Path) -> None:
    model = model_of("longrope")
    for regime, length in (("short", FIRST + 1), ("long", FIRST)):
        with pytest.raises(UnsupportedLength, match="longrope"):
            calibrate(model, TOKENIZER, TEXT, tmp_path / "p", windows=2, length=length, regime=regime)
    with pytest.raises(UnsupportedLength, match="dynamic"):
        calibrate(model_of("dynamic"), TOKENIZER, TEXT, tmp_path / "p", windows=2, length=FIRST)
    with pytest.raises(UnsupportedLength, match="at least 161 tokens, found 106"):
        calibrate(model, TOKENIZER, TEXT, tmp_path / "p", windows=2, length=180, regime="long", parts=("donor",))
    assert list(tmp_path.iterdir()) == []


def test_passages_need_keys_that_can_be_moved() -> None:
    layout = layout_from_config(calibrated.tiny("gemma3-full").config, "bfloat16")
    assert not can_code_moved(layout)
    with pytest.raises(UnsupportedModel, match="leave donor out"):
        check_passages(layout, LENGTH)


def test_keys_are_moved_to_where_the_model_would_put_them(case: str, model: Any) -> None:
    """Of the first layer, where they follow from the token and the position alone."""
    layout = ModelIdentity.from_transformers(model, regime=regime_of(case)).layout
    ids, shift = tokens_of(case, 20), 9
    here, there = ids, torch.cat([tokens_of("", shift, seed=1), ids], 1)
    k, v = cache_layers(prefilled(model, here))[0]
    wanted = cache_layers(prefilled(model, there))[0][0][0, :, shift:]
    single = KVLayout(layout.layers[:1], layout.dtype, layout.rope)
    view = KVView.of_layers(single, [(k[0].clone(), v[0].clone())])
    rotate_keys(view, shift)
    moved = view.tensors()[0].float()
    assert (moved - wanted.float()).square().mean() < 1e-4 * wanted.float().square().mean()
    assert (k[0].float() - wanted.float()).square().mean() > 1e-2 * wanted.float().square().mean()
