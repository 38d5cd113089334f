"""What models call their cache: the package knows the names, and uses the one that a model wants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_of_kind
from transformers import DynamicCache

from kvstore import KVStore, ModelIdentity, StoreConfig
from kvstore.core.cache_argument import NAMES, cache_name, cache_of, given_cache, pass_arguments
from kvstore.integrations.transformers import generate

FORWARDS: dict[str, Any] = {
    "cache": lambda input_ids, cache=None: None,
    "past_key_values": lambda input_ids, past_key_values=None: None,
    "cache_params": lambda input_ids, cache_params=None, logits_to_keep=0: None,
}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_found(name: str) -> None:
    cache, model = DynamicCache(), SimpleNamespace(forward=FORWARDS[name])
    assert cache_name(model) == name
    last = {"logits_to_keep": 1} if name == "cache_params" else {}
    assert pass_arguments(model, cache) == {name: cache, "use_cache": True} | last
    assert given_cache({"input_ids": 1, name: cache}) is cache
    assert cache_of(SimpleNamespace(**{name: cache})) is cache


def test_a_call_without_a_cache_has_none() -> None:
    assert given_cache({"input_ids": 1, "past_key_values": None}) is None
    assert cache_of(SimpleNamespace(logits=1)) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["llama4", "mamba2"])
def test_models_are_given_their_cache_under_the_name_that_they_want(tmp_path: Path, name: str) -> None:
    """A model that goes by another name warns of it, and warnings are errors here."""
    model, ids = tiny_of_kind(name), torch.arange(1, 9)[None]
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), StoreConfig(block_tokens=4)) as store:
        for _ in range(2):
            ids = generate(model, ids, store=store, session="s", do_sample=False, max_new_tokens=9)
        assert store.stats()["counters"]["get_hits"] == 1
