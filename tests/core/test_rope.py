"""The rotary embedding: its angles against the definition, term by term, and against transformers."""

from __future__ import annotations

import cmath
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.core.rope import (
    LATENTS_IN_HALVES,
    LATENTS_IN_NEIGHBOURS,
    angles_of,
    can_code_moved,
    can_move,
    fixed_point,
    frequencies,
    rotate,
    rotated_part,
)

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0, "rope_type": "default"},
    "linear": {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "partial": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
}


def radians(facts: dict[str, Any], pair: int, rotated: int) -> float:
    """Of one pair a position, by the definitions: RoFormer (arXiv:2104.09864), and wavelengths for Llama 3.1."""
    found: float = facts["rope_theta"] ** (-2 * pair / rotated)
    if facts.get("rope_type") == "linear":
        return found / facts["factor"]
    if facts.get("rope_type") == "llama3":
        wavelength, length = 2 * math.pi / found, facts["original_max_position_embeddings"]
        if wavelength < length / facts["high_freq_factor"]:
            return found
        if wavelength > length / facts["low_freq_factor"]:
            return found / facts["factor"]
        low, high = facts["low_freq_factor"], facts["high_freq_factor"]
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * found / facts["factor"] + smooth * found
    return found


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dim", [4, 12, 64])
def test_frequencies_are_those_of_the_definition(kind: str, dim: int) -> None:
    facts = ROPES[kind]
    rotated = int(dim * facts.get("partial_rotary_factor", 1.0))
    found = frequencies(json.dumps(facts), dim)
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx([radians(facts, pair, rotated) for pair in range(rotated // 2)], rel=1e-14)


@pytest.mark.parametrize("kind", ROPES)
def test_rotations_are_products_of_complex_numbers(kind: str) -> None:
    """The pair (a, b) is a + bi; a position multiplies it by e^(i * position * radians). What is not rotated stays."""
    facts, dim, heads = ROPES[kind], 8, 3
    rng = np.random.default_rng(1)
    keys, positions = rng.standard_normal((5, heads * dim), np.float32), np.array([0, 1, 7, 1000, 5])
    half = int(dim * facts.get("partial_rotary_factor", 1.0)) // 2
    found = rotate(keys, heads, positions, json.dumps(facts), 1)
    for row, head in np.ndindex(5, heads):
        before, after = (x[row, head * dim : (head + 1) * dim] for x in (keys, found))
        for pair in range(half):
            turned = complex(before[pair], before[pair + half])
            turned *= cmath.exp(1j * int(positions[row]) * radians(facts, pair, 2 * half))
            assert complex(after[pair], after[pair + half]) == pytest.approx(turned, abs=1e-5)
        assert (after[2 * half :] == before[2 * half :]).all()
    assert np.allclose(rotate(found, heads, positions, json.dumps(facts), -1), keys, atol=1e-5)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_tables_of_angles_are_cosines_and_sines_in_fixed_point(kind: str) -> None:
    layout = KVLayout.uniform(2, 2, 12, rope=json.dumps(ROPES[kind]))
    for shift in (1, -3, 777):
        found = angles_of(layout, shift)
        assert found.dtype == np.int16
        assert found.shape == (2, 6)
        for pair in range(6):
            angle = shift * radians(ROPES[kind], pair, 12)
            assert abs(int(found[0, pair]) - 16384 * math.cos(angle)) <= 0.5001
            assert abs(int(found[1, pair]) - 16384 * math.sin(angle)) <= 0.5001


def test_fixed_point_keeps_the_shape_of_the_angles() -> None:
    assert fixed_point(np.zeros((3, 5))).shape == (2, 3, 5)
    assert fixed_point(np.array([0.0, math.pi / 2])).tolist() == [[16384, 0], [0, 16384]]


def test_angles_in_records_are_the_same_forever() -> None:
    """Records of the donor codec hold these numbers: other ones would be other bytes."""
    layout = KVLayout.uniform(1, 1, 8, rope=json.dumps(ROPES["llama3"]))
    assert angles_of(layout, 100).tolist() == [[14128, 4316, 16256, 16383], [-8296, 15805, 2043, 205]]


def test_without_a_rotary_embedding_keys_stay() -> None:
    keys = np.ones((2, 8), np.float32)
    assert rotate(keys, 1, np.arange(2), "none", 1) is keys
    assert len(frequencies("none", 8)) == 0


@pytest.mark.parametrize(
    "rope",
    [
        '{"rope_theta": 1e4, "rope_type": "yarn"}',
        "{}",
        "no json",
        "[1]",
        '{"rope_theta": "x"}',
        '{"rope_theta": 0}',
        '{"rope_theta": 1e4, "partial_rotary_factor": 3}',
        '{"rope_theta": 1e4, "rope_type": "llama3"}',
    ],
)
def test_unknown_rotary_embeddings_are_refused(rope: str) -> None:
    with pytest.raises(ValueError, match="rotary embedding"):
        frequencies(rope, 32)
    assert not can_move(KVLayout.uniform(1, 2, 32, rope=rope))
    with pytest.raises(ValueError, match="cannot be moved"):
        angles_of(KVLayout.uniform(1, 2, 32, rope=rope), 1)


def test_keys_move_only_where_their_pairs_are_known() -> None:
    known = json.dumps(ROPES["default"])
    for can in (can_move, can_code_moved):
        assert can(KVLayout.uniform(2, 2, 8))
        assert can(KVLayout.uniform(2, 2, 8, rope=known))
        assert not can(KVLayout.uniform(2, 2, 8, rope=json.dumps(ROPES["default"] | {"pairs": "Other"})))
        assert can(KVLayout.uniform(2, 2, 8, rope=json.dumps(ROPES["partial"])))
        assert not can(KVLayout.uniform(2, 2, 8, rope='{"full_attention": {"rope_theta": 100.0}}'))
        assert not can(KVLayout.uniform(2, 2, 7, rope=known))
        assert not can(KVLayout((LayerLayout(1, 8, 8), LayerLayout(1, 4, 4)), "bfloat16", known))


def latents(pairs: str, *widths: int, **facts: Any) -> KVLayout:
    """Layers with a latent of 32 values and a rotated key of these widths."""
    rope = json.dumps(ROPES["default"] | {"pairs": pairs} | facts)
    return KVLayout(tuple(LayerLayout(1, 32, width) for width in widths), "bfloat16", rope)


@pytest.mark.parametrize("name", LATENTS_IN_HALVES + LATENTS_IN_NEIGHBOURS)
def test_the_rotated_key_of_latents_is_v_and_no_donor_is_coded_at_another_position(name: str) -> None:
    layout = latents(name, 8, 8)
    assert can_move(layout)
    part = rotated_part(layout)
    assert part.place == 1
    assert part.frequencies.tolist() == frequencies(layout.rope, 8).tolist()
    values = list(range(8))
    apart = 4 if name in LATENTS_IN_HALVES else 1
    assert [b - a for a, b in zip(values[part.first], values[part.second], strict=True)] == [apart] * 4
    assert not can_code_moved(layout)
    with pytest.raises(ValueError, match="cannot be moved"):
        angles_of(layout, 1)


@pytest.mark.parametrize(
    "layout",
    [
        latents("other", 8, 8),
        latents("deepseek_v3", 8, 4),
        latents("deepseek_v3", 7),
        latents("deepseek_v3", 8, partial_rotary_factor=0.5),
        KVLayout.uniform(2, 2, 8, rope=json.dumps(ROPES["default"] | {"pairs": "deepseek_v3"})),
    ],
    ids=["model", "widths", "odd", "partly", "no latents"],
)
def test_latents_are_moved_only_where_all_of_their_keys_turn_in_known_pairs(layout: KVLayout) -> None:
    assert not can_move(layout)
    with pytest.raises(ValueError, match="cannot be moved"):
        rotated_part(layout)


def test_keys_of_plain_layers_turn_in_halves_of_their_rotated_part() -> None:
    part = rotated_part(KVLayout.uniform(2, 2, 8, rope=json.dumps(ROPES["partial"])))
    assert (part.place, part.first, part.second, len(part.frequencies)) == (0, slice(2), slice(2, 4), 2)
    with pytest.raises(ValueError, match="cannot be moved"):
        rotated_part(KVLayout.uniform(2, 2, 8))  # without a rotary embedding there is nothing to rotate


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rotations_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters: dict[str, object] = {"rope_theta": 10000.0, "rope_type": kind}
    if kind != "default":
        parameters["factor"] = 8.0
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=parameters)
    keys, positions = np.random.default_rng(0).standard_normal((40, 64), np.float32), np.arange(300, 340)
    x = torch.from_numpy(keys).view(1, 40, 2, 32).transpose(1, 2)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.from_numpy(positions)[None])
    expected = apply_rotary_pos_emb(x, x, cos, sin)[1][0].transpose(0, 1).reshape(40, 64).numpy()
    found = rotate(keys, 2, positions, json.dumps(parameters), 1)
    assert np.allclose(found, expected, atol=2e-4)
    assert np.allclose(rotate(found, 2, positions, json.dumps(parameters), -1), keys, atol=1e-5)
    assert len(frequencies(json.dumps(parameters), 32)) == 16
