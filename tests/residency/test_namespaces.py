"""What each namespace takes, in `stats()`, and that `check` holds it against the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvcases import kv_of, open_store, tokens

from kvstore import KVStore, TierConfig
from kvstore.core.keys import namespace_digest


def put(store: KVStore, namespace: str | bytes, count: int = 20) -> None:
    store.put(tokens(count), kv_of(tokens(count)), namespace=namespace)


def label(namespace: bytes) -> str:
    return f"digest:{namespace_digest(namespace).hex()}"


@pytest.mark.parametrize("settings", [{}, {"disk": TierConfig(0)}], ids=["disk", "memory"])
def test_namespaces_are_counted_by_name_or_digest(tmp_path: Path, settings: dict[str, Any]) -> None:
    with open_store(tmp_path, **settings) as store:
        put(store, b"", 9)
        put(store, "ann")
        store.session("s", namespace="ann").save(tokens(20), kv_of(tokens(20)))
        store.session("t", namespace="bob").point_to(tokens(5))
        store.flush()
        found = store.stats()["namespaces"]
        tier = store.stats()["disk" if store.config.disk.bytes else "host"]
        assert {name: (row["records"], row["tokens"], row["sessions"]) for name, row in found.items()} == {
            "": (2, 9, 0),
            label(b"ann"): (3, 20, 1),
            "(others)": (0, 0, 1),  # bob has a session, and no blocks: half of the digest is known
        }
        assert sum(row["bytes"] for row in found.values()) == tier["bytes"]
        assert store.check().problems == ()


def test_configured_namespaces_have_their_names(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "ann")
    names = ("ann", "", b"\xff", "digest:", "line\nbreak")
    with open_store(tmp_path, namespaces=names) as store:
        found = store.stats()["namespaces"]
        assert [*found] == ["ann", *sorted(map(label, (b"\xff", b"digest:", b"line\nbreak")))]
        assert found["ann"]["tokens"] == 20
        assert store.delete_namespace("ann") == 3
        assert not any(map(any, (row.values() for row in store.stats()["namespaces"].values())))
        assert store.check().problems == ()


def test_of_many_namespaces_the_smallest_are_one_row(tmp_path: Path) -> None:
    with open_store(tmp_path, namespaces=("small", *map(str, range(70)))) as store:
        for number in range(70):
            put(store, str(number), 9)
        put(store, "small", 3)
        store.flush()
        found = store.stats()["namespaces"]
        assert len(found) == 65
        assert found["(others)"]["tokens"] == 6 * 9 + 3
        assert sum(row["records"] for row in found.values()) == store.stats()["disk"]["records"]


def test_check_finds_wrong_counts(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "ann")
        store.flush()
        store._residency.disk._usage._by_number[1][2] += 4096  # type: ignore[union-attr]
        (problem,) = store.check().problems
        assert problem == "the disk tier counts by namespace what the catalog does not have"
