"""Gradients of a model's loss by its cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump
from kvstore.calibration.lossy.quality import NEAR, as_cached, log_probabilities

Tensor = torch.Tensor


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Its weights need no gradients meanwhile."""
    wanted = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for p, want in zip(model.parameters(), wanted, strict=True):
            p.requires_grad_(want)


def leaves_of(model: Any, dump: KVDump, window: int) -> list[Tensor]:
    """The cache of the first half of a window, K and V of each layer [1, heads, n, dim], to be differentiated by."""
    layers = range(len(dump.layout.layers))
    bits = [torch.from_numpy(x[: dump.length // 2].astype(np.int64)) for i in layers for x in dump.coded(i, window)]
    return [x.to(model.device).requires_grad_() for x in as_cached(bits, dump.layout)]


def gradients_of(
    model: Any, ids: Tensor, leaves: list[Tensor], generator: torch.Generator, draws: int
) -> Iterator[Sequence[Tensor]]:
    """Gradients of the loss of `ids` after a cache, with targets drawn from the model's own predictions: their squares
    are the curvature of the divergence. The first 64 tokens count as much as all."""
    scores = log_probabilities(model, ids, leaves)
    weight = torch.ones(len(scores), device=scores.device)
    weight[:NEAR] = math.sqrt(1 + len(scores) / NEAR)  # of gradients, whose squares are what is looked at
    beyond = scores.detach().exp().cumsum(-1)
    for left in range(draws, 0, -1):
        # By hand, for torch.multinomial draws a number for every token of the vocabulary.
        at = torch.rand(len(scores), 1, generator=generator).to(beyond.device) * beyond[:, -1:]
        drawn = torch.searchsorted(beyond, at).clamp(max=beyond.shape[1] - 1)
        loss = -(scores.gather(1, drawn)[:, 0] * weight).sum()
        yield torch.autograd.grad(loss, leaves, retain_graph=left > 1)
