"""Types of rotary embeddings: frequencies, factor and lengths against transformers' own functions and modules."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from kvstore.core.layout import KVLayout
from kvstore.core.rope import (
    angles_of,
    attention_scaling,
    can_code_moved,
    check_length,
    frequencies,
    lengths,
    pair_order,
    paired_frequencies,
    rotate,
)
from kvstore.core.rope_types import LENGTH_DEPENDENT, TYPES
from kvstore.errors import UnsupportedLength, UnsupportedModel
from kvstore.integrations.transformers import layout_from_config

DIM = 24
_THETA = {"rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + 0.7 * i for i in range(DIM // 2)],
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear, partial": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "llama3": _LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3, another base": _LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    "llama3, partial": _LLAMA3 | {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75},
    "llama3, the length of the config": _LLAMA3,
    "yarn": _YARN,
    "yarn, no factor": {**_YARN, "factor": None},
    "yarn, one": {**_YARN, "factor": 1.0},
    "yarn, betas": _YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, no rounding": _YARN | {"truncate": False},
    "yarn, attention_factor": _YARN | {"attention_factor": 0.7},
    "yarn, mscale": _YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn, mscale of half": _YARN | {"mscale": 0.9},
    "yarn, partial": _YARN | {"partial_rotary_factor": 0.5},
    "yarn, a short length": _YARN | {"original_max_position_embeddings": 7},
    "longrope": _LONGROPE,
    "longrope, factor": _LONGROPE | {"factor": 3.0},
    "longrope, attention_factor": _LONGROPE | {"attention_factor": 1.3},
    "longrope, partial": {
        **_LONGROPE,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.5] * 6,
        "long_factor": [2.5] * 6,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, partial": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.75, "factor": 2.0},
}


def config_of(parameters: dict[str, Any], **changes: Any) -> Any:
    given = {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 2, "head_dim": DIM}
    return LlamaConfig(**{**given, "max_position_embeddings": 256, "rope_parameters": _THETA | parameters, **changes})


@pytest.mark.parametrize("regime", ["short", "long"])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_factor_are_those_of_transformers(case: str, regime: str) -> None:
    parameters = CASES[case]
    kind = parameters["rope_type"]
    if regime == "long" and kind != "longrope":
        return  # one set of frequencies
    config = config_of(parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=65 if regime == "long" else None)
    rope = layout_from_config(config, "bfloat16", regime).rope
    np.testing.assert_allclose(frequencies(rope, DIM), expected.double().numpy(), rtol=3e-6)
    assert attention_scaling(rope) == pytest.approx(factor, rel=1e-12)


def test_every_type_of_transformers_is_tried_and_known() -> None:
    tried = {case["rope_type"] for case in CASES.values()}
    assert tried == set(ROPE_INIT_FUNCTIONS)
    assert set(TYPES) == tried | {"default"}


def test_the_store_refuses_types_that_are_not_known_here() -> None:
    config = config_of({"rope_type": "default"})
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModel, match="rope type spiral"):
        layout_from_config(config, "bfloat16")


@pytest.mark.parametrize("case", ["yarn", "longrope", "longrope, partial", "yarn, partial", "linear, partial"])
@pytest.mark.parametrize("length", [64, 65])
def test_keys_that_a_model_rotates_are_taken_back(case: str, length: int) -> None:
    """Below, at and above the first length: `rotate` takes off what the module put on, but for the factor."""
    given = {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    limits = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "pad_token_id": 0}
    config = Phi3Config(**given, **limits)
    config.rope_parameters = _THETA | CASES[case]  # its constructor takes longrope alone
    regime = "long" if length > 64 else "short"
    rope = layout_from_config(config, "bfloat16", regime).rope
    keys, positions = np.random.default_rng(0).standard_normal((length, 48), np.float32), np.arange(length)
    x = torch.from_numpy(keys).view(1, length, 2, DIM).transpose(1, 2)
    cos, sin = Phi3RotaryEmbedding(config)(x, torch.from_numpy(positions)[None])
    cached = apply_rotary_pos_emb(x, x, cos, sin)[1][0].transpose(0, 1).reshape(length, 48).numpy()
    found = rotate(cached, 2, positions, rope, -1).reshape(length, 2, DIM)
    rotated = 2 * len(frequencies(rope, DIM))
    wanted = keys.reshape(length, 2, DIM).copy()
    wanted[..., :rotated] *= attention_scaling(rope)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_phimoe_has_a_factor_for_each_regime_and_one_set_of_frequencies() -> None:
    parameters = _THETA | _LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = PhimoeConfig(**sizes, max_position_embeddings=256, rope_parameters=parameters)
    module = PhimoeRotaryEmbedding(config)
    for length, regime in ((64, "short"), (65, "long")):
        rope = layout_from_config(config, "bfloat16", regime).rope
        assert lengths(rope) == ((0, 64) if regime == "short" else (65, None))
        cos, sin = module(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]))
        angle, factor = (length - 1) * frequencies(rope, DIM), attention_scaling(rope)
        np.testing.assert_allclose(cos[0, 0, : DIM // 2].numpy(), factor * np.cos(angle), atol=3e-5)
        np.testing.assert_allclose(sin[0, 0, : DIM // 2].numpy(), factor * np.sin(angle), atol=3e-5)
    config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(UnsupportedModel, match="yarn keys depend"):
        layout_from_config(config, "bfloat16")


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_lengths_are_those_at_which_the_module_has_these_frequencies(kind: str) -> None:
    """Whatever the module saw before: "dynamic" keeps the frequencies of a longer sequence at its very first length."""
    config = config_of(CASES[kind], max_position_embeddings=64 if kind == "dynamic" else 256)
    module, x = LlamaRotaryEmbedding(config), torch.zeros(1, 1, 1, DIM)
    layouts = {"short": layout_from_config(config, "bfloat16")}
    if kind == "longrope":
        layouts["long"] = layout_from_config(config, "bfloat16", "long")
    for length in (1, 63, 64, 65, 200, 63, 64, 65, 62, 64):
        module(x, torch.tensor([[length - 1]]))
        for layout in layouts.values():
            least, most = lengths(layout.rope)
            if least <= length and (most is None or length <= most):
                check_length(layout, length)
                same = np.allclose(frequencies(layout.rope, DIM), module.inv_freq.double().numpy(), rtol=3e-6)
                assert same, (length, layout.rope)
            else:
                with pytest.raises(UnsupportedLength, match=kind):
                    check_length(layout, length)
    limits = {name: lengths(layout.rope) for name, layout in layouts.items()}
    assert limits == ({"short": (0, 63)} if kind == "dynamic" else {"short": (0, 64), "long": (65, None)})


def test_the_regimes_of_longrope_are_different_layouts_and_dynamic_has_no_second() -> None:
    config = config_of(CASES["longrope"])
    short, long = (layout_from_config(config, "bfloat16", regime) for regime in ("short", "long"))
    assert short != long
    assert short.canonical() != long.canonical()
    with pytest.raises(UnsupportedLength, match="regime='long'"):
        check_length(short, 65)
    with pytest.raises(UnsupportedLength, match="regime='short'"):
        check_length(long, 64)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        layout_from_config(config_of(CASES["dynamic"]), "bfloat16", "long")
    with pytest.raises(UnsupportedLength, match="no store can hold longer ones"):
        check_length(layout_from_config(config_of(CASES["dynamic"]), "bfloat16"), 256)
    plain = config_of(CASES["llama3"])
    assert layout_from_config(plain, "bfloat16", "long") == layout_from_config(plain, "bfloat16")


def test_types_that_depend_on_the_length_are_refused_where_layers_differ() -> None:
    config = config_of({"rope_type": "default"}, layer_types=["full_attention"])
    for kind in LENGTH_DEPENDENT:
        config.rope_parameters = {"full_attention": _THETA | CASES[kind]}
        with pytest.raises(UnsupportedModel, match=kind):
            layout_from_config(config, "bfloat16")


@pytest.mark.parametrize(
    "broken", ["factor", "original_max_position_embeddings", "regime", "short_factor", "rope_theta"]
)
def test_parameters_that_are_missing_are_refused(broken: str) -> None:
    kind = "yarn" if broken == "factor" else "longrope"
    facts = json.loads(layout_from_config(config_of(CASES[kind]), "bfloat16").rope)
    del facts[broken]
    if broken == "factor":
        del facts["max_position_embeddings"]
    with pytest.raises(ValueError, match="rotary embedding"):
        frequencies(json.dumps(facts), DIM)


@pytest.mark.parametrize(("dim", "part"), [(8, 0.5), (8, 0.75), (24, 0.25), (10, 0.4), (10, 0.5)])
def test_pairs_lie_half_a_head_apart_in_pair_order(dim: int, part: float) -> None:
    """Rotated in that order by `paired_frequencies`, keys are what `rotate` makes of them as they are."""
    rope = json.dumps(_THETA | {"rope_type": "default", "partial_rotary_factor": part})
    order = pair_order(rope, dim)
    assert order is not None
    assert sorted(order.tolist()) == list(range(dim))
    keys = np.random.default_rng(1).standard_normal((3, 2 * dim), np.float32)
    angle = 77 * paired_frequencies(rope, dim)
    mixed = keys.reshape(3, 2, dim)[..., order]
    a, b = mixed[..., : dim // 2], mixed[..., dim // 2 :]
    turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 2)
    wanted = rotate(keys, 2, np.full(3, 77), rope, 1).reshape(3, 2, dim)[..., order]
    np.testing.assert_allclose(turned, wanted, atol=1e-5)
    layout = KVLayout.uniform(2, 2, dim, rope=rope)
    assert can_code_moved(layout)
    assert (angles_of(layout, 77)[0] == np.rint(16384 * np.cos(angle))).all()


@pytest.mark.parametrize("rope", ["none", json.dumps(_THETA), json.dumps(_THETA | CASES["proportional"])])
def test_whole_heads_are_in_order_as_they_are(rope: str) -> None:
    assert pair_order(rope, 16) is None


def test_what_is_not_rotated_has_no_factor_and_all_lengths() -> None:
    assert attention_scaling("none") == 1.0
    assert lengths("none") == (0, None)
    assert lengths("no json") == (0, None)
    check_length(KVLayout.uniform(1, 1, 8), 1 << 30)
    assert math.isclose(attention_scaling(json.dumps(_THETA | {**_YARN, "factor": 1.0})), 1.0)
