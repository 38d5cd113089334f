"""The rotary embedding: by which angles a model rotates its keys, and how to add or remove that rotation.

A key of `dim` values is rotated in pairs (i, i + n) that lie half of the rotated part apart; pair i turns by
`frequencies(...)[i]` radians with every position. Which types there are is in rope_types.py. Some multiply what they
rotate by a factor besides (`attention_scaling`): keys in a cache carry it, and as it is the same for all positions,
whoever takes the rotation away, adds it or moves keys leaves it where it is. Some have other frequencies for long
sequences than for short ones: `lengths` says for which a layout stands.

Three questions that must not be mixed up. To *predict* with unrotated keys (`frequencies`, `rotate`) it is enough that
encoder and decoder do the same: for a model that pairs its values otherwise the prediction is worse, the result is
right. To *use* rows at other positions (`can_move`, `rotated_part`) the pairs must be those of the model; layers with
latents hold the rotated key as V. To *code* rows against rows at other positions (`can_code_moved`, `angles_of`) the
keys must stand in K besides, because that is what the donor codec rotates.

Codecs that rotate in integers work on pairs half a head apart. Where only a part of a head is rotated, they take its
values in another order (`pair_order`), in which those that stand still are pairs, too, whose angle is 0.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

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

IN_HALVES = (
    *("apertus", "arcee", "bitnet", "dbrx", "diffllama", "doge", "dots1", "flex_olmo", "glm4_moe", "gpt_neox"),
    *("gpt_neox_japanese", "granitemoe", "granitemoeshared", "hy_v3", "hyperclovax", "internlm3", "iquestcoder"),
    *("jais2", "jetmoe", "minimax_m2", "ministral3", "nemotron", "olmoe", "persimmon", "phi", "phimoe", "qwen3_moe"),
    *("seed_oss", "solar_open", "stablelm", "starcoder2"),
)
"""Models without latents whose keys, as a cache of transformers holds them, have their pairs half of the rotated part
apart, in every layer. Names are those that layouts have under "pairs"; of some models they have none, and their pairs
lie so, too. Keys of models that are in no list here are not moved."""
IN_NEIGHBOURS = ("cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
"""The same of models whose pairs are neighbours."""
LATENTS_IN_HALVES = ("axk1", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
"""Models with latents whose rotated keys have their pairs half of the rotated part apart."""
LATENTS_IN_NEIGHBOURS = ("deepseek_v2",)
"""The same of models whose pairs are neighbours."""

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


class RotatedPart(NamedTuple):
    """What must be rotated on where rows are used at other positions.

    Attributes:
        place: of the rotated keys in a layer's (K, V): 0 as K, 1 as V beside a latent.
        frequencies: radians per position of every pair, float64 `[n]`, not to be written to.
        first, second: which values of a key are the first and the second of these pairs. The others stand still.
    """

    place: int
    frequencies: Radians
    first: slice
    second: slice


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


def can_move(layout: KVLayout) -> bool:
    """Return whether rows of this layout's caches can be used at other positions, as approximate gets do.

    They can if keys have no rotary embedding, or `rotated_part` knows it.

    Example:
        >>> can_move(KVLayout.uniform(num_layers=1, heads=2, head_dim=16))
        True
    """
    return layout.rope == "none" or _rotated_part(layout) is not None


def rotated_part(layout: KVLayout) -> RotatedPart:
    """Return where the rotated keys stand in the layers of a layout, and by which angles they turn.

    Raises:
        ValueError: there is no rotary embedding, or nobody knows how to move such keys to other positions: it is not
            known, its layers differ, or which values form pairs is not known.

    Example:
        >>> rotated_part(KVLayout.uniform(1, heads=2, head_dim=4, rope='{"rope_theta": 1e4}')).place
        0
    """
    part = _rotated_part(layout)
    if part is None:
        raise ValueError(_cannot_move(layout))
    return part


def can_code_moved(layout: KVLayout) -> bool:
    """Return whether the donor codec can code rows of this layout against rows at other positions.

    Its integer arithmetic rotates K, in pairs half of the rotated part apart. So it cannot where the rotated keys are V
    (latents), or pairs are neighbours, though such rows can be used at other positions (`can_move`).

    Example:
        >>> can_code_moved(KVLayout.uniform(num_layers=1, heads=2, head_dim=16))
        True
    """
    return layout.rope == "none" or _has_angles(layout)


def angles_of(layout: KVLayout, shift: int) -> Angles:
    """Return cos and sin of K's rotation by `shift` positions, int16 `[2, key_dim / 2]` in 1/16384, by `pair_order`.

    Raises:
        ValueError: K of this layout cannot be moved (`can_code_moved`), or has no rotary embedding.
    """
    if not _has_angles(layout):
        raise ValueError(_cannot_move(layout))
    return fixed_point(shift * paired_frequencies(layout.rope, layout.layers[0].key_dim))


def fixed_point(angle: Radians) -> Angles:
    """Return cos and sin of angles in 1/16384: int16, of shape `[2, *angle.shape]`."""
    return np.asarray(np.rint(ONE * np.stack([np.cos(angle), np.sin(angle)])), np.int16)


def _has_angles(layout: KVLayout) -> bool:
    part = _rotated_part(layout)
    return part is not None and part.place == 0 and part.second.start == len(part.frequencies)


def _cannot_move(layout: KVLayout) -> str:
    return f"rope: keys with the rotary embedding {layout.rope!r} cannot be moved to other positions"


def _rotated_part(layout: KVLayout) -> RotatedPart | None:
    """See `rotated_part`; None for keys that cannot be moved, and without a rotary embedding."""
    if layout.rope == "none" or not layout.layers:
        return None
    try:
        facts = json.loads(layout.rope)
        pairs, latents = facts.get("pairs"), layout.is_latent and "pairs" in facts
        halves, neighbours = (LATENTS_IN_HALVES, LATENTS_IN_NEIGHBOURS) if latents else (IN_HALVES, IN_NEIGHBOURS)
        dims = {layer.value_dim if latents else layer.key_dim for layer in layout.layers}
        if not (pairs is None or pairs in halves + neighbours) or len(dims) != 1 or min(dims) % 2:
            return None
        radians = frequencies(layout.rope, min(dims))
    except (ValueError, TypeError, AttributeError):
        return None
    half = len(radians)
    if latents and 2 * half != min(dims):
        return None  # its parameters are of keys of another width than those that the cache holds
    if pairs in neighbours:
        return RotatedPart(int(latents), radians, slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    return RotatedPart(int(latents), radians, slice(half), slice(half, 2 * half))
