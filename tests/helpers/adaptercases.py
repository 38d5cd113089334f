"""What adapters may change of a model: its keys for a prompt, and then its identity."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCABULARY

from kvstore import ModelIdentity, StoreConfig, TierConfig
from kvstore.config import MIB

CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(16 * MIB, "raw"), segment_bytes=MIB, block_tokens=16
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
PROMPT = torch.randint(1, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))


def weights(model: Any) -> str:
    return ModelIdentity.from_transformers(model).weights


def keys(model: Any) -> torch.Tensor:
    """The keys of the last layer for the prompt: what must not change without the identity."""
    with torch.no_grad():
        found: torch.Tensor = model(PROMPT, use_cache=True).past_key_values.layers[-1].keys
    return found
