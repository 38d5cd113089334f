"""The cache that appends in place holds, after any sequence of operations, what a DynamicCache holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvstore.core.layout import KVLayout
from kvstore.integrations.transformers.cache import GrowingLayer, cache_from_layers

LAYOUT = KVLayout.uniform(2, 2, 4)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 90)),
        st.tuples(st.just("crop"), st.integers(0, 12)),
        st.tuples(st.just("put"), st.just(0)),
        st.tuples(st.just("copy"), st.just(0)),
        st.tuples(st.just("reorder"), st.just(0)),
        st.tuples(st.just("repeat"), st.just(2)),
    ),
    max_size=12,
)


def states(tokens: int, seed: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, tokens, 4, generator=generator).bfloat16()


def restored(tokens: int, room: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """The same two layers as a growing and as a dynamic cache, and the tensors that the first was made of."""
    large = [(states(tokens + room, 2 * i), states(tokens + room, 2 * i + 1)) for i in range(2)]
    layers = tuple((k[:, :, :tokens], v[:, :, :tokens]) for k, v in large)
    plain = DynamicCache([(k.clone(), v.clone()) for k, v in layers])
    return cache_from_layers(layers, tuple(large)), plain, [t for pair in layers for t in pair]


def apply(cache: Any, name: str, amount: int, seed: int) -> Any:
    if name == "append":
        for number, layer in enumerate(cache.layers):
            batch = layer.keys.shape[0] if layer.keys is not None else 1
            cache.update(states(amount, seed + number, batch), states(amount, seed + number + 50, batch), number)
    elif name == "crop" and cache.get_seq_length() > amount:
        cache.crop(-amount)
    elif name == "copy":
        return copy.deepcopy(cache)
    elif name == "reorder" and cache.get_seq_length():
        cache.reorder_cache(torch.zeros(cache.layers[0].keys.shape[0], dtype=torch.long))
    elif name == "repeat" and cache.get_seq_length() and cache.layers[0].keys.shape[0] == 1:
        cache.batch_repeat_interleave(amount)
    return cache


def held(cache: Any) -> list[torch.Tensor]:
    return [t for layer in cache.layers if layer.get_seq_length() for t in (layer.keys, layer.values)]


@settings(max_examples=part(150), deadline=None)
@given(st.integers(1, 40), st.sampled_from([0, 1, 64]), operations, st.booleans())
def test_it_holds_what_a_dynamic_cache_holds(tokens: int, room: int, steps: Any, inference: bool) -> None:
    growing, plain, source = restored(tokens, room)
    before = [t.clone() for t in source]
    put: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.inference_mode() if inference else torch.no_grad():
        for seed, (name, amount) in enumerate(steps):
            if name == "put":  # what a store refers to from here on
                put += [(t, t.clone()) for t in held(growing)]
            growing, plain = (apply(cache, name, amount, 100 * seed) for cache in (growing, plain))
            assert growing.get_seq_length() == plain.get_seq_length()
            assert len(held(growing)) == len(held(plain))
            for mine, theirs in zip(held(growing), held(plain), strict=True):
                assert torch.equal(mine, theirs)
    assert all(torch.equal(t, want) for t, want in zip(source, before, strict=True))
    assert all(torch.equal(t, want) for t, want in put)


@torch.no_grad()
def test_it_appends_without_copying_while_there_is_room() -> None:
    growing, _, source = restored(10, 64)
    for tokens in (1, 60, 3):
        growing.update(states(tokens, 1), states(tokens, 2), 0)
        assert growing.layers[0].keys.data_ptr() == source[0].data_ptr()
    growing.update(states(1, 1), states(1, 2), 0)
    assert growing.layers[0].keys.data_ptr() != source[0].data_ptr()
    moved = growing.layers[0].keys.data_ptr()
    for _ in range(64):
        growing.update(states(1, 1), states(1, 2), 0)
    assert growing.layers[0].keys.data_ptr() == moved


def test_tensors_made_in_inference_mode_can_be_grown_outside_of_it() -> None:
    with torch.inference_mode():
        growing, plain, _ = restored(10, 64)
    with torch.no_grad():
        for cache in (growing, plain):
            cache.update(states(3, 1), states(3, 2), 0)
            cache.update(states(3, 3), states(3, 4), 0)
    assert torch.equal(growing.layers[0].keys, plain.layers[0].keys)


@pytest.mark.parametrize("tracked", ["states", "queries", "held"])
def test_gradients_flow_as_through_a_dynamic_layer(tracked: str) -> None:
    growing, plain, _ = restored(10, 64)
    found = []
    for cache in (growing, plain):
        layer = cache.layers[0]
        new, queries = states(3, 1), torch.ones(4, dtype=torch.bfloat16)
        wanted = new if tracked == "states" else queries if tracked == "queries" else layer.keys
        wanted = wanted.detach().clone().requires_grad_()
        if tracked == "states":
            new = wanted
        elif tracked == "queries":
            queries = wanted
        else:
            layer.keys = wanted
        total = torch.zeros(())
        for _ in range(2):
            keys, values = cache.update(new, new, 0)
            total = total + ((keys * queries).float() ** 2).sum() + values.float().sum()
        total.backward()
        found.append(wanted.grad)
    assert torch.equal(*found)


@torch.no_grad()
def test_a_reset_forgets_and_leaves_what_others_refer_to() -> None:
    growing, _, source = restored(10, 64)
    before = [t.clone() for t in source]
    growing.update(states(3, 1), states(3, 2), 0)
    held = growing.layers[0].keys
    copied = held.clone()
    growing.reset()
    assert growing.get_seq_length() == 0
    growing.update(states(5, 3), states(5, 4), 0)
    assert torch.equal(growing.layers[0].keys, states(5, 3))
    assert torch.equal(held, copied)
    assert all(torch.equal(t, want) for t, want in zip(source, before, strict=True))


@torch.no_grad()
def test_a_shallow_copy_and_its_original_do_not_write_over_each_other() -> None:
    for room in (0, 64):
        growing, _, _ = restored(10, room)
        layer = growing.layers[0]
        layer.update(states(1, 1), states(1, 2))
        other = copy.copy(layer)
        layer.update(states(2, 3), states(2, 4))
        other.update(states(2, 5), states(2, 6))
        assert torch.equal(layer.keys[..., 11:, :], states(2, 3))
        assert torch.equal(other.keys[..., 11:, :], states(2, 5))


@torch.no_grad()
def test_states_of_another_dtype_are_not_rounded() -> None:
    growing, plain, _ = restored(10, 64)
    for cache in (growing, plain):
        cache.update(states(3, 1).float() + 0.0001, states(3, 2).float() + 0.0001, 0)
    assert growing.layers[0].keys.dtype == torch.float32
    assert torch.equal(growing.layers[0].keys, plain.layers[0].keys)


@pytest.mark.parametrize("kind", [DynamicLayer, GrowingLayer])
def test_put_refers_to_layers_that_never_write_again_what_they_wrote(kind: type) -> None:
    class Writing(DynamicLayer):
        """Another class may do anything."""

    cache = DynamicCache()
    for number in range(2):
        layer = kind()
        layer.update(states(5, number), states(5, number + 9))
        cache.layers.append(layer)
    # Where the class inherits a reset that writes zeros, its tensors are copied.
    assert LAYOUT.layers_of(cache, 5)[1] is ("reset" not in vars(kind))
    cache.layers[0] = Writing()
    cache.layers[0].update(states(5, 0), states(5, 9))
    assert LAYOUT.layers_of(cache, 5)[1] is True
