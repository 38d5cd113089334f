"""Recomputing chosen positions of a cache: how one that was assembled from donors is mended at its seams.

One pass of the model over only the tokens at those positions, as in CacheBlend (Yao et al. 2024, section 4): each
attends to everything up to itself, and in every layer its key and value replace those of the cache before anybody
attends to them. Tokens behind the cache are computed in the same pass, so the last one gives the next token's logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.approximate.plan import sharpened
from kvstore.core.approximate import Estimates, ReusedSpan, content_of
from kvstore.core.cache_argument import pass_arguments
from kvstore.core.layout import KVLayout
from kvstore.core.rope import check_length
from kvstore.errors import UnsupportedCache, UnsupportedModel
from kvstore.integrations.transformers.cache import cache_from_layers
from kvstore.integrations.transformers.describe import layout_from_config
from kvstore.integrations.transformers.mode import check_mode

# What takes a mask of its own for every query, and adds it.
ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Deviation:
    """How far the cache was from what the model computed in its place.

    Attributes:
        positions: int64 [p], rising.
        errors: float64 [p], |difference|^2 / |value|^2 of V over all heads, mean over the layers; of models with
            latents, of the latent, because their V is a rotated key. Meaningless where the cache held nothing.
        kl: the bound of the KL divergence, nats a token, corrected by these errors; None without spans.

    Example:
        >>> Deviation(positions=np.array([4]), errors=np.array([0.1])).kl is None
        True
    """

    positions: Any
    errors: Any
    kl: float | None = None


class Recomputed(NamedTuple):
    """What `recompute` returns.

    Attributes:
        cache: a transformers `DynamicCache` of all tokens.
        deviation: how far it was from what the model computed.
        logits: of the token after the last one, [vocabulary]; None if the last one was not computed.

    Example:
        >>> Recomputed._fields
        ('cache', 'deviation', 'logits')
    """

    cache: Any
    deviation: Deviation
    logits: torch.Tensor | None


def recompute(
    model: Any,
    layers: Any,
    tokens: Sequence[int] | torch.Tensor | np.ndarray[Any, Any],
    positions: Sequence[int],
    spans: Sequence[ReusedSpan] = (),
    estimates: Estimates | None = None,
) -> Recomputed:
    """Run the model once over the tokens at `positions` and over those behind the cache.

    Not thread-safe: nobody else may use the cache meanwhile. After an error of the model itself (out of memory) the
    cache must not be used.

    Args:
        model: a transformers model in evaluation mode.
        layers: `hit.cache()`, with a reserve for the new tokens, or (K, V) per layer, `[1, heads, n, dim]`. The rows at
            `positions` are **overwritten** either way, no other row is. Rows that hold nothing yet must be among them;
            their contents are not read.
        tokens: all token ids, n or more.
        positions: positions to recompute, each below n, in any order.
        spans: those of the hit; the bound of the KL is corrected with what is found at the seams.
        estimates: those of the hit. Without them the bound stands on what was found alone.

    Returns:
        The cache, how far it was from what the model computed, and the next token's logits. If positions were
        recomputed the cache is marked `is_approximate`, and no store takes it.

    Raises:
        ValueError: names the argument that does not fit.
        UnsupportedLength: the model rotates the keys of so long a sequence otherwise than those of a short one.
        LayoutMismatch: the layers have another shape than the model's.
        UnsupportedCache: names a layer that cannot be written into.
        UnsupportedModel: single tokens cannot be computed: the model has layers other than full attention (with or
            without latents), takes no position_ids, or its attention takes no mask for each query. Nothing is written
            then.

    Example:
        >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
        >>> with torch.no_grad():
        ...     output = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> found = recompute(model, cache, [1, 2, 3, 4], positions=[1])
        >>> found.cache.get_seq_length(), bool(found.deviation.errors.max() < 1e-9)
        (4, True)
    """
    layout = check_model(model)
    cache = layers if hasattr(layers, "layers") else cache_from_layers(tuple(layers))
    held = _held(layout, cache)
    ids, rows = _token_ids(model, tokens, held), _rows(model, positions, held)
    if len(rows):
        errors, logits = _overwrite(model, layout, cache, ids, held, rows)
    else:
        errors = np.zeros(0)
        logits = _run(model, cache, ids, held) if held < len(ids) else None
    found = rows.cpu().numpy()
    kl = sharpened(spans, found, errors, estimates) if spans else None
    return Recomputed(cache, Deviation(found, errors, kl), logits)


def _token_ids(model: Any, tokens: Any, held: int) -> torch.Tensor:
    """The token ids on the model's device, int64 [n], at least those of the cache."""
    given = tokens if isinstance(tokens, torch.Tensor) else torch.from_numpy(np.array(tokens, np.int64))
    ids = given.reshape(-1).to(model.device, torch.int64)
    if len(ids) < held:
        raise ValueError(f"tokens: expected at least the {held} that the cache holds, found {len(ids)}")
    check_length(layout_from_config(model.config, model.dtype), len(ids))  # a pass over a few rows looks short
    return ids


def _rows(model: Any, positions: Sequence[int], held: int) -> torch.Tensor:
    """The positions on the model's device, int64 [rows], rising, each once."""
    rows = torch.tensor(sorted({int(x) for x in positions}), dtype=torch.int64, device=model.device)
    if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < held:
        raise ValueError(f"positions: expected 0 to {held - 1}, found {int(rows[0])} to {int(rows[-1])}")
    return rows


def _overwrite(
    model: Any, layout: KVLayout, cache: Any, ids: torch.Tensor, held: int, rows: torch.Tensor
) -> tuple[Any, torch.Tensor | None]:
    """Runs the model with a cache whose `rows` it overwrites: (errors of the rows, float64; logits of `_run`)."""
    cache.is_approximate = True  # as that of the hit is: no store takes it for what the model makes of its tokens
    plain = list(cache.layers)
    seams = [_SeamLayer(layout, layer, rows) for layer in plain]
    cache.layers[:] = seams
    try:
        logits = _run(model, cache, ids, held, rows)
    finally:
        cache.layers[:] = plain
    return torch.stack([seam.errors for seam in seams]).mean(0).double().cpu().numpy(), logits


def check_model(model: Any) -> KVLayout:
    """Return the layout of a model's caches.

    Raises:
        UnsupportedModel: says why single positions of them cannot be recomputed.
        ValueError: see `mode.check_mode`.
    """
    layout = layout_from_config(model.config, model.dtype)
    name = getattr(model.config, "model_type", type(model).__name__)
    if reason := _not_single(layout):
        raise UnsupportedModel(f"{name}: {reason}, so single positions cannot be recomputed")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in ATTENTION:
        raise UnsupportedModel(
            f"{name}: attention {attention!r} takes no mask for each query; load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    if getattr(model.config, "alibi", False):
        raise UnsupportedModel(f"{name}: attention by distance (alibi) has no single positions to be recomputed")
    if "position_ids" not in _parameters(model):
        raise UnsupportedModel(f"{name}: the model takes no position_ids, so single positions cannot be recomputed")
    check_mode(model)
    return layout


def _not_single(layout: KVLayout) -> str | None:
    """Why rows of a layout cannot be recomputed one by one; None if they can."""
    if layout.states:
        return "its states are of one position alone"
    if layout.is_grouped:
        return "layers with windows hold no rows of the middle of a sequence"
    if layout.indexed:
        return "layers with an indexer keep keys that choose what is attended to"
    return "it has layers without keys of their own" if layout.model_layers else None


class _SeamLayer:
    """One layer during the pass: `update` writes the first states over `rows`, appends the rest to the layer that it
    stands for, and returns all keys and values of that; all else is that layer's. errors: of the rows' content
    (`content_of`), float32 [rows], once they are written."""

    def __init__(self, layout: KVLayout, layer: Any, rows: torch.Tensor) -> None:
        self.layout, self.layer, self.rows = layout, layer, rows
        self.errors = torch.zeros(len(rows), device=rows.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(self.rows)
        new = content_of(self.layout, key_states, value_states)[..., :count, :]
        old = content_of(self.layout, self.layer.keys, self.layer.values)[..., self.rows, :]
        self.errors = _energy(new.float() - old.float()) / _energy(new.float()).clamp_min(1e-30)
        self.layer.keys.index_copy_(-2, self.rows, key_states[..., :count, :])
        self.layer.values.index_copy_(-2, self.rows, value_states[..., :count, :])
        if key_states.shape[-2] > count:
            self.layer.update(key_states[..., count:, :], value_states[..., count:, :])
        return self.layer.keys, self.layer.values


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares over heads and channels: [rows] of [1, heads, rows, dim]."""
    return x.square().sum((0, 1, 3))


def _held(layout: KVLayout, cache: Any) -> int:
    """Tokens that the cache holds, checked against the model's layout."""
    for number, layer in enumerate(cache.layers):
        # Others, and what is derived from a DynamicLayer, may keep their tensors in another form or order.
        if type(layer).__name__ not in ("DynamicLayer", "GrowingLayer") or layer.keys is None:
            raise UnsupportedCache(
                f"layer {number} of the cache is a {type(layer).__name__} and cannot be overwritten; use a DynamicCache"
            )
    held = int(cache.layers[0].keys.shape[-2]) if cache.layers else 0
    layout.layers_of(cache, held)
    return held


def _run(model: Any, cache: Any, ids: torch.Tensor, held: int, rows: torch.Tensor | None = None) -> torch.Tensor | None:
    """Runs the tokens at `rows` and behind the `held` ones. The logits after the last token, if it was run."""
    at = torch.arange(held, len(ids), device=ids.device)
    arguments = pass_arguments(model, cache)
    if rows is not None:
        at = torch.cat([rows, at])
        hidden = torch.arange(len(ids), device=ids.device) > at[:, None]
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=ids.device)
        arguments["attention_mask"] = mask.masked_fill_(hidden, torch.finfo(model.dtype).min)[None, None]
    # Outside of inference mode its tensors may not be written into; outside of it, others are left to be used anywhere.
    inference = any(layer.keys.is_inference() for layer in cache.layers)
    with torch.inference_mode() if inference else torch.no_grad():
        logits: torch.Tensor = model(ids[at][None], position_ids=at[None], **arguments).logits
    return logits[0, -1] if int(at[-1]) == len(ids) - 1 else None


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters
