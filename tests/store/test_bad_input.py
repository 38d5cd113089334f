"""Every row of the table of bad input: what is refused by which error, and that nothing else is harmed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_stores
import torch
import xxhash

from kvstore import KVStore, SharedKVStore
from kvstore.errors import ConfigError, FormatVersion, IdentityMismatch, LayoutMismatch, StoreClosed

TOKENS = small_stores.tokens_of(1, 10)
BAD_TOKENS = [
    pytest.param([], "found none", id="empty-list"),
    pytest.param(np.zeros(0, np.uint32), "found none", id="empty-array"),
    pytest.param([[1, 2], [3, 4]], "shape (2, 2)", id="two-dimensions"),
    pytest.param(np.uint32(5), "shape ()", id="scalar"),
    pytest.param(7, "shape ()", id="number"),
    pytest.param(None, "shape ()", id="none"),
    pytest.param("12", "shape ()", id="text"),
    pytest.param({1, 2}, "shape ()", id="set"),
    pytest.param((i for i in (1, 2)), "shape ()", id="generator"),
    pytest.param([[1], [2, 3]], "expected a 1-D array", id="ragged"),
    pytest.param([1.0, 2.0], "found float64", id="floats"),
    pytest.param([True, False], "found bool", id="booleans"),
    pytest.param([1, None], "found object", id="holes"),
    pytest.param(["1", "2"], "found <U1", id="digits"),
    pytest.param([1, -1], "found -1", id="negative"),
    pytest.param(np.array([-5], np.int64), "found -5", id="negative-array"),
    pytest.param([1 << 32], "found 4294967296", id="too-large"),
    pytest.param([1 << 63], f"found {1 << 63}", id="unsigned-64"),
    pytest.param([1 << 70], "found object", id="enormous"),
    pytest.param(torch.tensor([1.5]), "found float32", id="tensor-of-floats"),
    pytest.param(torch.tensor([1.0]).bfloat16(), "tokens: expected", id="tensor-of-bfloat16"),
    pytest.param(torch.zeros(2, 2, dtype=torch.int64), "shape (2, 2)", id="tensor-2d"),
]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with KVStore(tmp_path / "store", small_stores.IDENTITY, small_stores.config()) as opened:
        small_stores.put(opened, TOKENS)
        yield opened


def unharmed(store: KVStore) -> None:
    assert store.stats()["index"]["records"] == 3
    assert small_stores.stored(store, TOKENS) == 10


@pytest.mark.parametrize(("tokens", "found"), BAD_TOKENS)
def test_bad_tokens_are_refused_by_name_everywhere(store: KVStore, tokens: Any, found: str) -> None:
    calls = (
        lambda: store.put(tokens, small_stores.kv_of(TOKENS)),
        lambda: store.get(tokens),
        lambda: store.contains(tokens),
        lambda: store.prefetch(tokens),
        lambda: store.delete(tokens),
        lambda: store.session("s").save(tokens, small_stores.kv_of(TOKENS)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^tokens: ") as error:
            call()
        assert found in str(error.value)
    assert store.sessions() == []
    unharmed(store)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS.tolist(),
        tuple(TOKENS.tolist()),
        TOKENS.astype(np.int64),
        TOKENS.astype(np.uint64),
        torch.from_numpy(TOKENS.astype(np.int64)),
        np.repeat(TOKENS, 2)[::2],
    ],
    ids=["list", "tuple", "int64", "uint64", "tensor", "strided"],
)
def test_any_integers_name_the_same_sequence(store: KVStore, tokens: Any) -> None:
    assert store.contains(tokens) == 10
    hit = store.get(tokens)
    assert hit is not None
    assert small_stores.is_exact(hit, TOKENS)


def test_the_largest_token_id_is_stored(store: KVStore) -> None:
    tokens = np.array([(1 << 32) - 1, 0, (1 << 32) - 1], np.uint32)
    small_stores.put(store, tokens)
    assert small_stores.stored(store, tokens) == 3


def _bad_kv() -> list[Any]:
    good = small_stores.kv_of(TOKENS)
    (k, v), second = good

    def with_k(tensor: Any) -> list[Any]:
        return [(tensor, v), second]

    return [
        pytest.param(good[:1], "1 layers", id="layer-missing"),
        pytest.param([*good, second], "3 layers", id="layer-too-many"),
        pytest.param([], "0 layers", id="no-layers"),
        pytest.param(with_k(k.repeat(2, 1, 1)), "K of layer 0", id="heads"),
        pytest.param(with_k(torch.cat([k, k], 2)), "K of layer 0", id="dim"),
        pytest.param(with_k(k[:, :9]), "tokens=10", id="tokens-missing"),
        pytest.param(with_k(torch.cat([k, k[:, :1]], 1)), "tokens=10", id="tokens-too-many"),
        pytest.param([(k, v), (second[0], second[1][:, :, :3])], "V of layer 1", id="dim-of-v"),
        pytest.param(with_k(k.float()), "float32", id="dtype"),
        pytest.param(with_k(k.half()), "float16", id="dtype-of-the-same-size"),
        pytest.param(with_k(k.view(torch.int16)), "int16", id="integers"),
        pytest.param(with_k(torch.stack([k, k])), "K of layer 0", id="batch-of-two"),
        pytest.param(with_k(k[0]), "K of layer 0", id="two-dimensions"),
        pytest.param(with_k(k.float().numpy()), "float32", id="numpy"),
        pytest.param(with_k(None), "NoneType", id="none"),
        pytest.param(with_k([1, 2]), "list", id="list"),
        pytest.param([(k,), second], "expected a pair", id="no-pair"),
        pytest.param([(k, v, v), second], "expected a pair", id="triple"),
        pytest.param([k, v], "", id="tensors-without-pairs"),
        pytest.param(17, "found int", id="number"),
        pytest.param(None, "found NoneType", id="nothing"),
    ]


@pytest.mark.parametrize(("kv", "found"), _bad_kv())
def test_kv_of_another_layout_is_refused_and_nothing_is_stored(store: KVStore, kv: Any, found: str) -> None:
    tokens = small_stores.tokens_of(2, 10)
    with pytest.raises(LayoutMismatch) as error:
        store.put(tokens, kv)
    assert found in str(error.value)
    with pytest.raises(LayoutMismatch):
        store.session("s").save(tokens, kv)
    assert store.contains(tokens) == 0
    assert store.sessions() == []
    unharmed(store)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", ["raw", "splitzip", "entropy", "zstd"])
def test_nan_and_inf_are_stored_exactly(tmp_path: Path, dtype: str, codec: str) -> None:
    layout = replace(small_stores.LAYOUT, dtype=dtype)
    kind = torch.int32 if dtype == "float32" else torch.int16
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=getattr(torch, dtype))
    signalling = values.view(kind).clone()
    signalling[0] ^= 5  # another NaN than the usual one: its payload must survive too
    rows = torch.stack([values, signalling.view(values.dtype)]).reshape(1, 2, 4).repeat(1, 5, 1)
    kv = [(rows.clone(), rows.flip(1).clone()) for _ in range(2)]
    path, identity, config = tmp_path / "store", small_stores.identity(layout), small_stores.config(codec=codec)
    with KVStore(path, identity, config) as store:
        store.put(TOKENS, kv)
    with KVStore(path, identity, config) as store:
        hit = store.get(TOKENS)
        assert hit is not None
        assert hit.tiers == {"disk": 10}
        for pair, expected in zip(hit.layers, kv, strict=True):
            for tensor, want in zip(pair, expected, strict=True):
                assert torch.equal(tensor[0].view(kind), want.view(kind))


@pytest.mark.parametrize("field", ["weights", "codec_family", "shard"])
def test_another_identity_is_refused_and_named(tmp_path: Path, field: str) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        small_stores.put(store, TOKENS)
    other = replace(small_stores.IDENTITY, **{field: "another"})
    for read_only in (False, True):
        with pytest.raises(IdentityMismatch, match=f"{field}.*another.*use another directory"):
            KVStore(tmp_path, other, small_stores.config(), read_only=read_only)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        assert small_stores.stored(store, TOKENS) == 10


@pytest.mark.parametrize("opened", [KVStore, SharedKVStore])
@pytest.mark.parametrize(
    ("identity", "config", "said"),
    [
        ("my-model", None, "identity: expected a ModelIdentity, found 'my-model'; make one with ModelIdentity.from_tr"),
        (small_stores.IDENTITY, {"disk": {}}, "config: expected a StoreConfig, found a dict; write StoreConfig"),
        (small_stores.IDENTITY, {}, "config: expected a StoreConfig, found a dict"),
    ],
)
def test_an_argument_of_another_kind_is_refused_before_anything_is_made(
    tmp_path: Path, opened: Any, identity: Any, config: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        opened(tmp_path / "store", identity, config)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "layout",
    [replace(small_stores.LAYOUT, dtype="float16"), replace(small_stores.LAYOUT, rope='{"theta": 5}')],
    ids=["dtype", "rope"],
)
def test_another_layout_of_the_same_shapes_is_refused(tmp_path: Path, layout: Any) -> None:
    KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()).close()
    with pytest.raises(IdentityMismatch, match="layout"):
        KVStore(tmp_path, small_stores.identity(layout), small_stores.config())


def test_another_format_version_is_refused_and_named(tmp_path: Path) -> None:
    KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()).close()
    for name in ("store.json", "store.json.copy"):
        document = json.loads((tmp_path / name).read_text().splitlines()[0])
        body = json.dumps({**document, "format": 99}).encode() + b"\n"
        (tmp_path / name).write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
    for read_only in (False, True):
        with pytest.raises(FormatVersion, match=r"format 99.*reads formats 1 to 2; open the store with"):
            KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(), read_only=read_only)


def test_every_call_after_close_raises_store_closed(tmp_path: Path) -> None:
    store = KVStore(tmp_path, small_stores.IDENTITY, small_stores.config())
    small_stores.put(store, TOKENS)
    session = store.session("s")
    session.save(TOKENS, small_stores.kv_of(TOKENS))
    store.close()
    store.close()
    for name, call in small_stores.every_call(store, session, TOKENS).items():
        with pytest.raises(StoreClosed, match="open it again"):
            print(name, call())
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as reopened:
        assert small_stores.stored(reopened, TOKENS) == 10


@pytest.mark.parametrize("namespace", ["\ud800", "x" * 4097, 5, 10**15, None, [1], b"x" * 4097], ids=repr)
@pytest.mark.parametrize("allowed", [(), (b"", b"a")], ids=["any", "listed"])
def test_a_bad_namespace_is_refused_by_name(tmp_path: Path, namespace: Any, allowed: tuple[bytes, ...]) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(namespaces=allowed)) as store:
        for call in (
            lambda: store.put(TOKENS, small_stores.kv_of(TOKENS), namespace=namespace),
            lambda: store.get(TOKENS, namespace=namespace),
            lambda: store.contains(TOKENS, namespace=namespace),
            lambda: store.prefetch(TOKENS, namespace=namespace),
            lambda: store.delete(TOKENS, namespace=namespace),
            lambda: store.session("s", namespace=namespace),
        ):
            with pytest.raises(ValueError, match=r"^namespace: "):
                call()


def test_a_namespace_that_is_not_configured_is_refused(tmp_path: Path) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(namespaces=(b"a",))) as store:
        small_stores.put(store, TOKENS, b"a")
        assert small_stores.stored(store, TOKENS, b"a") == 10
        with pytest.raises(ValueError, match="not one of the configured"):
            store.get(TOKENS)


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), True, "5"], ids=repr)
def test_a_bad_ttl_is_refused_and_nothing_is_stored(store: KVStore, ttl: Any) -> None:
    with pytest.raises(ValueError, match=r"^ttl: "):
        small_stores.put(store, small_stores.tokens_of(2, 5), ttl=ttl)
    unharmed(store)


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, "3"], ids=repr)
def test_a_bad_max_tokens_is_refused(store: KVStore, limit: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_tokens: "):
        store.get(TOKENS, max_tokens=limit)


@pytest.mark.parametrize(
    "logprobs",
    [[0.0] * 9, [0.0] * 11, [[0.0] * 10], [float("nan")] * 10, [1.0] * 10, ["a"] * 10, 3.0],
    ids=["short", "long", "two-dimensions", "nan", "positive", "text", "number"],
)
def test_bad_logprobs_are_refused_and_nothing_is_stored(store: KVStore, logprobs: Any) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        small_stores.put(store, small_stores.tokens_of(2, 10), logprobs=logprobs)
    unharmed(store)


@pytest.mark.parametrize("name", ["", "x" * 401, "\udc80", 5, None, b"bytes"], ids=repr)
def test_a_bad_session_id_is_refused(store: KVStore, name: Any) -> None:
    with pytest.raises(ValueError, match=r"^session: "):
        store.session(name)


def test_a_session_that_does_not_exist_gives_nothing(store: KVStore) -> None:
    session = store.session("nobody")
    assert session.resume() is None
    assert session.tokens.size == 0
    assert not session.delete()
    with pytest.raises(KeyError, match="nobody"):
        session.fork("somebody")


def test_arrays_in_place_of_tensors_are_named(tmp_path: Path) -> None:
    kv = [(k.view(torch.int16).numpy(), v.view(torch.int16).numpy()) for k, v in small_stores.kv_of(TOKENS)]
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        with pytest.raises(LayoutMismatch, match="found int16 of a ndarray, no torch tensor"):
            store.put(TOKENS, kv)
        assert len(store) == 0
