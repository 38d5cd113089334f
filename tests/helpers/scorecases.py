"""Log-probabilities of a model's tokens, and those that a store is given with a put."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY

from kvstore import KVStore


def some_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def logprobs_of(model: Any, ids: torch.Tensor) -> np.ndarray:
    """Of all tokens but the first, from one pass over everything."""
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    found: np.ndarray = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return found


def handed_to(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any]]:
    """The tokens and log-probabilities of every put from now on."""
    given: list[tuple[list[int], Any]] = []
    put = store._put

    def record(tokens: Any, kv: Any, digest: bytes, logprobs: Any, *rest: Any, **more: Any) -> Any:
        given.append((np.asarray(tokens).reshape(-1).tolist(), logprobs))
        return put(tokens, kv, digest, logprobs, *rest, **more)

    monkeypatch.setattr(store, "_put", record)
    return given
