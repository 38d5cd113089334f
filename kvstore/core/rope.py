"""The rotary embedding: by which angles a model rotates its keys, and how to add or remove that rotation.

A key of `dim` values is rotated in pairs (i, i + n) that lie half of the rotated part apart; pair i turns by
`frequencies(...)[i]` radians with every position. Which types there are is in rope_types.py. Some multiply what they
rotate by a factor besides (`attention_scaling`): keys in a cache carry it, and as it is the same for all positions,
whoever takes the rotation away, adds it or moves keys leaves it where it is. Some have other frequencies for long
sequences than for short ones: `lengths` says for which a layout stands.

Two questions that must not be mixed up. To *predict* with unrotated keys (`frequencies`, `rotate`) it is enough that
encoder and decoder do the same: for a model that pairs its values otherwise the prediction is worse, the result is
right. To *move* keys to other positions (`can_rotate`, `angles_of`) the pairs must be those of the model.

Codecs that rotate in integers work on pairs half a head apart. Where only a part of a head is rotated, they take its
values in another order (`pair_order`), in which those that stand still are pairs, too, whose angle is 0.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import KVLayout
from kvstore.core.rope_types import LONG, SHORT, Radians, found_frequencies, found_lengths, found_scaling
from kvstore.errors import UnsupportedLength

ONE = 1 << 14
"""1.0 in the fixed point of angle tables: with these a record is decoded alike on every machine, whatever its
mathematical library rounds to."""

Angles = npt.NDArray[np.int16]
Order = npt.NDArray[np.int64]
Keys = npt.NDArray[np.float32]
Rows = npt.NDArray[Any]
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


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
        with np.errstate(all="ignore"):  # what is not finite is refused below
            found = found_frequencies(json.loads(rope), dim)
    except _MALFORMED as error:
        raise ValueError(f"rope: the rotary embedding {rope!r} is not known: {error!r}") from error
    if 2 * len(found) > dim or not np.isfinite(found).all():
        raise ValueError(f"rope: the rotary embedding {rope!r} does not fit keys of {dim} dimensions")
    found.flags.writeable = False
    return found


def attention_scaling(rope: str) -> float:
    """Return what the rotated part of keys (and queries) is multiplied by besides; 1 for most rotary embeddings.

    Raises:
        ValueError: the rotary embedding is not known.

    Example:
        >>> attention_scaling('{"rope_theta": 1e4, "rope_type": "default"}')
        1.0
    """
    try:
        return 1.0 if rope == "none" else found_scaling(json.loads(rope))
    except _MALFORMED as error:
        raise ValueError(f"rope: the rotary embedding {rope!r} is not known: {error!r}") from error


@lru_cache(maxsize=64)
def lengths(rope: str) -> tuple[int, int | None]:
    """Return the least and the largest number of tokens of sequences whose keys are rotated so; None is without end.

    With rope types longrope and dynamic, keys depend on the length of the whole sequence that the model was at when it
    computed them. What is not known is taken for a rotary embedding of all lengths.

    Example:
        >>> lengths("none")
        (0, None)
    """
    try:
        return found_lengths(json.loads(rope))
    except _MALFORMED:
        return 0, None


def regime_of(layout: KVLayout) -> str:
    """Return "short" or "long": the lengths of sequences that a layout is for; "short" where keys do not depend on it.

    Example:
        >>> regime_of(KVLayout.uniform(num_layers=1, heads=2, head_dim=16))
        'short'
    """
    least, _ = lengths(layout.rope)
    return LONG if least else SHORT


def check_length(layout: KVLayout, tokens: int) -> None:
    """Check that a sequence of so many tokens has keys like those of this layout.

    Raises:
        UnsupportedLength: it has not, because the model rotates the keys of sequences of this length otherwise.
    """
    least, most = lengths(layout.rope)
    if least <= tokens and (most is None or tokens <= most):
        return
    kind = json.loads(layout.rope)["rope_type"]
    other = "no store can hold longer ones"
    if kind == "longrope":
        other = f"open another store with regime={SHORT if least else LONG!r} for the others"
    wanted = f"at most {most}" if most is not None else f"at least {least}"
    raise UnsupportedLength(
        f"tokens: with rope type {kind} keys depend on the length of the sequence; these caches are of "
        f"sequences of {wanted} tokens, found {tokens}; {other}"
    )


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


def pair_order(rope: str, dim: int) -> Order | None:
    """Return in which order values of a key form pairs half a head apart, int64 `[dim]`; None if they do as they are.

    First stand the first values of all rotated pairs and the first half of what is not rotated, then the rest.

    Args:
        rope: `KVLayout.rope`.
        dim: values of a key, even.

    Raises:
        ValueError: as `frequencies`.

    Example:
        >>> pair_order('{"rope_theta": 1e4, "partial_rotary_factor": 0.5}', 8).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    pairs = len(frequencies(rope, dim))
    if 2 * pairs in (0, dim):
        return None
    middle = pairs + dim // 2
    index = np.arange(dim)
    return np.concatenate([index[:pairs], index[2 * pairs : middle], index[pairs : 2 * pairs], index[middle:]])


def in_pairs(rows: Rows, rope: str, dim: int) -> Rows:
    """Return rows of heads of `dim` values in `pair_order`, `[n, heads * dim]`; the same array if that is as they are.

    Raises:
        ValueError: as `frequencies`.
    """
    order = pair_order(rope, dim)
    return rows if order is None else rows.reshape(len(rows), -1, dim)[:, :, order].reshape(rows.shape)


def paired_frequencies(rope: str, dim: int) -> Radians:
    """Return `frequencies` of all pairs of `pair_order`, float64 `[dim / 2]`: 0 for those that are not rotated.

    Raises:
        ValueError: as `frequencies`.
    """
    found = np.zeros(dim // 2)
    some = frequencies(rope, dim)
    found[: len(some)] = some
    return found


def can_rotate(layout: KVLayout) -> bool:
    """Return whether keys of this layout can be moved to other positions.

    They can if they have no rotary embedding, or a known one over heads of one size, whose pairs lie half of the
    rotated part apart.

    Example:
        >>> can_rotate(KVLayout.uniform(num_layers=1, heads=2, head_dim=16))
        True
    """
    return layout.rope == "none" or _movable(layout) is not None


def angles_of(layout: KVLayout, shift: int) -> Angles:
    """Return cos and sin of the rotation by `shift` positions, int16 `[2, key_dim / 2]` in 1/16384, by `pair_order`.

    Raises:
        ValueError: keys of this layout cannot be moved (`can_rotate`).
    """
    radians = _movable(layout)
    if radians is None:
        raise ValueError(f"rope: keys with the rotary embedding {layout.rope!r} cannot be moved to other positions")
    return fixed_point(shift * radians)


def fixed_point(angle: Radians) -> Angles:
    """Return cos and sin of angles in 1/16384: int16, of shape `[2, *angle.shape]`."""
    return np.asarray(np.rint(ONE * np.stack([np.cos(angle), np.sin(angle)])), np.int16)


def _movable(layout: KVLayout) -> Radians | None:
    """`paired_frequencies` of keys that can be moved; None for others, and without a rotary embedding."""
    dims = {layer.key_dim for layer in layout.layers}
    if layout.rope == "none" or len(dims) != 1 or min(dims) % 2:
        return None
    try:
        facts: dict[str, Any] = json.loads(layout.rope)
        return None if "pairs" in facts else paired_frequencies(layout.rope, min(dims))
    except (ValueError, TypeError):
        return None
