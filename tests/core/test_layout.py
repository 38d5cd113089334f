"""Layouts: canonical text, sizes, and what `layers_of` accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcases import SMALL, random_kv, same_kv
from transformers import DynamicCache

from kvstore import KVLayout, LayerLayout
from kvstore.errors import ConfigError, LayoutMismatch

SIZES = [st.integers(1, 65536)] * 3
layer_layouts = st.one_of(
    st.builds(LayerLayout, *SIZES),
    st.builds(LayerLayout, *SIZES, st.sampled_from(["sliding", "chunked"]), st.integers(2, 1 << 30)),
)
layouts = st.builds(
    KVLayout,
    st.lists(layer_layouts, min_size=1, max_size=5).map(tuple),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.text(max_size=20),
)


@given(layouts)
def test_the_canonical_text_gives_back_the_layout(layout: KVLayout) -> None:
    assert KVLayout.from_canonical(layout.canonical()) == layout


@given(layouts, layouts)
def test_two_layouts_have_the_same_canonical_text_only_if_equal(one: KVLayout, other: KVLayout) -> None:
    assert (one.canonical() == other.canonical()) == (one == other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "7",
        '{"dtype": "bfloat16", "layers": [], "rope": "none"}',
        '{"dtype": "bfloat16", "layers": [[1, 2]], "rope": "none"}',
        '{"dtype": "bfloat16", "layers": [[1, 2, 3, 4]], "rope": "none"}',
        '{"dtype": "bfloat16", "layers": [[1, 2, 0]], "rope": "none"}',
        '{"dtype": "bfloat16", "layers": [[1, 2, 1.5]], "rope": "none"}',
        '{"dtype": "bfloat16", "layers": 5, "rope": "none"}',
        '{"dtype": "int8", "layers": [[1, 2, 3]], "rope": "none"}',
        '{"dtype": "bfloat16", "layers": [[1, 2, 3]], "rope": null}',
        '{"dtype": "bfloat16", "layers": [[1, 2, 3]]}',
        '{"dtype": "bfloat16", "layers": [[1, 2, 3]], "rope": "none", "more": 1}',
        '{"layers": [[1, 2, 3]], "dtype": "bfloat16", "rope": "none"}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_anything_else_is_not_a_canonical_layout(text: str) -> None:
    with pytest.raises(ConfigError):
        KVLayout.from_canonical(text)


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        (KVLayout.uniform(30, 3, 64), 30 * 3 * 128 * 2),
        (KVLayout.uniform(1, 1, 1, "float32"), 8),
        (KVLayout((LayerLayout(2, 3, 5), LayerLayout(1, 7, 11)), "float16"), (2 * 8 + 18) * 2),
    ],
)
def test_bytes_per_token_counts_all_layers_keys_and_values(layout: KVLayout, nbytes: int) -> None:
    assert layout.bytes_per_token == nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerLayout(0, 1, 1),
        lambda: LayerLayout(1, 65537, 1),
        lambda: LayerLayout(1, 1, True),
        lambda: LayerLayout(1, 1, 1.0),
        lambda: KVLayout((), "bfloat16"),
        lambda: KVLayout((LayerLayout(1, 1, 1),) * 1025, "bfloat16"),
        lambda: KVLayout([LayerLayout(1, 1, 1)], "bfloat16"),
        lambda: KVLayout(((1, 1, 1),), "bfloat16"),
        lambda: KVLayout.uniform(1, 1, 1, "float64"),
        lambda: KVLayout.uniform(1, 1, 1, "bfloat16", None),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# ---- layers_of ---------------------------------------------------------------------------------------------------


def test_pairs_with_and_without_a_batch_dimension_give_the_same_views() -> None:
    kv = random_kv(5)
    plain, mutable = SMALL.layers_of(kv, 5)
    batched, _ = SMALL.layers_of([(k[None], v[None]) for k, v in kv], 5)
    assert mutable
    assert same_kv(plain, kv)
    assert same_kv(batched, kv)
    assert batched[0][0].data_ptr() == kv[0][0].data_ptr()


def test_a_dynamic_cache_is_not_mutable_and_not_copied() -> None:
    kv = [(k[None], v[None]) for k, v in random_kv(5)]
    cache = DynamicCache(list(kv))
    layers, mutable = SMALL.layers_of(cache, 5)
    assert not mutable
    assert layers[2][1].data_ptr() == cache.layers[2].values.data_ptr()


def test_a_cache_of_unknown_layers_is_mutable() -> None:
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v) for k, v in random_kv(5)])
    layers, mutable = SMALL.layers_of(cache, 5)
    assert mutable
    assert same_kv(layers, random_kv(5))


def test_views_carry_no_gradient() -> None:
    layout = KVLayout.uniform(1, 1, 4, "float32")
    k = torch.ones(1, 3, 4, requires_grad=True)
    ((view, _),), _ = layout.layers_of([(k, k * 2)], 3)
    assert not view.requires_grad


@pytest.mark.parametrize("batch", [(), (1,)], ids=["bare", "batch"])
def test_every_layer_is_a_view_of_its_own_without_gradients(batch: tuple[int, ...]) -> None:
    kv = [(torch.ones(*batch, 2, 5, 4, requires_grad=True), torch.ones(*batch, 2, 5, 4)) for _ in range(3)]
    layers, _ = KVLayout.uniform(3, 2, 4, dtype="float32").layers_of(kv, 5)
    for (keys, values), (k, v) in zip(layers, kv, strict=True):
        assert not keys.requires_grad
        assert (keys.data_ptr(), values.data_ptr()) == (k.data_ptr(), v.data_ptr())
        v.data = torch.zeros(1)  # the caller puts something else into its own tensor
        assert values.shape == (2, 5, 4)


def wrong_cases() -> dict[str, Any]:
    kv = random_kv(5)
    return {
        "one layer fewer": kv[:2],
        "one layer more": [*kv, kv[0]],
        "no layers": [],
        "other heads": [(k[:1], v) for k, v in kv],
        "other dim": [(k, v[..., :8]) for k, v in kv],
        "fewer tokens": [(k[:, :4], v[:, :4]) for k, v in kv],
        "a value of other tokens": [*kv[:2], (kv[2][0], kv[2][1][:, :4])],
        "other dtype": [(k.float(), v.float()) for k, v in kv],
        "same width, other dtype": [(k.view(torch.float16), v.view(torch.float16)) for k, v in kv],
        "a batch of two": [(torch.stack([k, k]), torch.stack([v, v])) for k, v in kv],
        "two dimensions": [(k[0], v[0]) for k, v in kv],
        "triples": [(k, v, v) for k, v in kv],
        "single tensors": [k[0] for k, v in kv],
        "numpy arrays": [(k.float().numpy(), v.float().numpy()) for k, v in kv],
        "None": None,
        "a number": 5,
        "pairs of None": [(None, None)] * 3,
        "an empty cache": DynamicCache(),
        "tensors without memory": [(k.to("meta"), v.to("meta")) for k, v in kv],
        "layers that are not one": SimpleNamespace(layers=5),
    }


@pytest.mark.parametrize("case", wrong_cases())
def test_a_cache_of_another_layout_is_refused(case: str) -> None:
    with pytest.raises(LayoutMismatch):
        SMALL.layers_of(wrong_cases()[case], 5)


def test_the_refusal_says_which_tensor_and_both_shapes() -> None:
    kv = random_kv(5)
    kv[1] = (kv[1][0], kv[1][1][:, :4])
    with pytest.raises(LayoutMismatch, match=r"V of layer 1: expected \[heads=2, tokens=5, dim=16\].*\[2, 4, 16\]"):
        SMALL.layers_of(kv, 5)


def test_sparse_tensors_are_refused_by_name() -> None:
    layout = KVLayout.uniform(1, 1, 4, "float32")
    sparse = torch.ones(1, 3, 4).to_sparse()
    with pytest.raises(LayoutMismatch, match="K of layer 0: expected a dense tensor"):
        layout.layers_of([(sparse, sparse)], 3)


def test_a_numpy_integer_is_no_size() -> None:
    """It would not be the same text in the canonical form."""
    with pytest.raises(ConfigError, match=r"LayerLayout\.heads"):
        LayerLayout(np.int64(3), 1, 1)  # type: ignore[arg-type]
