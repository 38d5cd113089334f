"""What Prometheus is told agrees exactly with a workload's own tally of its puts, gets, sessions and evictions.

The tally knows only what was asked for and what came back, and the reads that the file system saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import pytest
import seeds
from prometheus_client import CollectorRegistry
from small_stores import BLOCK, LAYOUT, SEGMENT, config, identity, kv_of, stored, tokens_of

from kvstore import KVStore
from kvstore.config import PAGE_BYTES
from kvstore.exporter import export
from kvstore.metrics import Metric
from kvstore.tiers.disk.fs import FileSystem


class Told:
    """What the exporter says of a store, by name and labels other than the store's.

    Example: `told("kvstore_get_seconds_count", tier="disk")` is the sum over all other labels.
    """

    def __init__(self, store: KVStore) -> None:
        self._registry = CollectorRegistry()
        export(store, name="one", registry=self._registry)

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found)


class CountingFiles(FileSystem):
    """Counts the reads of segments while `counts` is set."""

    reads, counts = 0, False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads += self.counts
        return super().preadv(fd, buffers, offset)


class Workload:
    """Puts, gets and deletes of a store whose contents are known, with a tally of its own."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.tally: Counter[str] = Counter()

    def put(self, tokens: np.ndarray) -> None:
        there = self.store.contains(tokens)
        done = self.store.put(tokens, kv_of(tokens))
        self.store.flush()
        self.tally.update(puts=1, put_tokens=len(tokens), put_new_tokens=done.new_tokens, written=done.new_blocks)
        assert done.new_tokens >= len(tokens) - there

    def get(self, tokens: np.ndarray) -> None:
        found = stored(self.store, tokens)
        blocks = -(-found // BLOCK)
        self.tally.update(get_tokens=len(tokens), hits=found > 0, misses=not found, hit_tokens=found, decoded=blocks)
        self.tally.update(short=found < len(tokens))

    def delete(self, tokens: np.ndarray) -> None:
        self.tally["deleted"] += self.store.delete(tokens)


@pytest.fixture
def files() -> CountingFiles:
    return CountingFiles()


@pytest.fixture
def work(tmp_path: Path, files: CountingFiles) -> Iterator[Workload]:
    with KVStore(tmp_path, identity(), config(host=0, disk=6 * SEGMENT, learn="off"), fs=files) as store:
        yield Workload(store)


def replay(work: Workload, files: CountingFiles) -> None:
    draw, sequences = np.random.default_rng(seeds.nth(5)), list[np.ndarray]()
    for number in range(60):
        tokens = tokens_of(int(draw.integers(1, 12)), 24)[: 4 * int(draw.integers(1, 7))]
        sequences.append(np.concatenate([tokens, tokens_of(1000 + number, int(draw.integers(1, 14)))]))
        work.put(sequences[-1])
        files.counts = True
        for _ in range(2):
            asked = sequences[int(draw.integers(len(sequences)))]
            work.get(asked[: int(draw.integers(1, len(asked) + 1))])
        work.get(tokens_of(5000 + number, 5))
        files.counts = False
        if number % 13 == 12:
            work.delete(sequences[-1])
        if number % 10 == 0:
            session = work.store.session(f"user {number}")
            session.point_to(sequences[-1])
            work.tally["sessions"] += 1
    work.store.flush()


def test_counters_histograms_and_gauges_are_what_was_done(work: Workload, files: CountingFiles) -> None:
    told = Told(work.store)
    replay(work, files)
    tally, table = work.tally, work.store.blocks()
    assert tally["hits"] > 20
    assert tally["misses"] >= 60
    assert tally["deleted"] > 0
    equal = {
        "kvstore_get_hits_total": tally["hits"],
        "kvstore_get_misses_total": tally["misses"],
        "kvstore_get_tokens_total": tally["get_tokens"],
        "kvstore_hit_tokens_total": tally["hit_tokens"],
        "kvstore_get_hit_tokens_disk_total": tally["hit_tokens"],  # nothing else is there
        "kvstore_put_tokens_total": tally["put_tokens"],
        "kvstore_put_new_tokens_total": tally["put_new_tokens"],
        "kvstore_disk_written_records_total": tally["written"],
        "kvstore_deleted_records_total": tally["deleted"],
        "kvstore_get_seconds_count": tally["hits"] + tally["misses"],
        "kvstore_put_seconds_count": tally["puts"],
        "kvstore_decode_seconds_count": tally["decoded"],
        "kvstore_read_seconds_count": files.reads,
        "kvstore_sessions": tally["sessions"],
        "kvstore_queue_records": 0,
        "kvstore_queue_bytes": 0,
        "kvstore_disk_tokens": int(table.rows["count"].sum()),
        "kvstore_up": 1,
    }
    assert {name: told(name) for name in equal} == equal
    short = [
        f"kvstore_short_{why}_total" for why in ("never_put", "evicted", "deleted", "gone", "unreadable", "dropped")
    ]
    assert sum(told(name) for name in short) == tally["short"]
    left = len(table.rows)
    assert told("kvstore_tier_records", tier="disk") == left
    assert told("kvstore_tier_bytes", tier="disk") == left * PAGE_BYTES
    # No sequence goes on behind a tail, so none was replaced.
    assert told("kvstore_disk_evicted_records_total") == tally["written"] - tally["deleted"] - left > 0


def test_labels_say_where_everything_came_from(work: Workload, files: CountingFiles) -> None:
    told = Told(work.store)
    replay(work, files)
    tally = work.tally
    assert told("kvstore_get_seconds_count", tier="disk", codec="raw") == tally["hits"]
    assert told("kvstore_get_seconds_count", tier="none", codec="none") == tally["misses"]
    assert told("kvstore_decode_seconds_count", tier="disk", codec="raw") == tally["decoded"]
    assert told("kvstore_read_seconds_count", tier="disk", codec="raw") == files.reads
    assert told("kvstore_hit_tokens_total", tier="disk") == tally["hit_tokens"]
    assert told("kvstore_get_seconds_bucket", le="+Inf") == tally["hits"] + tally["misses"]
    per_token = LAYOUT.bytes_per_token
    prefix = (tally["put_tokens"] - tally["put_new_tokens"]) * per_token
    assert told("kvstore_saved_bytes", mechanism="prefix") == prefix > 0
    coded = tally["put_new_tokens"] * per_token - tally["written"] * PAGE_BYTES
    assert told("kvstore_saved_bytes", mechanism="codec") == coded  # less than nothing: pages are larger than blocks
    assert told("kvstore_saved_bytes", mechanism="donors") == 0


def test_memory_tiers_have_labels_of_their_own(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config(codec="splitzip")) as store:
        told, tokens = Told(store), tokens_of(1, 20)
        store.put(tokens, kv_of(tokens))
        store.flush()
        assert stored(store, tokens) == 20
        tiers: dict[str, Any] = {"host": 20}
        assert {tier: told("kvstore_hit_tokens_total", tier=tier) for tier in tiers} == tiers
        assert told("kvstore_get_seconds_count", tier="host") == 1
        assert told("kvstore_decode_seconds_count", tier="host") == 5
        assert told("kvstore_read_seconds_count") == 0


def test_what_donors_save_is_told(tmp_path: Path) -> None:
    shared = family_stores.passage(1, 4 * family_stores.BLOCK)
    with KVStore(tmp_path, family_stores.IDENTITY, family_stores.config()) as store:
        told, tokens = Told(store), 0
        for number in (2, 3, 4):
            each = family_stores.behind(number, shared)
            tokens += len(each)
            store.put(each, family_stores.kv_of(each))
            store.flush()
        rows, per_token = store.blocks().rows, family_stores.LAYOUT.bytes_per_token
        members = rows[rows["is_member"]]
        assert len(members) > 0
        donors = int(members["count"].sum()) * per_token - int(members["bytes"].sum())
        assert told("kvstore_saved_bytes", mechanism="donors") == donors
        saved = sum(told("kvstore_saved_bytes", mechanism=each) for each in ("prefix", "codec", "donors"))
        assert saved == tokens * per_token - int(rows["bytes"].sum())


def test_time_saved_is_what_computing_takes_less_the_get(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config(prefill_tokens_per_s=0.01, gate="off")) as store:  # 100 s a token
        told, tokens = Told(store), tokens_of(1, 20)
        store.put(tokens, kv_of(tokens))
        hits = [store.get(tokens), store.get(tokens[:7])]
        assert store.get(tokens_of(2, 4)) is None
        took = sum(hit.seconds for hit in hits if hit is not None)
        assert told("kvstore_get_saved_s_total") == pytest.approx(2700 - took, abs=1e-6)
        assert sum(sample.counts[Metric.GET_SAVED_S] for sample in store.history()) == int(2700 - took)
