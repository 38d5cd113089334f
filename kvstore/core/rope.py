"""The rotary embedding: by which angles a model rotates its keys, and how to add or remove that rotation.

A key of `dim` values is rotated in pairs (i, i + n) that lie half of the rotated part apart; pair i turns by
`frequencies(...)[i]` radians with every position. Known are transformers' types "default", "linear" and "llama3".

Two questions that must not be mixed up. To *predict* with unrotated keys (`frequencies`, `rotate`) it is enough that
encoder and decoder do the same: for a model that pairs its values otherwise the prediction is worse, the result is
right. To *move* keys to other positions (`can_rotate`, `angles_of`) the pairs must be those of the model.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import KVLayout

ONE = 1 << 14
"""1.0 in the fixed point of angle tables: with these a record is decoded alike on every machine, whatever its
mathematical library rounds to."""

Angles = npt.NDArray[np.int16]
Radians = npt.NDArray[np.float64]
Keys = npt.NDArray[np.float32]


@lru_cache(maxsize=64)
def frequencies(rope: str, dim: int) -> Radians:
    """Return radians per position of every rotated pair of a key, float64 `[n]`, not to be written to.

    Args:
        rope: `KVLayout.rope`. The result is empty for "none".
        dim: values of a key.

    Raises:
        ValueError: the rotary embedding is not known, or does not fit such keys.

    Example:
        >>> frequencies('{"rope_theta": 10000.0, "rope_type": "default"}', 4)
        array([1.  , 0.01])
    """
    if rope == "none":
        return np.empty(0)
    try:
        facts: dict[str, Any] = json.loads(rope)
        kind = facts.get("rope_type", "default")
        rotated = int(dim * float(facts.get("partial_rotary_factor", 1.0)))
        half = rotated // 2
        with np.errstate(all="ignore"):  # what is not finite is refused below
            found = np.asarray(np.float64(facts["rope_theta"]) ** -(np.arange(half) / max(half, 1)), np.float64)
            if kind == "linear":
                found = found / float(facts["factor"])
            elif kind == "llama3":
                found = found * _llama3(found, facts)
            elif kind != "default":
                raise ValueError(f"rope_type: expected default, linear or llama3, found {kind!r}")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"rope: the rotary embedding {rope!r} is not known: {error!r}") from error
    if rotated % 2 or rotated > dim or not np.isfinite(found).all():
        raise ValueError(f"rope: the rotary embedding {rope!r} does not fit keys of {dim} dimensions")
    found.flags.writeable = False
    return found


def _llama3(found: Radians, facts: dict[str, Any]) -> Radians:
    """What frequencies are multiplied by: long waves are slowed down by `factor`, short ones are left as they are,
    with a ramp between ("Llama 3.1")."""
    factor, length = float(facts["factor"]), float(facts["original_max_position_embeddings"])
    low, high = float(facts["low_freq_factor"]), float(facts["high_freq_factor"])
    ramp = np.clip((length * found / (2 * math.pi) - low) / (high - low), 0, 1)
    factors: Radians = ramp + (1 - ramp) / factor
    return factors


def rotate(keys: Keys, heads: int, positions: npt.NDArray[np.int64], rope: str, sign: int) -> Keys:
    """Add the rotary embedding to keys, or take it away.

    Args:
        keys: float32 `[tokens, heads * dim]`.
        heads: of a key.
        positions: int64 `[tokens]`.
        rope: `KVLayout.rope`.
        sign: 1 adds the embedding, -1 takes it away.

    Returns:
        New keys; the same array if `rope` is "none".

    Raises:
        ValueError: as `frequencies`.
    """
    x = keys.reshape(len(keys), heads, keys.shape[1] // heads)
    radians = frequencies(rope, x.shape[2])
    half = len(radians)
    if not half:
        return keys
    angle = positions[:, None].astype(np.float64) * radians
    cos, sin = (part.astype(np.float32)[:, None] for part in (np.cos(angle), sign * np.sin(angle)))
    out = x.copy()
    first, second = x[:, :, :half], x[:, :, half : 2 * half]
    with np.errstate(invalid="ignore", over="ignore"):
        out[:, :, :half] = first * cos - second * sin
        out[:, :, half : 2 * half] = second * cos + first * sin
    return out.reshape(keys.shape)


def can_rotate(layout: KVLayout) -> bool:
    """Return whether keys of this layout can be moved to other positions.

    They can if they have no rotary embedding, or a known one over whole heads of one size, whose pairs lie half a head
    apart.

    Example:
        >>> can_rotate(KVLayout.uniform(num_layers=1, heads=2, head_dim=16))
        True
    """
    return layout.rope == "none" or _whole_heads(layout) is not None


def angles_of(layout: KVLayout, shift: int) -> Angles:
    """Return cos and sin of the rotation by `shift` positions, int16 `[2, key_dim / 2]` in 1/16384.

    Raises:
        ValueError: keys of this layout cannot be moved (`can_rotate`).
    """
    radians = _whole_heads(layout)
    if radians is None:
        raise ValueError(f"rope: keys with the rotary embedding {layout.rope!r} cannot be moved to other positions")
    return fixed_point(shift * radians)


def fixed_point(angle: Radians) -> Angles:
    """Return cos and sin of angles in 1/16384: int16, of shape `[2, *angle.shape]`."""
    return np.asarray(np.rint(ONE * np.stack([np.cos(angle), np.sin(angle)])), np.int16)


def _whole_heads(layout: KVLayout) -> Radians | None:
    """`frequencies` of keys that can be moved; None for others, and without a rotary embedding."""
    dims = {layer.key_dim for layer in layout.layers}
    if len(dims) != 1 or min(dims) % 2:
        return None
    try:
        facts = json.loads(layout.rope)
        if facts.get("partial_rotary_factor", 1.0) != 1.0 or "pairs" in facts:
            return None
        return frequencies(layout.rope, min(dims))
    except (ValueError, AttributeError):
        return None
