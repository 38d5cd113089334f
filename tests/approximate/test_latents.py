"""`get(approximate=...)` on a model with latents: latents as they were stored, rotated keys where they are now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from movable_models import model_of, prefilled, tokens_of

from kvstore import Approximate, Hit, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.approximate.estimates import to_arrays
from kvstore.codecs.profile import Profile
from kvstore.config import MIB
from kvstore.core.approximate import Estimates
from kvstore.integrations.transformers import generate
from kvstore.integrations.transformers.recompute import recompute

MODEL = model_of("deepseek_v3").to(torch.bfloat16)
IDENTITY = ModelIdentity.from_transformers(MODEL)
ESTIMATES = Estimates(0.4, 45.0, 1.45, 0.0012, 0.19)
ANY = Approximate(max_kl=1.0)
PASSAGES = tokens_of(200, 0), tokens_of(150, 1)
STORED = [torch.cat([tokens_of(12, 2), PASSAGES[0]]), torch.cat([tokens_of(40, 3), PASSAGES[1]])]
PROMPT = torch.cat([tokens_of(9, 7), *PASSAGES, tokens_of(3, 5)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    """With two prompts, of which each has a passage of `PROMPT`."""
    profile = tmp_path.with_name(tmp_path.name + ".kvprofile")
    Profile.new(IDENTITY, {"approximate": to_arrays(ESTIMATES)}).save(profile)
    disk = TierConfig(16 * MIB, "entropy")
    config = StoreConfig(host=TierConfig(0), disk=disk, segment_bytes=MIB, block_tokens=32, profile=profile)
    with KVStore(tmp_path, IDENTITY, config) as made:
        for tokens in STORED:
            made.put(tokens, prefilled(MODEL, tokens))
        made.flush()
        yield made


def asked(store: KVStore) -> Hit:
    hit = store.get(PROMPT[:-1], approximate=ANY)
    assert hit is not None
    return hit


def test_two_prompts_give_their_passages_and_each_is_moved_by_its_own_distance(store: KVStore) -> None:
    hit = asked(store)
    assert hit.approximate
    assert {span.shift for span in hit.spans} == {9 - 12, 9 + 200 - 40}
    assert sum(span.count for span in hit.spans) > 280
    latents, keys = prefilled(MODEL, PROMPT[: hit.tokens])[0]  # in this layer both follow from token and position alone
    for span in hit.spans:
        rows = slice(span.start, span.end)
        assert torch.equal(hit.layers[0][0][:, :, rows], latents[:, :, rows])
        found = hit.layers[0][1][:, :, rows].float()
        assert (found - keys[:, :, rows].float()).abs().max() < 2**-6 * keys.abs().max()
        there = STORED[span.shift > 0]
        before = prefilled(MODEL, there)[0][1][:, :, span.start - span.shift : span.end - span.shift].float()
        assert (before - keys[:, :, rows].float()).abs().max() > 0.1 * keys.abs().max()


def test_recomputing_every_row_gives_the_cache_of_a_prefill(store: KVStore) -> None:
    hit = asked(store)
    found = recompute(MODEL, hit.cache(), PROMPT, range(hit.tokens), hit.spans, hit.estimates)
    assert errors_of(found.cache, prefilled(MODEL, PROMPT)) < 1e-3
    assert len(found.deviation.errors) == hit.tokens
    assert found.deviation.kl is not None


def test_what_is_recomputed_comes_nearer_to_a_prefill(store: KVStore) -> None:
    exact = prefilled(MODEL, PROMPT[:-1])
    worst, planned = asked(store), asked(store)
    missing = [x for x in worst.recompute if not any(span.start <= x < span.end for span in worst.spans)]
    tokens = PROMPT[: worst.tokens]
    exact = [(k[:, :, : worst.tokens], v[:, :, : worst.tokens]) for k, v in exact]
    least = errors_of(recompute(MODEL, worst.cache(), tokens, missing).cache, exact)
    mended = errors_of(recompute(MODEL, planned.cache(), tokens, planned.recompute).cache, exact)
    assert 0 < mended < least


def test_generate_goes_on_from_it(store: KVStore) -> None:
    output = generate(MODEL, PROMPT[None], store=store, approximate=ANY, max_new_tokens=3, do_sample=False)
    assert output.shape == (1, len(PROMPT) + 3)
    counters = store.stats()["counters"]
    assert counters["get_approximate"] == 1
    assert counters.get("approximate_refused", 0) == 0
    assert store.contains(PROMPT) == 0


def test_no_block_is_coded_against_one_at_another_position(store: KVStore) -> None:
    """The donor codec rotates K, and here the rotated key is V."""
    moved = torch.cat([tokens_of(20, 6), PASSAGES[0]])
    exact = prefilled(MODEL, moved)
    store.put(moved, exact)
    store.flush()
    assert store.stats()["counters"].get("member_records", 0) == 0
    hit = store.get(moved)
    assert hit is not None
    pairs = zip(hit.layers, exact, strict=True)
    assert all(torch.equal(a, b) for found, want in pairs for a, b in zip(found, want, strict=True))


def errors_of(cache: Any, exact: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """|difference|^2 / |value|^2 of all rows, the mean of latents and rotated keys of all layers."""
    found = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    want = [x for pair in exact for x in pair]
    pairs = [(a.float(), b.float()) for a, b in zip(found, want, strict=True)]
    return float(torch.stack([(a - b).square().sum() / b.square().sum() for a, b in pairs]).mean())
