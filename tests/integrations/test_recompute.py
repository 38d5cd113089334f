"""Recomputing positions of a cache gives what the model itself would have put there, and touches nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny
from transformers import DynamicCache, StaticCache

from kvstore.approximate.plan import Candidate, plan
from kvstore.core.approximate import Approximate, Estimates, ReusedSpan
from kvstore.core.layout import KVLayout
from kvstore.core.rope import angles_of
from kvstore.errors import LayoutMismatch, UnsupportedCache, UnsupportedModel
from kvstore.integrations.transformers.cache import GrowingLayer, cache_from_layers
from kvstore.integrations.transformers.recompute import check_model, recompute

ESTIMATES = Estimates(0.4, 45.0, 1.45, 0.0012, 0.19)
TOKENS = 41
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def _ids(count: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _prefill(model: Any, ids: torch.Tensor) -> Layers:
    cache = model(ids[None], use_cache=True).past_key_values
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def _copy(layers: Layers) -> Layers:
    return [(k.clone(), v.clone()) for k, v in layers]


def _spoilt(layers: Layers, rows: slice | list[int], value: float | None = None) -> Layers:
    """The same with noise, or `value`, in some rows."""
    spoilt, generator = _copy(layers), torch.Generator().manual_seed(7)
    for pair in spoilt:
        for x in pair:
            part = x[:, :, rows]
            x[:, :, rows] = torch.randn(part.shape, generator=generator).to(x) if value is None else value
    return spoilt


def _of(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _close(found: Layers, want: Layers, atol: float = 2e-5) -> bool:
    pairs = zip(found, want, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=atol) for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("begin", [1, 17, TOKENS - 1])
def test_all_positions_from_one_on_give_a_plain_prefill(model: Any, attention: str, begin: int) -> None:
    model.set_attn_implementation(attention)
    ids = _ids()
    exact = _prefill(model, ids)
    wrong = _spoilt(exact, slice(begin, None))
    assert not _close(wrong, exact)
    cache, deviation, logits = recompute(model, wrong, ids, range(begin, TOKENS))
    assert _close(_of(cache), exact)
    assert deviation.positions.tolist() == list(range(begin, TOKENS))
    with torch.no_grad():
        assert torch.allclose(logits, model(ids[None]).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_in_bfloat16_it_is_a_prefill_but_for_rounding() -> None:
    model, ids = tiny("llama").to(torch.bfloat16), _ids()
    exact = _prefill(model, ids)
    cache, deviation, _ = recompute(model, _copy(exact), ids, range(9, TOKENS))
    assert _close(_of(cache), exact, atol=0.02)
    assert deviation.errors.max() < 1e-3


def test_rows_that_hold_nothing_are_not_read(model: Any) -> None:
    ids = _ids()
    exact = _prefill(model, ids)
    cache, _, _ = recompute(model, _spoilt(exact, slice(20, None), float("nan")), ids, range(20, TOKENS))
    assert _close(_of(cache), exact)


def test_a_position_becomes_what_the_rows_before_it_make_of_its_token(model: Any) -> None:
    ids, at = _ids(), 23
    wrong = _spoilt(_prefill(model, ids), slice(10, 31))
    before = cache_from_layers([(k[:, :, :at], v[:, :, :at]) for k, v in _copy(wrong)])
    with torch.no_grad():
        model(ids[None, at : at + 1], past_key_values=before, use_cache=True)
    cache, _, logits = recompute(model, _copy(wrong), ids, [at])
    assert logits is None
    assert _close([(k[:, :, : at + 1], v[:, :, : at + 1]) for k, v in _of(cache)], _of(before))


def test_together_or_one_after_the_other_is_the_same(model: Any) -> None:
    ids, positions = _ids(), [33, 12, 13, 25]
    wrong = _spoilt(_prefill(model, ids), slice(10, None))
    together = _of(recompute(model, _copy(wrong), ids, positions).cache)
    single: Any = _copy(wrong)
    for position in sorted(positions):
        single = _of(recompute(model, single, ids, [position]).cache)
    assert _close(together, single)
    assert not _close(together, wrong)


def test_rows_that_were_not_asked_for_stay_bit_for_bit(model: Any) -> None:
    ids, positions = _ids(), [12, 13, 25]
    wrong = _spoilt(_prefill(model, ids), slice(10, None))
    mended = _copy(wrong)
    recompute(model, mended, ids, positions)
    others = [x for x in range(TOKENS) if x not in positions]
    for a, b in zip(mended, wrong, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x[:, :, others], y[:, :, others])
            assert not torch.equal(x[:, :, positions], y[:, :, positions])  # the caller's tensors are written into


@pytest.mark.parametrize("positions", [[], [20, 21, 22]])
@pytest.mark.parametrize("new", [1, 6])
def test_tokens_behind_the_cache_are_computed_in_the_same_pass(model: Any, positions: list[int], new: int) -> None:
    ids = _ids(TOKENS + new)
    exact = _prefill(model, ids)
    held = _spoilt([(k[:, :, :TOKENS], v[:, :, :TOKENS]) for k, v in exact], positions)
    cache, deviation, logits = recompute(model, held, ids, positions)
    assert _close(_of(cache), exact)
    assert len(deviation.positions) == len(deviation.errors) == len(positions)
    with torch.no_grad():
        assert torch.allclose(logits, model(ids[None]).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_new_tokens_go_into_the_room_of_a_hit(llama: Any) -> None:
    ids = _ids(TOKENS + 2)
    large = _prefill(llama, ids)
    cache = cache_from_layers([(k[:, :, :TOKENS], v[:, :, :TOKENS]) for k, v in large], large)
    found = recompute(llama, cache, ids, [5, 30]).cache
    assert found is cache
    assert all(type(layer) is GrowingLayer for layer in found.layers)
    assert found.get_seq_length() == TOKENS + 2
    assert [x.data_ptr() for x, _ in _of(found)] == [x.data_ptr() for x, _ in large]


def test_the_model_goes_on_from_there(model: Any) -> None:
    ids = _ids()
    wrong = _spoilt(_prefill(model, ids), slice(10, 30))
    held = [(k[:, :, : TOKENS - 1], v[:, :, : TOKENS - 1]) for k, v in wrong]
    cache = recompute(model, held, ids[: TOKENS - 1], [10, 11]).cache
    plain = DynamicCache([(k.clone(), v.clone()) for k, v in _of(cache)])
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7, "attention_mask": torch.ones(1, TOKENS)}
    found = model.generate(ids[None], past_key_values=cache, **arguments)
    assert torch.equal(found, model.generate(ids[None], past_key_values=plain, **arguments))
    assert found.shape[1] == TOKENS + 7


def test_the_deviation_is_how_far_the_cache_was(llama: Any) -> None:
    ids = _ids()
    exact = _prefill(llama, ids)
    assert recompute(llama, _copy(exact), ids, [12, 30]).deviation.errors.max() < 1e-8
    wrong = _copy(exact)
    for _, v in wrong:
        v[:, :, 30] *= 1.1
    errors = recompute(llama, wrong, ids, [12, 30]).deviation.errors
    assert errors[0] < 1e-8
    assert errors[1] == pytest.approx(0.01, rel=0.05)


def test_what_is_found_at_a_seam_sharpens_the_estimate(llama: Any) -> None:
    ids = _ids()
    exact = _prefill(llama, ids)
    span = ReusedSpan(start=10, count=31, run=0, shift=3, donor=1, donor_start=0, error=0.05, kl=0.01)
    good = recompute(llama, _copy(exact), ids, [10, 11], [span], ESTIMATES).deviation.kl
    bad = recompute(llama, _spoilt(exact, slice(10, None)), ids, [10, 11], [span], ESTIMATES).deviation.kl
    assert good is not None
    assert bad is not None
    assert 0 <= good < bad
    assert recompute(llama, _copy(exact), ids, [10, 11]).deviation.kl is None
    unmended = recompute(llama, _copy(exact), ids, [], [span], ESTIMATES).deviation.kl
    assert unmended == pytest.approx(ESTIMATES.floor + span.kl)


def _rotated(keys: torch.Tensor, layout: KVLayout, shift: int) -> torch.Tensor:
    cos, sin = (torch.from_numpy(x.astype(np.float32) / 16384) for x in angles_of(layout, shift))
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_document_behind_another_prompt_is_mended_where_the_plan_says(name: str) -> None:
    """From the donor's rows to the next token's logits, and that every part of it is needed."""
    model, head, other, document = tiny(name), _ids(9, 2), _ids(5, 3), _ids(150, 4)
    head[:2] = other[:2]
    ids = torch.cat([head, document])
    layout, there, exact = check_model(model), _prefill(model, torch.cat([other, document])), _prefill(model, ids)
    found = plan(Approximate(max_kl=10), 2, len(ids), [Candidate(9, 150, 0, 4, 1, 5)], ESTIMATES)
    assert found is not None
    assert found.tokens == len(ids)

    def assembled(shift: int) -> Layers:
        layers = []
        for k, v in there:
            missing = torch.full((1, 2, 7, k.shape[-1]), float("nan"))
            keys = torch.cat([k[:, :, :2], missing, _rotated(k[:, :, 5:], layout, shift)], dim=2)
            layers.append((keys, torch.cat([v[:, :, :2], missing, v[:, :, 5:]], dim=2)))
        return layers

    def loss(layers: Layers) -> float:
        return sum(
            float((a - b).square().sum()) for x, y in zip(layers, exact, strict=True) for a, b in zip(x, y, strict=True)
        )

    # What a token is in the first layer does not depend on its context: only the keys' positions do.
    assert torch.allclose(assembled(4)[0][0][:, :, 9:], exact[0][0][:, :, 9:], atol=2e-3)
    assert not torch.allclose(assembled(0)[0][0][:, :, 9:], exact[0][0][:, :, 9:], atol=2e-2)
    mended = loss(_of(recompute(model, assembled(4), ids, found.recompute, found.spans).cache))
    only_missing = loss(_of(recompute(model, assembled(4), ids, range(2, 9)).cache))
    not_rotated = loss(_of(recompute(model, assembled(0), ids, found.recompute).cache))
    assert mended < only_missing < not_rotated


def test_what_was_mended_is_marked_and_what_only_grew_is_not(llama: Any) -> None:
    ids = _ids(TOKENS + 1)
    held = [(k[:, :, :TOKENS], v[:, :, :TOKENS]) for k, v in _prefill(llama, ids)]
    assert recompute(llama, _copy(held), ids, [3]).cache.is_approximate
    assert not getattr(recompute(llama, _copy(held), ids, []).cache, "is_approximate", False)


def test_tensors_made_in_inference_mode_are_written_into(llama: Any) -> None:
    ids = _ids()
    with torch.inference_mode():
        made = [(k.clone(), v.clone()) for k, v in _prefill(llama, ids)]
    cache = recompute(llama, made, ids, [12]).cache
    assert cache.layers[0].keys.is_inference()
    found = recompute(llama, _copy(_prefill(llama, ids)), ids, [12]).cache
    assert not found.layers[0].keys.is_inference()


def test_models_whose_tokens_cannot_be_computed_alone_are_refused(llama: Any) -> None:
    with pytest.raises(UnsupportedModel, match="layers with windows"):
        check_model(tiny("gemma3"))
    llama.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="flash_attention_2"):
        check_model(llama)

    class Without:
        config, dtype, training = tiny("llama").config, torch.float32, False

        def forward(self, input_ids: Any) -> None: ...

    with pytest.raises(UnsupportedModel, match="position_ids"):
        check_model(Without())
    with pytest.raises(ValueError, match="training"):
        check_model(tiny("llama").train())


@pytest.mark.parametrize("positions", [[-1], [TOKENS], [3, TOKENS + 5]])
def test_positions_outside_of_the_cache_are_refused(llama: Any, positions: list[int]) -> None:
    with pytest.raises(ValueError, match="positions"):
        recompute(llama, _prefill(llama, _ids()), _ids(), positions)


def test_fewer_tokens_than_the_cache_holds_are_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match="tokens"):
        recompute(llama, _prefill(llama, _ids()), _ids()[:-1], [1])


def test_caches_that_are_not_this_models_are_refused_and_not_written(llama: Any) -> None:
    ids = _ids()
    exact = _prefill(llama, ids)
    for wrong in (exact[:-1], [(k[:, :1], v[:, :1]) for k, v in exact], [(k.double(), v.double()) for k, v in exact]):
        before = _copy(list(wrong))
        with pytest.raises(LayoutMismatch):
            recompute(llama, wrong, ids, [3])
        assert all(torch.equal(a, b) for x, y in zip(wrong, before, strict=True) for a, b in zip(x, y, strict=True))
    static = StaticCache(config=llama.config, max_cache_len=64)
    with torch.no_grad():
        llama(ids[None], past_key_values=static, use_cache=True)
    with pytest.raises(UnsupportedCache, match="StaticLayer"):
        recompute(llama, static, ids, [3])
