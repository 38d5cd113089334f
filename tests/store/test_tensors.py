"""Finding 3: tensors that are not what lies in their memory, and tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_stores
import torch

from kvstore import KVStore
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.errors import LayoutMismatch

TOKENS = small_stores.tokens_of(1, 10)
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config()) as opened:
        yield opened


def _resized(tensor: torch.Tensor, size: int = 0) -> torch.Tensor:
    """Of a copy, for the storage is the copy's alone."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(size)
    return tensor


class _Fake(torch.Tensor):
    """What a FakeTensor is, without seconds of imports: it says that it is on the CPU, and has a storage on meta."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.device("cpu")
        return torch.Tensor._make_subclass(cls, tensor.to("meta"), dispatch_device=True, device_for_backend_keys=there)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return torch.device("cpu")
        raise NotImplementedError(f"{function}: nothing can be computed with a _Fake")


def _resized_part(tensor: torch.Tensor) -> torch.Tensor:
    """A part behind the beginning: its address is not 0, although the storage has none."""
    whole = torch.cat([tensor, tensor])
    part = whole[len(tensor) :]
    whole.untyped_storage().resize_(0)
    return part


WITHOUT_MEMORY: list[Any] = [
    pytest.param(lambda t: t.to("meta"), "meta device", id="meta"),
    pytest.param(_Fake.of, "_Fake holds no values", id="fake"),
    pytest.param(_resized, "resized to 0 bytes", id="resized-to-0"),
    pytest.param(_resized_part, "resized to 0 bytes", id="part-of-resized"),
    pytest.param(lambda t: _resized(t, 8), "resized to 8 bytes", id="resized-to-less"),
    pytest.param(lambda t: t.to_sparse(), "sparse_coo Tensor", id="sparse"),
    pytest.param(torch._to_functional_tensor, "with memory of its own", id="functional"),
]


def test_negative_tensors_are_stored_as_their_values_are(store: KVStore) -> None:
    kv = small_stores.kv_of(TOKENS)
    assert all(torch._neg_view(k).is_neg() for k, _ in kv)
    store.put(TOKENS, [(torch._neg_view(k), torch._neg_view(v)) for k, v in kv])
    hit = store.get(TOKENS)
    assert hit is not None
    for got, given in zip(hit.layers, kv, strict=True):
        assert all(torch.equal(a[0], -b) for a, b in zip(got, given, strict=True))


@pytest.mark.parametrize("codec", ["raw", "splitzip", "entropy", "zstd"])
def test_the_imaginary_part_of_a_conjugate_is_coded_as_its_values_are(codec: str) -> None:
    """Such tensors arise without anybody asking for them: torch marks the sign of `x.conj().imag`."""
    layout = small_stores.LAYOUT
    k, v = small_stores.kv_of(TOKENS)[0]
    lazy = torch.complex(v.float(), k.float()).conj().imag
    assert lazy.is_neg()
    info = BlockInfo(layout, TOKENS, 0)
    payloads = []
    for one in (torch._neg_view(k), -k):
        out = memoryview(bytearray(codec_by_name(codec).bound(info)))
        sizes = codec_by_name(codec).encode(info, KVView.of_layers(layout, [(one, v), (k, v)]), out)
        assert sizes is not None
        payloads.append(bytes(out[: sum(sizes)]))
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize(("change", "found"), WITHOUT_MEMORY)
def test_kv_without_memory_is_refused_and_nothing_is_stored(store: KVStore, change: Change, found: str) -> None:
    (k, v), second = small_stores.kv_of(TOKENS)
    kv = [(k, v), (second[0], change(second[1]))]
    with pytest.raises(LayoutMismatch, match=f"V of layer 1: .*{found}"):
        store.put(TOKENS, kv)
    with pytest.raises(LayoutMismatch, match=f"V of layer 1: .*{found}"):
        store.session("s").save(TOKENS, kv)
    assert (store.contains(TOKENS), store.sessions(), store.stats()["index"]["records"]) == (0, [], 0)


@pytest.mark.parametrize(("change", "found"), WITHOUT_MEMORY)
def test_codecs_refuse_tensors_without_memory(change: Change, found: str) -> None:
    kv = small_stores.kv_of(TOKENS)
    with pytest.raises(LayoutMismatch, match=f"K of layer 1: .*{found}"):
        KVView.of_layers(small_stores.LAYOUT, [kv[0], (change(kv[1][0]), kv[1][1])])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("number", [0, 1])
def test_a_nested_tensor_is_refused(store: KVStore, number: int) -> None:
    kv = small_stores.kv_of(TOKENS)
    k, v = kv[number]
    kv[number] = (torch.nested.nested_tensor([k, k[:, :5]]), v)
    with pytest.raises(LayoutMismatch, match=rf"K of layer {number}: .*dense"):
        store.put(TOKENS, kv)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    "change", [_strided, lambda t: -torch._neg_view(t), lambda t: torch.cat([t, t], 1)[:, len(TOKENS) :]]
)
def test_a_layer_that_lies_otherwise_than_the_one_before_is_stored_as_it_is(
    store: KVStore, change: Change, batch: bool
) -> None:
    kv = small_stores.kv_of(TOKENS)
    given = [kv[0], (change(kv[1][0]), change(kv[1][1]))]
    store.put(TOKENS, [(k[None], v[None]) for k, v in given] if batch else given)
    hit = store.get(TOKENS)
    assert hit is not None
    assert small_stores.is_exact(hit, TOKENS)


@pytest.mark.parametrize("which", [0, 1])
def test_only_the_last_layer_is_negative(store: KVStore, which: int) -> None:
    kv = small_stores.kv_of(TOKENS)
    last = list(kv[1])
    last[which] = torch._neg_view(last[which])
    store.put(TOKENS, [kv[0], (last[0], last[1])])
    hit = store.get(TOKENS)
    assert hit is not None
    assert torch.equal(hit.layers[1][which][0].view(torch.int16), (-kv[1][which]).view(torch.int16))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t.half(), "dtype"),
        (lambda t: t[:, 1:], "tokens"),
        (lambda t: t[..., 1:], "dim"),
        (lambda t: t.numpy, "dim"),
    ],
)
def test_a_second_layer_that_does_not_fit_is_refused(store: KVStore, change: Any, found: str) -> None:
    kv = small_stores.kv_of(TOKENS)
    with pytest.raises(LayoutMismatch, match=f"V of layer 1: .*{found}"):
        store.put(TOKENS, [kv[0], (kv[1][0], change(kv[1][1]))])


@pytest.mark.parametrize(("change", "found"), WITHOUT_MEMORY)
def test_tokens_and_log_probabilities_without_memory_are_refused(store: KVStore, change: Change, found: str) -> None:
    tokens, kv = change(torch.from_numpy(TOKENS.astype(np.int64))), small_stores.kv_of(TOKENS)
    calls = (
        lambda: store.put(tokens, kv),
        lambda: store.get(tokens),
        lambda: store.contains(tokens),
        lambda: store.prefetch(tokens),
        lambda: store.delete(tokens),
        lambda: store.session("s").save(tokens, kv),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"^tokens: .*{found}"):
            call()
    with pytest.raises(ValueError, match=f"^logprobs: .*{found}"):
        store.put(TOKENS, kv, logprobs=change(torch.full((len(TOKENS),), -1.0)))
    assert store.contains(TOKENS) == 0


def test_negative_tokens_and_log_probabilities_are_their_values(store: KVStore) -> None:
    marked = torch._neg_view(torch.from_numpy(-TOKENS.astype(np.int64)))
    store.put(marked, small_stores.kv_of(TOKENS), logprobs=torch._neg_view(torch.full((len(TOKENS),), 1.0)))
    assert store.contains(TOKENS) == len(TOKENS)
