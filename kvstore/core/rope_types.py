"""The types of rotary embeddings: radians a position of every rotated pair, a factor on keys, and for which lengths.

Each is the function of the same name in transformers' `modeling_rope_utils`, in float64. Angles of all of them are
`position * frequency`; "yarn" and "longrope" multiply cosines and sines by a factor besides. With "longrope" and
"dynamic" the frequencies depend on how long the sequence is whose keys are computed, so their parameters name a
*regime*, which is part of the layout: "short" up to the length that the model was first trained on, "long" beyond it.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Radians = npt.NDArray[np.float64]
Facts = Mapping[str, Any]
"""The rotary parameters of a config, those that are None left out; `regime` where keys depend on the length."""

SHORT, LONG = "short", "long"
REGIMES = (SHORT, LONG)


def rope_of_kind(rope: str, kind: str) -> str:
    """Return the rotary parameters of the layers of one kind, of those of a layout.

    Models whose layers of different kinds are rotated by different angles have parameters for each kind.

    Args:
        rope: `KVLayout.rope`.
        kind: `LayerLayout.kind`.

    Example:
        >>> rope_of_kind('{"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}', "sliding")
        '{"rope_theta": 10000.0}'
        >>> rope_of_kind('{"rope_theta": 1e4}', "sliding")
        '{"rope_theta": 1e4}'
    """
    try:
        facts = json.loads(rope)
        own = dict(facts[f"{kind}_attention"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return rope
    return json.dumps(
        {key: value for key, value in facts.items() if not isinstance(value, Mapping)} | own, sort_keys=True
    )


def found_frequencies(facts: Facts, dim: int) -> Radians:
    """Return radians per position of every pair, float64 `[n]`, for keys of `dim` values.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, ArithmeticError: the parameters are of no known type, or one of
            them is missing or malformed.
    """
    kind = facts.get("rope_type", "default")
    if kind not in _TYPES:
        raise ValueError(f"rope_type: expected one of {', '.join(TYPES)}, found {kind!r}")
    return _TYPES[kind](facts, dim)


def found_scaling(facts: Facts) -> float:
    """Return what cosines and sines are multiplied by. Raises as `found_frequencies`."""
    kind = facts.get("rope_type", "default")
    given = facts.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if _is_phimoe(facts):
        return float(facts[f"{facts['regime']}_mscale"])
    if given is not None:
        return float(given)
    factor, length = _factor(facts), float(facts["original_max_position_embeddings"])
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    one, all_dim = facts.get("mscale"), facts.get("mscale_all_dim")
    if one and all_dim:
        return _mscale(factor, float(one)) / _mscale(factor, float(all_dim))
    return _mscale(factor, 1.0)


def found_lengths(facts: Facts) -> tuple[int, int | None]:
    """Return the least and the largest length of sequences whose keys are rotated so; None is without end.

    Raises as `found_frequencies`.
    """
    kind = facts.get("rope_type", "default")
    if kind not in LENGTH_DEPENDENT:
        return 0, None
    if facts["regime"] not in REGIMES:
        raise ValueError(f"regime: expected short or long, found {facts['regime']!r}")
    if kind == "longrope":
        original = int(facts["original_max_position_embeddings"])
        return (0, original) if facts["regime"] == SHORT else (original + 1, None)
    if facts["regime"] == LONG:
        raise ValueError("regime: with rope type dynamic every length beyond the first has keys of its own")
    # At exactly this length a model that has seen a longer sequence keeps that one's frequencies.
    return 0, int(facts["max_position_embeddings"]) - 1


def _plain(facts: Facts, rotated: int, width: int) -> Radians:
    """Of `rotated` values of a key (rounded up to pairs), exponents in parts of `width`."""
    steps = np.arange((rotated + 1) // 2)
    found: Radians = np.asarray(np.float64(facts["rope_theta"]) ** -(2 * steps / max(width, 1)), np.float64)
    return found


def _rotated(facts: Facts, dim: int) -> int:
    return int(dim * float(facts.get("partial_rotary_factor", 1.0)))


def _default(facts: Facts, dim: int) -> Radians:
    rotated = _rotated(facts, dim)
    return _plain(facts, rotated, rotated)


def _linear(facts: Facts, dim: int) -> Radians:
    return _default(facts, dim) / float(facts["factor"])


def _proportional(facts: Facts, dim: int) -> Radians:
    """Pairs lie half a head apart; those behind the rotated ones stand still."""
    rotated = int(float(facts.get("partial_rotary_factor", 1.0)) * dim // 2)
    found = np.zeros(dim // 2)
    found[:rotated] = _plain(facts, 2 * rotated, dim)[: dim // 2] / float(facts.get("factor", 1.0))
    return found


def _llama3(facts: Facts, dim: int) -> Radians:
    """Long waves are slowed down by `factor`, short ones are left as they are, with a ramp between ("Llama 3.1")."""
    found = _default(facts, dim)
    factor, length = float(facts["factor"]), float(facts["original_max_position_embeddings"])
    low, high = float(facts["low_freq_factor"]), float(facts["high_freq_factor"])
    ramp = np.clip((length * found / (2 * math.pi) - low) / (high - low), 0, 1)
    factors: Radians = ramp + (1 - ramp) / factor
    return found * factors


def _yarn(facts: Facts, dim: int) -> Radians:
    """As llama3, with a ramp over the numbers of pairs (arXiv:2309.00071)."""
    found, rotated = _default(facts, dim), _rotated(facts, dim)
    theta, length = float(facts["rope_theta"]), float(facts["original_max_position_embeddings"])
    fast, slow = float(facts.get("beta_fast") or 32), float(facts.get("beta_slow") or 1)
    low, high = (rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if facts.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(len(found)) - low) / (high - low), 0, 1)
    slowed: Radians = found * (ramp / _factor(facts) + (1 - ramp))
    return slowed


def _longrope(facts: Facts, dim: int) -> Radians:
    """A factor for each pair (arXiv:2402.13753): of two lists, by the regime."""
    found_lengths(facts)
    name = f"{SHORT if _is_phimoe(facts) else facts['regime']}_factor"
    factors = np.array([float(x) for x in facts[name]])
    found = _default(facts, dim)
    if factors.shape != found.shape:
        raise ValueError(f"{name}: expected {len(found)} numbers, found {len(factors)}")
    slowed: Radians = found / factors
    return slowed


def _is_phimoe(facts: Facts) -> bool:
    """Whether the parameters are those of a model that has other factors on keys in each regime, not other angles."""
    return facts.get("pairs") == "phimoe" and facts.get("rope_type") == "longrope"


def _dynamic(facts: Facts, dim: int) -> Radians:
    found_lengths(facts)
    return _default(facts, dim)


def _factor(facts: Facts) -> float:
    given = facts.get("factor")
    if given is None:
        return float(facts["max_position_embeddings"]) / float(facts["original_max_position_embeddings"])
    return float(given)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_TYPES: dict[str, Callable[[Facts, int], Radians]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
TYPES = tuple(_TYPES)
"""All that a store takes, and that calibration takes."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types whose keys depend on the length of the sequence they were computed in, not on the position alone."""
