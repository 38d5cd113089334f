"""Places inside of a prompt from which a model with windows or states can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore.core.rope import regime_of
from kvstore.core.rope_types import LONG
from kvstore.integrations.transformers.feeding import advance
from kvstore.integrations.transformers.observed import observed

if TYPE_CHECKING:
    from kvstore.core.layout import KVLayout
    from kvstore.integrations.transformers.logprobs import Scores
    from kvstore.store import KVStore


def store_places(
    model: Any,
    prompt: list[int],
    cache: Any,
    held: int,
    store: KVStore,
    namespace: str | bytes,
    chunk: int | None,
    scores: Scores | None = None,
) -> int:
    """Compute a prompt up to its last token, and put the cache there and at each multiple of `StoreConfig.state_every`.

    For models with windows or states (`needs_places`): a get of the same prompt asks for all but its last token, and of
    such layers the end of the prompt does not serve that. The model computes the prompt in pieces that end at these
    places, so the last bits are those of such pieces.

    Args:
        model: in evaluation mode.
        prompt: of which at least the last token is left to be computed.
        cache: of its first `held` tokens. Mutated: it is of as many as are returned.
        store: where the places are put.
        namespace: see `KVStore.put`.
        chunk: compute at most so many tokens at a time.
        scores: what watches the passes; the log-probabilities that are put with the places.

    Returns:
        How many tokens the cache has now.
    """
    every, last = store.config.state_every, len(prompt) - 1
    ends = [*range((held // every + 1) * every, last, every)] if every else []
    for end in [*ends, last] if held < last else []:
        ids = torch.tensor([prompt[held:end]])
        with observed(store.gate, model, held, end - held):
            advance(model, cache, held, ids, torch.arange(held, end)[None], chunk=chunk)
        store.put(prompt[:end], cache, namespace=namespace, logprobs=None if scores is None else scores.logprobs(end))
        held = end
    return held


def needs_places(layout: KVLayout, tokens: int | None) -> bool:
    """Return whether a prompt is to be computed in pieces, for prefixes of its cache could not be used.

    Not where every window holds all of the tokens that there will be; nor where keys depend on how many tokens a pass
    sees: the first pieces would have those of short sequences.

    Args:
        layout: of the cache.
        tokens: of the prompt and its answer at most; None: not known.
    """
    if not layout.is_grouped or regime_of(layout) == LONG:
        return False
    windows = [layer.window for layer in layout.layers if layer.window]
    return bool(layout.states) or tokens is None or tokens > min(windows, default=0)
