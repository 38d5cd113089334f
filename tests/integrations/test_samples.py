"""A few elements of each tensor, read where they lie: the same ones that torch reads, and nothing beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.integrations.transformers.samples import Samples, is_plain
from kvstore.integrations.transformers.watch import Look

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64]


def plainly(tensor: torch.Tensor) -> bytes:
    """The same elements by torch, one by one."""
    count = tensor.numel()
    few = min(4, count) if tensor.is_contiguous() else min(1, count)
    flat = tensor.as_strided((count,), (1,)) if tensor.is_contiguous() else tensor.as_strided((few,), (1,))
    step = max(1, (count - 1) // max(1, few - 1))
    return b"".join(flat[i * step : i * step + 1].view(torch.uint8).numpy().tobytes() for i in range(few))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (4,), (7, 5), (64, 64)], ids=str)
def test_they_are_what_torch_reads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(7)
    values = torch.randint(0, 100, shape, generator=made).to(dtype)
    tensors = [values, torch.nn.Parameter(values, requires_grad=False), values.flatten()[1:], values.expand(2, *shape)]
    assert all(is_plain(tensor) == (tensor.data_ptr() != 0) for tensor in tensors)
    [near] = Samples(tensors).read(tensors)
    assert near.numpy().tobytes() == b"".join(map(plainly, tensors))


def test_what_has_no_memory_of_its_own_is_not_read_as_if_it_had() -> None:
    resized = torch.zeros(64)
    resized.untyped_storage().resize_(16)
    for tensor in (
        resized,
        torch.zeros(4, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch._neg_view(torch.ones(1)),
    ):
        assert not is_plain(tensor)


def transposed(weight: Any) -> None:
    weight.data = weight.data.t()


def copied(weight: Any) -> None:
    weight.data = weight.data.clone()


def scaled(weight: Any) -> None:
    weight.data.mul_(2)


@pytest.mark.parametrize("change", [transposed, copied, scaled])
def test_a_look_with_the_one_before_sees_what_one_without_sees(change: Any) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    before = Look.at(model)
    same = Look.at(model, before)
    assert before.is_like(same)
    assert same.where is before.where
    change(model.model.layers[0].self_attn.q_proj.weight)
    later = Look.at(model, same)
    assert not same.is_like(later)
    assert later.is_like(Look.at(model))
