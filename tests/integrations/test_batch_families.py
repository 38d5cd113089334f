"""Padding moves no token of any causal model that a batch is taken of, and the models that it would move are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import causal_models
import pytest
import torch
import transformers
from causal_models import looked_at, quiet
from causal_sizes import TEXT
from length import FULL

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import generate

SPREAD = ("Bloom", "GPT2", "GPTNeoX", "Mpt", "OPT", "Qwen2", "RoFormer", "StableLm")
MOVED = {"CpmAntConfig", "RoFormerConfig", "TrOCRConfig"}
CLASSES = causal_models.config_classes() if FULL else [getattr(transformers, f"{name}Config") for name in SPREAD]
MEMORY = StoreConfig(host=TierConfig(16 << 20, "raw"), disk=TierConfig(0), block_tokens=16)
STEPS: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": 4,
    "min_new_tokens": 4,
    "pad_token_id": 0,
    "suppress_tokens": [0],
    "use_cache": True,
}
HELD = 8


pytestmark = pytest.mark.usefixtures("one_thread")


def _goes_on(model: Any) -> ModelIdentity:
    """Generates from the cache of a single row."""
    row = torch.arange(5, 5 + HELD + 1)[None]
    with quiet(), torch.no_grad():
        cache = model(row[:, :HELD], use_cache=True).past_key_values
        model.generate(row, past_key_values=cache, attention_mask=torch.ones_like(row), **STEPS)
    return ModelIdentity.from_transformers(model)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_padded_row_has_the_cache_of_its_tokens(kind: Any, tmp_path: Path) -> None:
    found = looked_at(kind, SPREAD, _goes_on)
    if found is None:
        assert kind.__name__.removesuffix("Config") not in SPREAD
        return
    model, identity = found
    chance = torch.Generator().manual_seed(7)
    rows = [torch.randint(4, TEXT, (n,), generator=chance) for n in (21, 13, 5)]
    ids, mask = torch.zeros(3, 21, dtype=torch.int64), torch.zeros(3, 21, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, 21 - len(row) :], mask[number, 21 - len(row) :] = row, 1
    with KVStore(tmp_path / "store", identity, MEMORY) as store, quiet():
        generate(model, rows[1][None, : HELD + 1], store=store, **STEPS | {"max_new_tokens": 1, "min_new_tokens": 1})
        if kind.__name__ in MOVED:
            with pytest.raises(UnsupportedModel, match="takes no position_ids"):
                generate(model, ids, store=store, attention_mask=mask, **STEPS)
            return
        out = generate(model, ids, store=store, attention_mask=mask, **STEPS)
        for number, row in enumerate(rows):
            tokens = out[number, 21 - len(row) :]
            alone = model.generate(
                tokens[None, :-1], attention_mask=torch.ones(1, len(tokens) - 1), return_dict_in_generate=True, **STEPS
            )
            hit = store.get(tokens.tolist())
            assert hit is not None
            assert hit.tokens == len(tokens) - 1
            for pair, layer in zip(hit.layers, alone.past_key_values.layers, strict=True):
                for tensor, other in zip(pair, (layer.keys, layer.values), strict=True):
                    other = other[:, :, : hit.tokens]
                    assert float((tensor - other).abs().max() / other.abs().max()) < 1e-3
