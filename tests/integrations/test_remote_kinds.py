"""Conversations that go on at a machine that has nothing, by way of a remote tier, whatever the model's layers keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_models import build, tiny_config
from remotestores import settings
from tiny_models import VOCABULARY, tiny_of_kind
from transformers import Gemma3nTextConfig

from kvstore import Hit, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.integrations.transformers import generate

MIB = 1 << 20
BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
WHOLE_BLOCKS = ("deepseek-v3",)  # layers that keep all tokens: tails are not written
KINDS = ("mistral", "gemma3", "llama4", "gemma3n", "deepseek-v3", "qwen3-next", "mamba2", "falcon-h1")


def _model(name: str) -> Any:
    return build(tiny_config(Gemma3nTextConfig)) if name == "gemma3n" else tiny_of_kind(name)


def _tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(4, min(VOCABULARY, 60), (1, count), generator=torch.Generator().manual_seed(seed))


def _got(store: KVStore, tokens: Any) -> Hit:
    hit = store.get(tokens)
    assert hit is not None
    return hit


def _tensors(hit: Hit) -> list[torch.Tensor]:
    states = [x for state in hit.states for x in (state.conv, state.recurrent) if x is not None]
    return [x for pair in hit.layers for x in pair] + states


@pytest.mark.parametrize("name", KINDS)
def test_each_turn_on_a_machine_that_has_nothing_equals_turns_on_one(tmp_path: Path, name: str) -> None:
    """The first prompt is shorter than the window (24 tokens), the others longer."""
    model = _model(name)
    identity = ModelIdentity.from_transformers(model)
    remote = settings(f"folder://{tmp_path}/shared")
    config = StoreConfig(
        host=TierConfig(16 * MIB, "raw"),
        disk=TierConfig(64 * MIB, "entropy"),
        segment_bytes=4 * MIB,
        block_tokens=BLOCK,
    )
    shared = replace(config, remote=remote)
    ids, known = _tokens(7, 1), 0
    with KVStore(tmp_path / "one", identity, config) as one:
        for turn in range(3):
            with KVStore(tmp_path / f"machine-{turn}", identity, shared) as new:
                at = known // BLOCK * BLOCK if name in WHOLE_BLOCKS else known
                if at:
                    there, here = _got(new, ids[0].tolist()), _got(one, ids[0].tolist())
                    assert (there.tokens, there.tiers, here.tokens) == (at, {"remote": at}, known)
                    both = zip(_tensors(there), _tensors(here), strict=True)
                    assert name in WHOLE_BLOCKS or all(torch.equal(a, b) for a, b in both)
                want = generate(model, ids, store=one, **GREEDY).sequences
                assert torch.equal(generate(model, ids, store=new, **GREEDY).sequences, want)
                assert new.flush(remote=True).remote_due == 0
                assert new.check(deep=True).problems == ()
            known = want.shape[1] - 1
            ids = torch.cat([want, _tokens(13, seed=turn + 2)], 1)
