"""The benchmark of batches: what stands in for a store."""

from __future__ import annotations

import torch
from benchmodules import load
from tiny_models import tiny

from kvstore import ModelIdentity
from kvstore.integrations.transformers import cache_layers, generate


def test_a_split_without_a_store_goes_through_generate() -> None:
    batch, model = load("batch"), tiny("llama")
    identity = ModelIdentity.from_transformers(model)
    ids = torch.stack([torch.arange(1, 41), torch.arange(2, 42)])
    with torch.inference_mode():
        head = cache_layers(model(ids[:1, :24], use_cache=True).past_key_values)
    memory = batch.Memory(identity, {tuple(ids[0, :24].tolist()): head})
    mask = torch.ones_like(ids)
    out = generate(model, ids, store=memory, attention_mask=mask, max_new_tokens=3)
    assert torch.equal(out, model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False))
