"""Places inside of a prompt from which a model with states can go on: its states, stored every so many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore.integrations.transformers.feeding import advance
from kvstore.integrations.transformers.observed import observed

if TYPE_CHECKING:
    from kvstore.store import KVStore


def store_places(
    model: Any, prompt: list[int], cache: Any, held: int, store: KVStore, namespace: str | bytes, chunk: int | None
) -> int:
    """Compute a prompt up to the last multiple of `StoreConfig.state_every` in it, and put the cache at each of them.

    Only of models with states, and only if that setting is above 0; else nothing is done. The model computes the
    prompt in pieces that end at these places, so the last bits are those of such pieces.

    Args:
        model: in evaluation mode.
        prompt: of which at least the last token is left to be computed.
        cache: of its first `held` tokens. Mutated: it is of as many as are returned.
        store: where the places are put.
        namespace: see `KVStore.put`.
        chunk: compute at most so many tokens at a time.

    Returns:
        How many tokens the cache has now.
    """
    every = store.config.state_every
    if not (every and store.identity.layout.states):
        return held
    for end in range((held // every + 1) * every, len(prompt), every):
        ids = torch.tensor([prompt[held:end]])
        with observed(store.gate, model, held, end - held):
            advance(model, cache, held, ids, torch.arange(held, end)[None], chunk=chunk)
        store.put(prompt[:end], cache, namespace=namespace)
        held = end
    return held
