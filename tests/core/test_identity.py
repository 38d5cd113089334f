"""Identities, namespaces, key chains and tokens: whatever changes a cache changes its keys."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcases import identity

from kvstore import KVLayout, LayerLayout, ModelIdentity
from kvstore.core.keys import MAX_NAMESPACE_BYTES, chain_key, chain_keys, chain_root, namespace_digest
from kvstore.core.tokens import as_tokens
from kvstore.errors import ConfigError

BASE = identity()
LAYOUT = BASE.layout


def _first_layer(layer: LayerLayout) -> ModelIdentity:
    return replace(BASE, layout=replace(LAYOUT, layers=(layer, *LAYOUT.layers[1:])))


CHANGES: dict[str, ModelIdentity] = {
    "model": replace(BASE, model="m2"),
    "revision": replace(BASE, revision="r2"),
    "weights": replace(BASE, weights="w2"),
    "tokenizer": replace(BASE, tokenizer="t2"),
    "codec_family": replace(BASE, codec_family="lossy"),
    "shard": replace(BASE, shard="0/2"),
    "shard rank": replace(BASE, shard="1/1"),
    "layout.dtype": replace(BASE, layout=replace(LAYOUT, dtype="float16")),
    "layout.rope": replace(BASE, layout=replace(LAYOUT, rope='{"rope_theta": 10000.0}')),
    "layout.layers (count)": replace(BASE, layout=replace(LAYOUT, layers=LAYOUT.layers[1:])),
    "layout.heads": replace(BASE, layout=replace(LAYOUT, layers=(LayerLayout(4, 16, 16), *LAYOUT.layers[1:]))),
    "layout.key_dim": replace(BASE, layout=replace(LAYOUT, layers=(LayerLayout(2, 8, 16), *LAYOUT.layers[1:]))),
    "layout.value_dim": replace(BASE, layout=replace(LAYOUT, layers=(LayerLayout(2, 16, 8), *LAYOUT.layers[1:]))),
    "layout.kind": _first_layer(LayerLayout(2, 16, 16, "sliding", 32)),
    "layout.kind (chunked)": _first_layer(LayerLayout(2, 16, 16, "chunked", 32)),
    "layout.window": _first_layer(LayerLayout(2, 16, 16, "sliding", 33)),
    "layout.places": replace(BASE, layout=replace(LAYOUT, places=(0, 1, 3), model_layers=5)),
    "layout.model_layers": replace(BASE, layout=replace(LAYOUT, model_layers=5)),
    "layout.states": replace(BASE, layout=replace(LAYOUT, model_layers=5, states=(3,))),
    "layout.media": replace(BASE, layout=replace(LAYOUT, media=(("image_token_id", 7),))),
    "layout.indexed": replace(BASE, layout=replace(LAYOUT, model_layers=2, indexed=(1,))),
}
TOKENS = np.arange(10, dtype=np.uint32)
NAMESPACE = namespace_digest(b"n")


def keys(one: ModelIdentity, namespace: bytes = NAMESPACE, block_tokens: int = 4, tokens: Any = TOKENS) -> list[bytes]:
    return list(chain_keys(chain_root(one.digest, namespace, block_tokens), tokens, block_tokens))


def test_every_field_of_an_identity_is_changed_by_a_case_above() -> None:
    named = {name.split()[0].split(".")[0] for name in CHANGES}
    assert named == set(ModelIdentity.__dataclass_fields__)
    parts = {name.split()[0] for name in CHANGES if name.startswith("layout.")}
    assert parts == {f"layout.{n}" for n in (*KVLayout.__dataclass_fields__, *LayerLayout.__dataclass_fields__)}


def test_equal_identities_have_the_same_digest_and_the_same_keys() -> None:
    """The positive control of the tests below."""
    again = identity(KVLayout.uniform(3, 2, 16, "bfloat16"))
    assert again is not BASE
    assert again.digest == BASE.digest
    assert keys(again) == keys(BASE)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_digest(field: str) -> None:
    assert CHANGES[field].digest != BASE.digest


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_every_key_of_the_chain(field: str) -> None:
    assert len(keys(BASE)) == 3
    assert not set(keys(CHANGES[field])) & set(keys(BASE))


def test_all_changed_identities_differ_from_each_other() -> None:
    assert len({one.digest for one in CHANGES.values()}) == len(CHANGES)


def test_text_cannot_wander_from_one_field_into_the_next() -> None:
    assert identity(model="ab", revision="c").digest != identity(model="a", revision="bc").digest
    assert identity(model="", revision="x").digest != identity(model="x", revision="").digest
    assert identity(model="x", tokenizer="y").digest != identity(model="y", tokenizer="x").digest


@pytest.mark.parametrize("field", ["model", "revision", "weights", "tokenizer", "codec_family", "shard", "layout"])
def test_a_field_of_another_type_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        identity(**{field: None}) if field != "layout" else identity(None)  # type: ignore[arg-type]


def test_the_difference_names_the_fields_that_differ() -> None:
    text = BASE.difference(CHANGES["weights"].fields())
    assert text == "weights: stored 'w2', given 'w'"
    assert BASE.difference(BASE.fields()) == ""


@pytest.mark.parametrize("field", [name for name in CHANGES if name.startswith("layout.")])
def test_of_a_layout_the_difference_names_the_field_and_both_values(field: str) -> None:
    name = field.split()[0].removeprefix("layout.")
    text = BASE.difference(CHANGES[field].fields())
    assert re.search(rf"layout\.(layers\[0\]\.)?{name}(\.\w+)?: stored .+, given .+", text), text


def test_the_difference_of_large_layouts_is_not_cut_off() -> None:
    rope = '{"rope_theta": 10000.0, "rope_type": "default"}'
    given = replace(BASE, layout=KVLayout.uniform(30, 3, 64, "float32", rope))
    stored = replace(BASE, layout=KVLayout.uniform(30, 3, 64, "bfloat16", rope))
    assert given.difference(stored.fields()) == "layout.dtype: stored bfloat16, given float32"
    stored = replace(BASE, layout=KVLayout.uniform(30, 4, 64, "float32", rope.replace("10000", "500000")))
    assert given.difference(stored.fields()) == (
        "layout.layers[0].heads: stored 4, given 3 (30 layers differ); "
        "layout.rope.rope_theta: stored 500000.0, given 10000.0"
    )


def test_a_stored_layout_that_is_none_is_shown_as_it_is() -> None:
    assert "layout: stored 'nonsense', given" in BASE.difference({**BASE.fields(), "layout": "nonsense"})


# ---- namespaces --------------------------------------------------------------------------------------------------


def test_another_namespace_or_block_size_changes_every_key() -> None:
    assert not set(keys(BASE, namespace_digest(b"m"))) & set(keys(BASE))
    assert not set(keys(BASE, block_tokens=5)) & set(keys(BASE))


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_two_namespaces_have_the_same_digest_only_if_equal(one: bytes, other: bytes) -> None:
    assert (namespace_digest(one) == namespace_digest(other)) == (one == other)


def test_a_namespace_is_any_bytes_like_object() -> None:
    assert namespace_digest(bytearray(b"x")) == namespace_digest(memoryview(b"x")) == namespace_digest(b"x")
    assert len(namespace_digest(b"")) == 32


def test_a_namespace_of_the_largest_size_is_taken_and_a_larger_one_refused() -> None:
    namespace_digest(bytes(MAX_NAMESPACE_BYTES))
    with pytest.raises(ValueError, match="namespace: expected at most 4096 bytes, found 4097"):
        namespace_digest(bytes(MAX_NAMESPACE_BYTES + 1))


@pytest.mark.parametrize("namespace", ["\ud800", None, 5, [b"x"]])
def test_a_namespace_that_is_neither_text_nor_bytes_is_refused(namespace: Any) -> None:
    with pytest.raises(ValueError, match="namespace: expected text"):
        namespace_digest(namespace)


# ---- the chain ---------------------------------------------------------------------------------------------------

token_lists = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=40)


@given(token_lists, token_lists, st.integers(1, 9))
def test_two_sequences_share_exactly_the_keys_of_their_common_blocks(
    one: list[int], other: list[int], block_tokens: int
) -> None:
    a, b = (keys(BASE, block_tokens=block_tokens, tokens=np.array(x, np.uint32)) for x in (one, other))
    for i in range(max(len(a), len(b))):
        end = (i + 1) * block_tokens
        assert (a[i : i + 1] == b[i : i + 1]) == (one[:end] == other[:end])


@given(token_lists, st.integers(1, 9), st.integers(0, 39))
def test_the_keys_of_a_prefix_of_whole_blocks_are_a_prefix_of_the_keys(
    tokens: list[int], block_tokens: int, blocks: int
) -> None:
    array = np.array(tokens, np.uint32)
    cut = array[: blocks * block_tokens]
    whole = keys(BASE, block_tokens=block_tokens, tokens=array)
    assert keys(BASE, block_tokens=block_tokens, tokens=cut) == whole[: -(-len(cut) // block_tokens)]


def test_the_same_tokens_have_another_key_at_another_place() -> None:
    tokens = np.array([1, 2, 1, 2], np.uint32)
    first, second = keys(BASE, block_tokens=2, tokens=tokens)
    assert first != second


def test_a_key_is_the_documented_hash() -> None:
    """FORMAT.md states it; keys on disk depend on it for ever."""
    import hashlib

    parent = bytes(range(32))
    expected = hashlib.sha256(parent + (8).to_bytes(8, "little") + b"\x01\0\0\0\x02\0\0\0").digest()
    assert chain_key(parent, np.array([1, 2], np.uint32)) == expected


# ---- tokens ------------------------------------------------------------------------------------------------------


def test_a_contiguous_uint32_array_is_not_copied() -> None:
    array = np.arange(5, dtype=np.uint32)
    assert as_tokens(array) is array or as_tokens(array).base is array
    assert as_tokens(array).ctypes.data == array.ctypes.data


def test_a_slice_of_a_uint32_array_is_not_copied() -> None:
    array = np.arange(9, dtype=np.uint32)
    assert as_tokens(array[3:7]).ctypes.data == array[3:].ctypes.data


def test_a_read_only_array_is_taken() -> None:
    array = np.arange(5, dtype=np.uint32)
    array.flags.writeable = False
    assert as_tokens(array).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "given_tokens",
    [
        [3, 1, 2],
        (3, 1, 2),
        range(3, 0, -1),
        np.array([3, 1, 2], np.int64),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 1, 2], ">u4"),
        np.array([3, 9, 1, 9, 2, 9], np.uint32)[::2],
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        memoryview(np.array([3, 1, 2], np.uint32)),
    ],
    ids=lambda value: type(value).__name__ + getattr(value, "dtype", np.dtype("O")).__str__(),
)
def test_every_kind_of_integers_becomes_contiguous_uint32(given_tokens: Any) -> None:
    found = as_tokens(given_tokens)
    assert found.dtype == np.uint32
    assert found.dtype.isnative
    assert found.flags.c_contiguous
    assert found.tolist() == np.asarray(given_tokens).tolist()


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1))
def test_every_id_below_two_to_the_32_is_kept(values: list[int]) -> None:
    assert as_tokens(values).tolist() == values


@pytest.mark.parametrize(
    "bad",
    [
        [],
        np.zeros((2, 2), np.uint32),
        np.uint32(5),
        5,
        None,
        "tokens",
        b"tokens",
        [1.0, 2.0],
        [True, False],
        ["1"],
        [None],
        [[1, 2], [3]],
        [-1],
        [1 << 32],
        [1 << 64],
        [1 << 63, -1],
        np.array([1], np.complex64),
        np.array([1], "datetime64[s]"),
        {1, 2},
        {"a": 1},
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor(5),
        torch.zeros((2, 3), dtype=torch.int64),
        torch.tensor([1, 2], device="meta"),
        torch.tensor([1, 2]).to_sparse(),
    ],
    ids=lambda value: str(value).replace("\n", " ")[:40],
)
def test_anything_else_is_a_value_error_that_names_tokens(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^tokens: "):
        as_tokens(bad)


def test_the_refusal_says_which_id_was_found() -> None:
    with pytest.raises(ValueError, match="found -7"):
        as_tokens([5, -7])
    with pytest.raises(ValueError, match=f"found {1 << 33}"):
        as_tokens([1 << 33, 5])
