"""Why a get ends where it ends: every reason, brought about for real; and that the counters say the same."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import family_stores
import numpy as np
import pytest
from faultfs import Fault, FaultFS
from kvcases import GatedFS
from profilecases import profile_of
from small_stores import IDENTITY, SEGMENT, catalog_entries, config, put, scratch, stored, tokens_of

from kvstore import BlockExplanation, Explanation, KVStore, Reason
from kvstore.codecs import Profile
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.registry import REGISTRY
from kvstore.core.keys import namespace_digest
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.tier import DiskTier

TEXT = tokens_of(1, 10)  # blocks of 4: [0, 4), [4, 8), [8, 10)


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


def shorts(store: KVStore) -> dict[str, float]:
    """How many gets ended early, by the reason that was counted."""
    found = store.stats()["counters"]
    return {name.removeprefix("short_"): count for name, count in found.items() if name.startswith("short_")}


def rows(found: Explanation) -> list[tuple[int, int, str]]:
    return [(block.start, block.end, block.reason.value) for block in found.blocks]


@contextmanager
def on_disk(path: Path) -> Iterator[tuple[KVStore, DiskTier]]:
    """A store that holds the text on disk alone."""
    with KVStore(path, IDENTITY, config(host=0)) as store:
        put(store, TEXT)
        store.flush()
        disk = store._residency.disk
        assert disk is not None
        yield store, disk


def agrees(store: KVStore, tokens: np.ndarray, reason: Reason, namespace: bytes = b"") -> Explanation:
    """The explanation; it says the reason, a get returns what it says, and counts that reason once."""
    before = shorts(store)
    found = store.explain(tokens, namespace=namespace)
    assert shorts(store) == before
    assert found.reason is reason, found
    assert found.asked == len(tokens)
    assert [found.blocks[0].start, *(b.end for b in found.blocks)] == [*(b.start for b in found.blocks), len(tokens)]
    assert found.tokens == stored(store, tokens, namespace)
    counted = {} if reason.metric is None else {reason.metric.value.removeprefix("short_"): 1}
    assert {
        name: count - before.get(name, 0) for name, count in shorts(store).items() if count != before.get(name)
    } == (counted)
    if reason is not Reason.NOT_WORTH:
        later, block = store.explain(tokens, namespace=namespace, start=found.tokens), store.config.block_tokens
        assert (later.why, later.reason, later.tokens) == (found.why, found.reason, found.tokens)
        assert rows(later) == [row for row in rows(found) if row[0] >= found.tokens // block * block]
    return found


def test_everything_is_stored(path: Path) -> None:
    with KVStore(path, IDENTITY, config(host=0)) as store:
        put(store, TEXT, pin=True)
        store.flush()
        found = agrees(store, TEXT, Reason.STORED)
        assert rows(found) == [(0, 4, "stored"), (4, 8, "stored"), (8, 10, "stored")]
        first = found.blocks[0]
        assert (first.record, first.tiers, first.codec, first.donors) == (1, ("disk",), "raw", ())
        assert (first.pinned, first.expires, first.bytes) == (True, 0.0, catalog_entries(store)[0].nbytes)
        assert found.why == "A get returns all 10 tokens."


def test_every_tier_that_has_a_block_is_named(path: Path) -> None:
    with KVStore(path, IDENTITY, config(device=1 << 20, codec="entropy")) as store:
        put(store, TEXT, ttl=100)
        store.flush()
        first = agrees(store, TEXT, Reason.STORED).blocks[0]
        assert first.tiers == ("device", "host", "disk")
        assert first.codec == "raw"  # of the host tier, nearer than the disk's
        assert 0 < first.expires - time.time() <= 100


def test_a_block_that_waits_to_be_written_is_in_the_queue(path: Path) -> None:
    fs = GatedFS()
    with KVStore(path, IDENTITY, config(host=0), fs=fs) as store:
        fs.shut()
        put(store, TEXT)
        first = agrees(store, TEXT, Reason.STORED).blocks[0]
        assert (first.tiers, first.codec, first.bytes) == (("queue",), None, 4 * IDENTITY.layout.bytes_per_token)
        fs.gate.set()


def test_never_put(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        found = agrees(store, TEXT, Reason.NEVER_PUT)
        assert rows(found)[0] == (0, 4, "never put")
        assert found.why.startswith("A get returns none of 10 tokens: its first block is not stored, and nothing is")
        put(store, TEXT[:6])
        found = agrees(store, TEXT, Reason.NEVER_PUT)
        assert rows(found) == [(0, 4, "stored"), (4, 6, "stored"), (6, 8, "never put"), (8, 10, "never put")]


def test_differing_tokens(path: Path) -> None:
    other = TEXT.copy()
    other[6] += 1
    with KVStore(path, IDENTITY, config()) as store:
        put(store, TEXT)
        found = agrees(store, other, Reason.TOKENS_DIFFER)
        assert rows(found) == [(0, 4, "stored"), (4, 6, "stored"), (6, 8, "tokens differ"), (8, 10, "never put")]
        assert found.why.endswith("another sequence goes on differently from token 6.")
        branch = np.concatenate([TEXT[:4], TEXT[:4]])
        assert agrees(store, branch, Reason.TOKENS_DIFFER).tokens == 4
        assert agrees(store, np.append(TEXT, 5), Reason.NEVER_PUT).tokens == 10


def test_another_namespace(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        put(store, TEXT, b"a")
        put(store, TEXT, b"b")
        put(store, TEXT[:5], b"c")
        found = agrees(store, TEXT, Reason.OTHER_NAMESPACE, b"c")
        assert found.why.endswith("is not stored in this namespace, but in 2 other namespaces.")
        assert agrees(store, TEXT, Reason.OTHER_NAMESPACE).tokens == 0
        assert agrees(store, TEXT, Reason.STORED, b"a").tokens == 10


@pytest.mark.parametrize("disk", [True, False])
def test_evicted(path: Path, disk: bool) -> None:
    settings = {"host": 0, "disk": 4 * SEGMENT} if disk else {"host": 20_000, "disk": 0}
    with KVStore(path, IDENTITY, config(**settings)) as store:
        put(store, TEXT)
        store.flush()
        for number in range(2, 100):
            put(store, tokens_of(number, 10))
            store.flush()
        found = agrees(store, TEXT, Reason.EVICTED)
        assert rows(found) == [(0, 4, "evicted"), (4, 8, "evicted"), (8, 10, "evicted")]
        # A longer and a shorter query know the tail that went, too.
        assert rows(store.explain(np.append(TEXT, [1, 2, 3])))[2] == (8, 12, "evicted")
        assert agrees(store, TEXT[:3], Reason.EVICTED).tokens == 0
        assert agrees(store, tokens_of(500, 9), Reason.NEVER_PUT).tokens == 0
        put(store, TEXT)
        assert agrees(store, TEXT, Reason.STORED).tokens == 10


def test_the_log_does_not_outlive_the_store(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        put(store, TEXT)
        store.delete(TEXT)
        agrees(store, TEXT, Reason.DELETED)
    with KVStore(path, IDENTITY, config()) as store:
        assert "since the store was opened" in agrees(store, TEXT, Reason.NEVER_PUT).why


def test_expired(path: Path, clock: list[float]) -> None:
    with KVStore(path, IDENTITY, config(host=0)) as store:
        put(store, TEXT[:4])
        put(store, TEXT, ttl=60)
        store.flush()
        clock[0] = 61
        found = agrees(store, TEXT, Reason.EXPIRED)
        assert rows(found)[:2] == [(0, 4, "stored"), (4, 8, "expired")]
        store._residency.expire()
        assert len(catalog_entries(store)) == 1
        assert rows(agrees(store, TEXT, Reason.EXPIRED))[:2] == [(0, 4, "stored"), (4, 8, "expired")]


@pytest.mark.parametrize("flushed", [True, False])
def test_deleted(path: Path, flushed: bool) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        put(store, TEXT[:4], pin=True)
        put(store, TEXT)
        if flushed:
            store.flush()
        store.delete(TEXT)
        assert rows(agrees(store, TEXT, Reason.DELETED))[:2] == [(0, 4, "stored"), (4, 8, "deleted")]
        put(store, TEXT)
        agrees(store, TEXT, Reason.STORED)


def test_damaged(path: Path) -> None:
    with on_disk(path) as (store, _):
        extent = catalog_entries(store)[1].extent
        with open(path / "segments" / f"{extent.segment:08x}.seg", "r+b") as file:
            file.seek(extent.offset + 330)
            file.write(b"damage")
        assert store.explain(TEXT).reason is Reason.STORED  # nobody has read it yet
        assert stored(store, TEXT) == 4
        assert shorts(store) == {"damaged": 1}
        assert rows(agrees(store, TEXT, Reason.DAMAGED)) == [(0, 4, "stored"), (4, 8, "damaged"), (8, 10, "stored")]


@pytest.mark.parametrize("host", [0, 20_000])
def test_dropped(path: Path, host: int) -> None:
    fs = FaultFS()
    with KVStore(path, IDENTITY, config(host=host), fs=fs) as store:
        fs.fault = Fault("pwritev", 1, errno.EIO, sticky=True)
        put(store, TEXT)
        assert store.flush().dropped_blocks == 3
        if host:
            assert agrees(store, TEXT, Reason.STORED).blocks[0].tiers == ("host",)
            for number in range(2, 10):  # memory fills with others
                put(store, tokens_of(number, 10))
                store.flush()
        agrees(store, TEXT, Reason.DROPPED)
        fs.fault = None


def test_unreadable_without_its_profile(path: Path) -> None:
    arrays = profile_of(family_stores.LAYOUT, "lossless").section("lossless")
    profile = Profile.new(family_stores.IDENTITY, {"lossless": dict(arrays)})
    profile.save(path / "profile")
    text = family_stores.passage(1)
    settings = family_stores.config(codec="predictive", profile=path / "profile")
    with KVStore(path / "store", family_stores.IDENTITY, settings) as store:
        family_stores.put(store, text)
        store.flush()
        found = store.explain(text)
        assert (found.reason, found.blocks[0].codec) == (Reason.STORED, "predictive")
    shutil.rmtree(path / "store" / "profiles")
    with KVStore(path / "store", family_stores.IDENTITY, family_stores.config()) as store:
        found = store.explain(text)
        assert "unknown_profile" not in store.stats()["counters"]
        assert (found.reason, found.tokens) == (Reason.UNREADABLE, 0)
        assert found.why.endswith(f"is stored by predictive, and its profile {profile.id.hex()} is not here.")
        assert store.get(text) is None
        assert shorts(store) == {"unreadable": 1}


def test_unreadable_by_a_codec_of_a_newer_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk(path) as (store, _):
        monkeypatch.delitem(REGISTRY.labels, RawCodec.id)
        monkeypatch.delitem(REGISTRY._by_id, RawCodec.id)
        monkeypatch.setattr(REGISTRY, "copying", REGISTRY.copying - {RawCodec.id})
        found = agrees(store, TEXT, Reason.UNREADABLE)
        assert found.why.endswith("is stored by codec 0, which this version does not know.")


def test_a_get_that_the_catalog_cut_short_is_no_block_that_was_never_put(path: Path) -> None:
    with on_disk(path) as (store, disk):
        environment = disk.catalog.environment
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(environment), "reading", _refuses)
            found = agrees(store, TEXT, Reason.UNREACHABLE)
            assert (
                found.why
                == "A get returns none of 10 tokens: its first block is stored, but the catalog cannot be read now."
            )
            assert agrees(store, tokens_of(2, 10), Reason.NEVER_PUT).tokens == 0
        assert agrees(store, TEXT, Reason.STORED).tokens == 10


def _refuses(environment: object) -> NoReturn:
    raise CatalogError("the catalog cannot be read: too many open files")


def test_a_get_that_one_refusal_of_the_catalog_cut_short_says_so(path: Path) -> None:
    with on_disk(path) as (store, disk):
        once = iter([CatalogError("the catalog cannot be read: too many open files")])
        with pytest.MonkeyPatch.context() as patched:
            get = type(disk.catalog).get

            def refuses_once(catalog: Any, records: Any) -> Any:
                for error in once:
                    raise error
                return get(catalog, records)

            patched.setattr(type(disk.catalog), "get", refuses_once)
            assert store.get(TEXT) is None
        assert shorts(store) == {"unreachable": 1}


def test_a_hole_is_named_after_a_reopen(path: Path) -> None:
    with on_disk(path) as (store, _):
        store._residency.quarantine(2)
        assert agrees(store, TEXT, Reason.DAMAGED).tokens == 4
    with KVStore(path, IDENTITY, config(host=0)) as store:
        found = agrees(store, TEXT, Reason.GONE)
        assert rows(found) == [(0, 4, "stored"), (4, 8, "gone"), (8, 10, "stored")]
        assert found.why.endswith(
            "what follows them was stored once; why it left is not remembered since the store was opened."
        )
        put(store, TEXT)
        agrees(store, TEXT, Reason.STORED)


def test_a_member_and_the_donor_that_it_needs(path: Path) -> None:
    text, member = family_stores.passage(1), family_stores.behind(2, family_stores.passage(1))
    with KVStore(path, family_stores.IDENTITY, family_stores.config()) as store:
        family_stores.put(store, text)
        family_stores.put(store, member)
        store.flush()
        assert family_stores.members(store) >= 3
        block = store.explain(member).blocks[1]
        assert (block.reason, block.codec) == (Reason.STORED, "donor")
        assert block.donors == store._residency.donors_of(block.record or 0) != ()
        assert f"coded against {block.donors[0]}" in str(store.explain(member))


def test_a_reader_says_that_its_writer_process_removed_it(path: Path) -> None:
    with on_disk(path):
        pass
    shutil.copytree(path, path / "copy")
    with KVStore(path / "copy", IDENTITY, config(host=0), read_only=True) as reader:
        assert reader.explain(TEXT).tokens == 10
        disk = reader._residency.disk
        assert disk is not None
        found = disk.catalog.get
        disk.catalog.get = lambda records: [None] * len(list(records))  # type: ignore[method-assign]
        assert agrees(reader, TEXT, Reason.EVICTED).why.endswith("was removed by the writer process.")
        disk.catalog.get = found  # type: ignore[method-assign]


def test_explaining_is_no_use_of_a_block(path: Path) -> None:
    with KVStore(path, IDENTITY, config(host=0, disk=4 * SEGMENT)) as store:
        put(store, TEXT)
        for number in range(2, 100):
            put(store, tokens_of(number, 10))
            store.flush()
            store.explain(TEXT)
        assert stored(store, TEXT) == 0


def test_gets_that_return_all_they_were_asked_for_count_nothing(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        put(store, TEXT)
        assert store.get(TEXT, max_tokens=7) is not None
        assert shorts(store) == {}
        assert store.get(np.append(TEXT, 1), max_tokens=10) is not None
        assert shorts(store) == {}


def test_it_prints_a_short_table() -> None:
    stored = [
        BlockExplanation(4 * i, 4 * i + 4, Reason.STORED, record=i + 1, tiers=("host", "disk"), codec="raw", bytes=100)
        for i in range(50)
    ]
    found = Explanation.of(210, [*stored, BlockExplanation(200, 210, Reason.DELETED)])
    assert str(found).splitlines() == [
        "A get returns 200 of 210 tokens: what follows them was deleted.",
        "tokens   blocks  reason   tiers       codec  bytes  more",
        "0-199    50      stored   host, disk  raw    5000",
        "200-209  1       deleted",
    ]


def test_every_reason_but_stored_has_a_counter() -> None:
    assert {reason for reason in Reason if reason.metric is None} == {Reason.STORED}


def test_namespaces_are_known_to_the_log_by_their_digests(path: Path) -> None:
    """The catalog has numbers of them."""
    with KVStore(path, IDENTITY, config(host=0)) as store:
        for name in (b"a", b"b", b""):
            put(store, TEXT, name)
            store.flush()
            store.delete(TEXT, namespace=name)
            assert store._residency._digests[store._residency.disk.namespaces[namespace_digest(name)]] == (  # type: ignore[union-attr]
                namespace_digest(name)
            )
            agrees(store, TEXT, Reason.DELETED, name)
