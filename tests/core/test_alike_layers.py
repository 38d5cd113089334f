"""Layers that are all alike: the same as the views that torch makes of them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcases import SMALL, random_kv, same_kv
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from kvstore.codecs import KVView
from kvstore.core.alike_layers import AlikeLayers
from kvstore.core.tensors import Alike

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def alike(pairs: Any) -> AlikeLayers | None:
    k, v = pairs[0]
    return AlikeLayers.of(pairs, Alike(k), Alike(v))


def transposed(kv: Pairs) -> Pairs:
    return [(k.transpose(0, 1).contiguous().transpose(0, 1), v) for k, v in kv]


SHAPES: dict[str, Callable[[Pairs], Pairs]] = {
    "plain": lambda kv: kv,
    "with a batch of one": lambda kv: [(k[None], v[None]) for k, v in kv],
    "tokens before heads": transposed,
    "parts of longer ones": lambda kv: [(k[:, 2:4], v[:, 1:3]) for k, v in kv],
    "with gradients": lambda kv: [(k.float().requires_grad_(), v.float()) for k, v in kv],
    "all the same": lambda kv: [kv[0]] * 3,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_they_have_the_values_and_the_rows_of_plain_views(shape: str) -> None:
    pairs = SHAPES[shape](random_kv(5))
    layers = alike(pairs)
    assert layers is not None
    plain = [(k.detach()[0], v.detach()[0]) if k.ndim == 4 else (k.detach(), v.detach()) for k, v in pairs]
    assert same_kv(layers, plain)
    assert same_kv(layers[1:], plain[1:])
    assert not any(tensor.requires_grad for pair in layers for tensor in pair)
    assert layers.tokens == plain[0][0].shape[1]
    for (keys, values), (k, v) in zip(layers, plain, strict=True):
        assert (keys.data_ptr(), keys.stride()) == (k.data_ptr(), k.stride())
        assert (values.data_ptr(), values.stride()) == (v.data_ptr(), v.stride())
    if plain[0][0].dtype is torch.bfloat16:
        assert (KVView.of_layers(SMALL, layers).rows == KVView.of_layers(SMALL, plain).rows).all()


def swapped(kv: Pairs) -> Pairs:
    kv[2] = kv[2][0], torch.randn(5, 2, 16).bfloat16().transpose(0, 1)
    return kv


def with_values(make: Callable[[torch.Tensor], Any]) -> Callable[[Pairs], Any]:
    """The last values are something else."""
    return lambda kv: [*kv[:2], (kv[2][0], make(kv[2][1]))]


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


OTHERS: dict[str, Callable[[Pairs], Any]] = {
    "other strides": swapped,
    "another shape": with_values(lambda v: v[:, :4]),
    "another dtype": with_values(lambda v: v.view(torch.float16)),
    "another offset": with_values(lambda v: torch.cat([v[:1], v])[1:]),
    "a negation that is only marked": with_values(torch._neg_view),
    "no memory": with_values(shrunk),
    "the meta device": with_values(lambda v: v.to("meta")),
    "a fake tensor": with_values(fake),
    "a kind of its own": with_values(lambda v: v.as_subclass(type("Mine", (torch.Tensor,), {}))),
    "sparse": with_values(lambda v: v.to_sparse()),
    "an array": with_values(lambda v: v.float().numpy()),
    "nothing": with_values(lambda v: None),
    "no pair": lambda kv: [*kv[:2], kv[2][0]],
    "triples": lambda kv: [(k, v, v) for k, v in kv[1:]] and [kv[0], (*kv[1], kv[1][0])],
    "rows that are not whole": lambda kv: [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in kv],
    "all on the meta device": lambda kv: [(k.to("meta"), v.to("meta")) for k, v in kv],
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_alike_is_looked_at_one_by_one(other: str) -> None:
    assert alike(OTHERS[other](random_kv(5))) is None


def test_complex_numbers_that_are_only_marked_as_conjugated_are_not_alike() -> None:
    k = torch.ones(1, 2, 4, dtype=torch.complex64)
    assert alike([(k, k), (k, k)]) is not None
    assert alike([(k, k), (k, k.conj())]) is None


def test_they_keep_what_they_were_given() -> None:
    kv = [(k.clone(), v.clone()) for k, v in random_kv(5)]
    layers = alike(kv)
    assert layers is not None
    for k, v in kv:
        k.data = torch.zeros(1)
        v.set_()
    assert same_kv(layers, random_kv(5))


def test_they_are_found_inside_of_inference() -> None:
    with torch.inference_mode():
        layers = alike(random_kv(5))
        assert layers is not None
        assert same_kv(layers, random_kv(5))


def test_a_usual_cache_is_alike_and_others_are_not() -> None:
    kv = [(k[None], v[None]) for k, v in random_kv(5)]
    layers, _ = SMALL.layers_of(DynamicCache(list(kv)), 5)
    assert isinstance(layers, AlikeLayers)
    kv[2] = kv[2][0], torch._neg_view(kv[2][1])
    layers, _ = SMALL.layers_of(kv, 5)
    assert not isinstance(layers, AlikeLayers)
    assert same_kv(layers, [(k[0], v[0].resolve_neg()) for k, v in kv])
