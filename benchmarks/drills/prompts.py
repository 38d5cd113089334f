"""Prompts whose caches follow from their tokens, so that any process can say whether what a store returns is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore import KVLayout, ModelIdentity

LAYOUT = KVLayout.uniform(num_layers=2, heads=1, head_dim=8)
IDENTITY = ModelIdentity("drill", "1", "00", "", LAYOUT)
_PER_TOKEN = 2 * 2 * 8  # numbers: layers, keys and values, dimensions
_ODD = np.uint64(0x9E3779B97F4A7C15)

Ids = npt.NDArray[np.uint32]


def prompt(number: int, count: int) -> Ids:
    """`count` tokens; prompts of different numbers differ in the first."""
    tokens = np.random.default_rng(number).integers(0, 1 << 32, count, dtype=np.uint64)
    tokens[0] = number
    return tokens.astype(np.uint32)


def cache_of(tokens: Ids) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The cache of a prompt: per layer (K, V), `[1, tokens, 8]` in bfloat16. Each row follows from all tokens up to
    its own, as in a causal model."""
    with np.errstate(over="ignore"):
        weights = np.arange(1, len(tokens) + 1, dtype=np.uint64) * _ODD | np.uint64(1)
        states = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * weights, dtype=np.uint64)
        mixed = (states[:, None] ^ np.arange(_PER_TOKEN, dtype=np.uint64) << np.uint64(40)) * _ODD
        mixed ^= mixed >> np.uint64(29)
        mixed *= _ODD
    values = torch.from_numpy((mixed >> np.uint64(48)).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    parts = values.reshape(len(tokens), 2, 2, 8)
    return [(parts[:, i, 0][None].contiguous(), parts[:, i, 1][None].contiguous()) for i in range(2)]


def is_right(layers: Any, tokens: Ids) -> bool:
    """Whether tensors `[1, 1, n, 8]` of a hit hold exactly the bits of the first n of the tokens."""
    count = layers[0][0].shape[2]
    return all(
        torch.equal(found[0].view(torch.int16), want.view(torch.int16))
        for pair, wanted in zip(layers, cache_of(tokens[:count]), strict=True)
        for found, want in zip(pair, wanted, strict=True)
    )
