"""Caches whose last layers are decoded while the model runs through the first: when that pays, and if one is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.config import MIB
from kvstore.core.lazy_layers import LazyLayers
from kvstore.core.results import Hit
from kvstore.errors import KVStoreError
from kvstore.integrations.transformers.around import is_compiled
from kvstore.integrations.transformers.cache import cache_layers
from kvstore.integrations.transformers.feeding import advance
from kvstore.integrations.transformers.request import RequestStore
from kvstore.read.layerwise import free_processors
from kvstore.store import KVStore

# Less than this is decoded before a model has begun.
LEAST_BYTES = 8 * MIB


def pays(model: Any, store: KVStore, tokens: int) -> bool:
    """Return whether the layers of so many tokens had better come one after the other.

    They had where threads can decode while the model computes: on the CPU, if torch leaves a processor to them
    (docs/lazy.md).
    """
    layout = store.identity.layout
    return (
        free_processors() > 0
        and model.device.type == "cpu"
        and not layout.is_grouped
        and tokens * layout.bytes_per_token >= LEAST_BYTES
        and not is_compiled(model)  # a layer that waits would break its graphs
    )


@dataclass(frozen=True)
class Repair:
    """Computes what a lost layer's record held, in the middle of the pass that met it.

    The layers before keep what was stored; from the lost one on they get the cache that a get without it and the model
    give. Tokens that were reused and are computed now are taken off the request's report.

    Attributes:
        model, store, namespace: of the get.
        prompt: tokens of the hit.
        layers: of the hit; mutated.
    """

    model: Any
    store: KVStore
    namespace: str | bytes
    prompt: list[int]
    layers: LazyLayers

    @classmethod
    def watch(cls, model: Any, store: KVStore, namespace: str | bytes, prompt: list[int], hit: Hit) -> None:
        """Let the layers of a hit be repaired, if they are still to come."""
        layers: object = hit.layers
        if isinstance(layers, LazyLayers):
            layers.repair = cls(model, store, namespace, prompt[: hit.tokens], layers)

    def __call__(self, number: int) -> bool:
        """Fill layer `number` and all behind it."""
        given: object = self.store
        request = given.request if isinstance(given, RequestStore) else None
        store = self.store if request is None else request.store
        try:
            hit = store.get(self.prompt, namespace=self.namespace, device=self.model.device)
        except KVStoreError:
            hit = None
        held, count = (0 if hit is None else hit.tokens), len(self.prompt)
        cache = DynamicCache(config=self.model.config) if hit is None else hit.cache()
        if held < count:
            ids, positions = torch.tensor([self.prompt[held:]]), torch.arange(held, count)[None]
            advance(self.model, cache, held, ids, positions)
        with torch.no_grad():
            for pair, own in zip(cache_layers(cache)[number:], self.layers.tensors[number:], strict=True):
                for tensor, target in zip(pair, own, strict=True):
                    target.copy_(tensor)
        if request is not None:
            request.lost(count - held)
        return True
