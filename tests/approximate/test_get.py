"""`get(approximate=...)` on a tiny model: what is given, what is said of it, and that it never counts as exact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny
from transformers import SmolLM3Config

from kvstore import Approximate, Hit, KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.approximate.estimates import to_arrays
from kvstore.approximate.probes import FLOOR
from kvstore.codecs import KVView
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.codecs.profile import Profile
from kvstore.config import MIB
from kvstore.core.approximate import Estimates
from kvstore.core.rope import can_move
from kvstore.errors import UnsupportedCache
from kvstore.integrations.transformers import generate, layout_from_config
from kvstore.integrations.transformers.recompute import recompute

MODEL = tiny("llama").to(torch.bfloat16)
ANY = Approximate(max_kl=1.0)
NO_TIER = TierConfig(0)
IDENTITY = ModelIdentity.from_transformers(MODEL)
ESTIMATES = Estimates(0.4, 45.0, 1.45, 0.0012, 0.19)


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 199, (count,), generator=torch.Generator().manual_seed(seed))


DOCUMENT = ids(400, 0)
STORED = torch.cat([ids(12, 1), DOCUMENT])
PROMPT = torch.cat([ids(9, 2), DOCUMENT, ids(3, 3)])


@torch.no_grad()
def cache_of(tokens: torch.Tensor) -> Any:
    return MODEL(tokens[None], use_cache=True).past_key_values


def profile_of(folder: Path, sections: Any) -> Path:
    path = folder.with_name(folder.name + ".kvprofile")
    Profile.new(IDENTITY, sections).save(path)
    return path


def opened(path: Path, estimates: Estimates | None = ESTIMATES, **settings: Any) -> KVStore:
    if estimates is not None:
        settings["profile"] = profile_of(path, {"approximate": to_arrays(estimates)})
    config = StoreConfig(host=NO_TIER, disk=TierConfig(16 * MIB, "entropy"), segment_bytes=MIB, **settings)
    return KVStore(path, IDENTITY, config)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with opened(tmp_path) as made:
        made.put(STORED, cache_of(STORED))
        made.flush()
        yield made


def asked(store: KVStore, tokens: torch.Tensor = PROMPT, **options: Any) -> Hit:
    hit = store.get(tokens, approximate=ANY, **options)
    assert hit is not None
    return hit


def test_tokens_behind_another_beginning_are_given_and_marked(store: KVStore) -> None:
    assert store.get(PROMPT) is None
    hit = asked(store)
    assert hit.approximate
    assert hit.exact_tokens == 0
    assert hit.tokens > 300
    assert hit.tiers["donors"] == sum(span.count for span in hit.spans) > 300
    assert all(0 <= position < hit.tokens for position in hit.recompute)
    covered = {p for span in hit.spans for p in range(span.start, span.end)}
    assert set(range(hit.tokens)) - covered <= set(hit.recompute)
    assert 0 < hit.kl <= ANY.max_kl


def test_keys_are_those_of_the_new_positions(store: KVStore) -> None:
    hit = asked(store)
    exact = cache_of(PROMPT[: hit.tokens])
    span = hit.spans[-1]
    rows = slice(span.start, span.end)
    # The first layer depends on the token and its position alone.
    assert torch.allclose(hit.layers[0][0][0, :, rows], exact.layers[0].keys[0, :, rows], atol=0.05)
    assert torch.equal(hit.layers[0][1][0, :, rows], exact.layers[0].values[0, :, rows])
    plain = cache_of(STORED).layers[0].keys[0, :, rows]
    assert not torch.allclose(plain, exact.layers[0].keys[0, :, rows], atol=0.05)


def test_what_is_recomputed_comes_nearer(store: KVStore) -> None:
    with torch.inference_mode():
        hit = asked(store)
        before = [v.clone() for _, v in hit.layers]
        found = recompute(MODEL, hit.cache(), PROMPT, hit.recompute, hit.spans)
    exact = cache_of(PROMPT)
    rows = list(hit.recompute)
    errors = [
        [float((v[0, :, rows].float() - layer.values[0, :, rows].float()).square().sum()) for layer, v in pairs]
        for pairs in (
            zip(exact.layers, before, strict=True),
            [(layer, own.values) for layer, own in zip(exact.layers, found.cache.layers, strict=True)],
        )
    ]
    assert sum(errors[1]) < 0.1 * sum(errors[0])
    assert found.cache.get_seq_length() == len(PROMPT)


def test_an_exact_prefix_stays_exact(store: KVStore) -> None:
    tokens = torch.cat([STORED[:200], ids(70, 5), DOCUMENT[210:400]])
    hit = asked(store, tokens)
    assert hit.exact_tokens == 200
    assert hit.spans
    exact = cache_of(STORED)
    for (k, v), layer in zip(hit.layers, exact.layers, strict=True):
        assert torch.equal(k[0, :, :200], layer.keys[0, :, :200])
        assert torch.equal(v[0, :, :200], layer.values[0, :, :200])


def test_a_full_hit_and_a_prompt_without_donors_are_as_ever(store: KVStore) -> None:
    hit = asked(store, STORED)
    assert not hit.approximate
    assert hit.exact_tokens == hit.tokens == len(STORED)
    assert hit.spans == hit.recompute == ()
    assert store.get(ids(300, 9), approximate=ANY) is None
    assert store.get(PROMPT, approximate=Approximate(max_kl=1e-6)) is None


def test_it_is_never_stored(store: KVStore) -> None:
    hit = asked(store)
    for cache in (hit.cache(), hit.layers, recompute(MODEL, hit.cache(), PROMPT, hit.recompute).cache):
        with pytest.raises(UnsupportedCache, match="approximate"):
            store.put(PROMPT[: hit.tokens], cache)
    assert store.contains(PROMPT) == 0


def test_generate_goes_on_from_it_and_stores_nothing(store: KVStore) -> None:
    output = generate(MODEL, PROMPT[None], store=store, approximate=ANY, max_new_tokens=4, do_sample=False)
    assert output.shape == (1, len(PROMPT) + 4)
    assert store.stats()["counters"]["get_approximate"] == 1
    assert store.contains(PROMPT) == 0
    hit, report = asked(store), store.last_request
    assert report is not None
    assert (report.reused_tokens, report.new_tokens) == (hit.tokens - len(hit.recompute), 0)
    plain = generate(MODEL, PROMPT[None], store=store, max_new_tokens=4, do_sample=False)
    assert store.contains(PROMPT) == len(PROMPT)
    assert output[0, len(PROMPT)] == plain[0, len(PROMPT)]


def test_another_namespace_has_no_donors_and_other_requests_are_refused(store: KVStore) -> None:
    assert store.get(PROMPT, namespace=b"other", approximate=ANY) is None
    with pytest.raises(ValueError, match="approximate"):
        store.get(PROMPT, approximate=0.1)  # type: ignore[arg-type]


def test_without_donors_there_is_nothing_to_find(tmp_path: Path) -> None:
    with opened(tmp_path, donors=False) as store:
        store.put(STORED, cache_of(STORED))
        assert store.get(PROMPT, approximate=ANY) is None


def test_after_a_restart_and_by_a_reader(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(STORED, cache_of(STORED))
        store.flush()
        hits = [asked(store)]
    with opened(tmp_path) as store:
        hits.append(asked(store))
    with KVStore(tmp_path, store.identity, store.config, read_only=True) as reader:
        hits.append(asked(reader))
    first, *others = [[tensor for pair in hit.layers for tensor in pair] for hit in hits]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_models_that_rotate_keys_otherwise_get_nothing() -> None:
    assert can_move(ModelIdentity.from_transformers(MODEL).layout)
    other = SmolLM3Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=32)
    assert not can_move(layout_from_config(other, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_rotated_as_far_as_they_are_told(dtype: torch.dtype) -> None:
    layout = KVLayout.uniform(
        1, 2, 8, str(dtype).removeprefix("torch."), '{"rope_theta": 100.0, "rope_type": "default"}'
    )
    pairs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = pairs.clone()
    rotate_keys(KVView.of_layers(layout, [(keys, pairs.clone())]), 5)
    rotated = torch.view_as_complex(torch.stack([pairs[..., :4].double(), pairs[..., 4:].double()], -1).contiguous())
    rotated = rotated * torch.exp(1j * 5 * 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4))
    assert torch.allclose(
        keys.double(), torch.cat([rotated.real, rotated.imag], -1), atol=2e-2 if dtype != torch.float32 else 1e-3
    )


def test_without_estimates_nothing_is_given_and_that_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path, estimates=None) as store:
        store.put(STORED, cache_of(STORED))
        store.flush()
        assert store.get(PROMPT, approximate=ANY) is None
        assert store.stats()["counters"]["approximate_unknown"] == 1


def test_a_section_that_is_malformed_is_none_and_counted(tmp_path: Path) -> None:
    damaged = profile_of(tmp_path, {"approximate": {"kl": np.array([1, -1], np.float32)}})
    with opened(tmp_path, estimates=None, profile=damaged) as store:
        store.put(STORED, cache_of(STORED))
        store.flush()
        assert store.get(PROMPT, approximate=ANY) is None
        assert store.get(PROMPT, approximate=ANY) is None
        counters = store.stats()["counters"]
        assert (counters["approximate_unknown"], counters["damaged_profiles"]) == (2, 1)


def test_without_estimates_a_few_rows_are_probed_and_decide(tmp_path: Path) -> None:
    with opened(tmp_path, estimates=None) as store:
        store.put(STORED, cache_of(STORED))
        store.flush()
        hit = store.get(PROMPT, approximate=Approximate(max_kl=1.0, probe=True))
        assert hit is not None
        assert hit.estimates is None
        assert math.isinf(hit.kl)
        reused = hit.tokens - len(hit.recompute)
        assert reused > 0.9 * (hit.tokens - hit.spans[0].start)
        good = recompute(MODEL, hit.cache(), PROMPT, hit.recompute, hit.spans).deviation.kl
        assert good is not None
        assert FLOOR <= good < 1
        spoilt = hit.cache()
        for layer in spoilt.layers:
            layer.values.neg_()
        bad = recompute(MODEL, spoilt, PROMPT, hit.recompute, hit.spans).deviation.kl
        assert bad is not None
        assert bad > 100 * FLOOR
        assert math.isinf(recompute(MODEL, hit.cache(), PROMPT, [], hit.spans).deviation.kl or 0)
        generate(MODEL, PROMPT[None], store=store, approximate=ANY, max_new_tokens=2, do_sample=False)
        assert store.stats()["counters"].get("approximate_refused", 0) == 0


def test_generate_refuses_what_turns_out_worse_than_was_asked_for(tmp_path: Path) -> None:
    """The estimates say that nothing is lost; the recomputed rows show otherwise."""
    hopeful = Estimates(0.1, 45.0, 1.45, 1e-9, 1.0)
    with opened(tmp_path, hopeful) as store:
        wrong = cache_of(torch.cat([ids(12, 1).flip(0), DOCUMENT]))
        for layer in wrong.layers:
            layer.values.mul_(-3)
        store.put(STORED, wrong)
        store.flush()
        strict = Approximate(max_kl=1.01 * asked(store).kl)
        assert asked(store).recompute[-1] > 9  # rows of donors among them
        output = generate(MODEL, PROMPT[None], store=store, approximate=strict, max_new_tokens=3, do_sample=False)
        assert store.stats()["counters"]["approximate_refused"] == 1
        report = store.last_request
        assert report is not None
        assert (report.reused_tokens, report.tiers) == (0, {})
        plain = MODEL.generate(PROMPT[None], max_new_tokens=3, do_sample=False)
        assert torch.equal(output, plain)
