"""Fits the profile's section "speculative": how what a predictor misses in one layer goes on in the next.

The same regression as of the section "donor", whose arrays it has: what a cache differs in from the predictor's, keys
before the rotary embedding, is predicted from what differs in the layer before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from kvstore.calibration.donor.propagated import Arrays, Difference, fit_differences
from kvstore.calibration.targets import unrotated
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.core.layout import KVLayout

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


def fit(layout: KVLayout, pairs: Iterable[tuple[Layers, Layers]]) -> Arrays:
    """Return the arrays of the section.

    Args:
        layout: of the caches.
        pairs: what a predictor predicts of a sequence from its first token on, and its cache; each K and V of every
            layer, `[heads, tokens, dim]`. Some thousand tokens in all; more improve little.
    """

    def differences() -> Iterator[Difference]:
        for predicted, cache in pairs:
            yield partial(_difference, layout, predicted, cache)

    return fit_differences(layout, differences())


def _difference(layout: KVLayout, predicted: Layers, cache: Layers, layer: int, which: int) -> torch.Tensor:
    found = (cache[layer][which].float() - predicted[layer][which].float()).transpose(0, 1).flatten(1)
    if which or not rotates(layout):
        return found
    return torch.from_numpy(unrotated(found.numpy(), layout, layout.layers[layer].key_dim))
