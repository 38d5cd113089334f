"""What the page says of a store is what the store says of itself."""

from __future__ import annotations

from pathlib import Path

import family_stores
import pytest
from small_stores import config, flip, identity, kv_of, put, stored, tokens_of

from kvstore import KVStore
from kvstore.metrics import Metric
from kvstore.report import collect
from kvstore.transfer.settings import READING


def test_the_parts_add_up(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config(host=0)) as store:
        for number in range(4):
            put(store, tokens_of(number + 1, 20), namespace=b"" if number else b"apart")
        put(store, [*tokens_of(2, 20)[:8], *tokens_of(9, 6)])
        store.session("alice").save(tokens_of(1, 20), kv_of(tokens_of(1, 20)))
        assert stored(store, tokens_of(2, 20)) == 20
        store.flush()
        data, stats, found = collect(store, deep=True), store.stats(), store.inventory()
        assert data.used == stats["disk"]["used_bytes"]
        assert data.space[0].bytes == stats["disk"]["bytes"]
        assert data.budget == store.config.disk.bytes
        assert (data.records, data.tokens) == (stats["disk"]["records"], stats["disk"]["tokens"])
        assert sum(row.bytes for row in data.codecs) == sum(row.bytes for row in data.namespaces) == data.space[0].bytes
        assert sum(row.sequences for row in data.namespaces) == len(found.sequences)
        assert sum(data.segments) == stats["disk"]["segments"]
        per_token = identity().layout.bytes_per_token
        assert data.savings.alone == per_token * sum(len(sequence.tokens) for sequence in found.sequences)
        assert data.savings.shared == stats["disk"]["raw_bytes"]
        assert data.savings.coded == data.savings.stored == stats["disk"]["bytes"]
        assert [session.id for session in data.sessions] == ["alice"]
        assert data.check.verified_records == data.records
        assert data.history[-1].counts[Metric.GET_HITS] == 1
        assert not data.lost


def test_a_reader_says_the_same_beside_its_writer_and_after(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        put(store, tokens_of(1, 20))
        for _ in range(3):
            stored(store, tokens_of(1, 20))
    with KVStore(tmp_path, identity(), READING, read_only=True) as reader:
        data = collect(reader)
    assert data.nodes[1].uses == 4  # one put, three gets
    assert data.history[-1].counts[Metric.GET_HITS] == 3
    assert data.budget == config().disk.bytes


def test_families(tmp_path: Path) -> None:
    shared = family_stores.passage(1, 4 * family_stores.BLOCK)
    with KVStore(tmp_path, family_stores.IDENTITY, family_stores.config()) as store:
        for number in (2, 3, 4):
            tokens = family_stores.behind(number, shared)
            store.put(tokens, family_stores.kv_of(tokens))
            store.flush()
        data, stats = collect(store), store.stats()
    assert data.members == stats["families"]["members"] > 0
    assert data.donors == stats["families"]["donors"]
    assert max(family.members for family in data.families) == 2
    assert all(family.bytes <= family.raw_bytes for family in data.families)
    assert [row.blocks for row in data.codecs if row.is_member] == [data.members]
    assert data.savings.coded > data.savings.stored


def test_damage_is_told(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        put(store, tokens_of(1, 20))
    flip(next((tmp_path / "segments").iterdir()), 4096 * 2 + 400, 0xFF)
    with KVStore(tmp_path, identity(), READING, read_only=True) as reader:
        assert collect(reader).check.ok
        assert not collect(reader, deep=True).check.ok


@pytest.mark.parametrize("read_only", [False, True])
def test_an_empty_store(tmp_path: Path, read_only: bool) -> None:
    with KVStore(tmp_path, identity(), config()):
        pass
    with KVStore(tmp_path, identity(), config(), read_only=read_only) as store:
        data = collect(store)
    assert (data.records, data.nodes, data.families, data.history, data.budget) == (0, (), (), (), 0)
    assert data.savings.alone == data.savings.stored == 0
