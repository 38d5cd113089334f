"""Scripts for a disk on which one call fails, or every call from one on: what is stored stays right, what was flushed
stays there, and the store works again once the disk does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_stores
import small_stores
from faultfs import FaultFS
from small_stores import tokens_of

from kvstore import FlushResult, KVStore
from kvstore.errors import KVStoreError
from kvstore.tiers.disk.erase import NOTHING_ERASED

Healing = Callable[[], None]
_KEPT = (1, 2)  # sequences that are pinned
_GIVEN_UP = (
    "quarantined_records",
    "dropped_members",
    "dropped_write_error",
    "dropped_no_space",
    "disk_evicted_records",
)


def config() -> Any:
    return small_stores.config(host=1 << 14, disk=6 * small_stores.SEGMENT)


def plain(path: Path, fs: FaultFS, heal: Healing) -> None:
    """Puts, flushes, evictions, moves, deletes, a session, gets and a second opening, all on the failing disk."""
    must: set[int] = set()
    for first in (0, 40):
        fs.forget_failed_syncs()
        try:
            store = KVStore(path, small_stores.IDENTITY, config(), fs=fs)
        except (OSError, KVStoreError):
            continue  # the disk failed under the opening itself; it is tried again below
        try:
            _fill(store, first, must)
        finally:
            store.close()
    heal()
    with KVStore(path, small_stores.IDENTITY, config(), fs=fs) as store:
        for number in must:
            assert small_stores.stored(store, tokens_of(number, 9)) == 9, f"sequence {number} was flushed"
        last = works(store)
        small_stores.all_is_well(store)
    with KVStore(path, small_stores.IDENTITY, config()) as store:
        for number in range(90):
            small_stores.stored(store, tokens_of(number, 40))
        assert small_stores.stored(store, last) == 40
        small_stores.all_is_well(store)


def _fill(store: KVStore, first: int, must: set[int]) -> None:
    for number in _KEPT[:1]:
        small_stores.put(store, tokens_of(number, 9), pin=True)
    store.session("s").save(tokens_of(2, 9), small_stores.kv_of(tokens_of(2, 9)))
    if store.flush().dropped_blocks == 0 and store.contains(tokens_of(1, 9)) == 9:
        must.add(1)
    for number in range(10 + first, 18 + first):
        small_stores.put(store, tokens_of(number, 40))
        store.flush()
        small_stores.stored(store, tokens_of(number, 40))
        small_stores.stored(store, tokens_of(10, 40))
    if _deleted(store, tokens_of(12 + first, 40)):
        assert small_stores.stored(store, tokens_of(12 + first, 40)) == 0


def works(store: KVStore) -> Any:
    """New puts are kept and come back from disk. Returns the last sequence, of 40 tokens."""
    for number in range(80, 90):
        tokens = tokens_of(number, 40)
        put = small_stores.put(store, tokens)
        assert put.dropped_blocks == 0
        assert store.flush() == FlushResult(put.new_blocks, 0)
        store._residency.host.clear()
        assert small_stores.stored(store, tokens) == 40
    return tokens


def families(path: Path, fs: FaultFS, heal: Healing) -> None:
    """Members are coded against donors, and coded anew when these are deleted."""
    settings = family_stores.config(disk=64 * small_stores.SEGMENT)
    texts = [family_stores.passage(number, 3 * family_stores.BLOCK) for number in (1, 2)]
    alike = [family_stores.behind(10 + n, text, 7 * n) for text in texts for n in (1, 2)]
    must: list[Any] = []
    for _ in range(2):
        fs.forget_failed_syncs()
        try:
            store = KVStore(path, family_stores.IDENTITY, settings, fs=fs)
        except (OSError, KVStoreError):
            continue
        try:
            must.clear()
            for tokens in (*texts, *alike):
                family_stores.put(store, tokens)
                if store.flush().dropped_blocks == 0 and store.contains(tokens) == len(tokens):
                    must.append(tokens)
            if _deleted(store, texts[0]):
                assert store.contains(texts[0]) < len(texts[0])
            must = [tokens for tokens in must if tokens is not texts[0]]
            for tokens in (*texts, *alike):
                family_stores.stored(store, tokens)
            must = _still_there(store, must)
        finally:
            store.close()
    heal()
    with KVStore(path, family_stores.IDENTITY, settings, fs=fs) as store:
        for tokens in must:
            assert family_stores.stored(store, tokens) == len(tokens), "a member that was flushed"
        family_stores.families_hold(store)
        for tokens in (*texts, *alike):
            family_stores.put(store, tokens)
        assert store.flush().dropped_blocks == 0
    with KVStore(path, family_stores.IDENTITY, settings) as store:
        for tokens in (*texts, *alike):
            assert family_stores.stored(store, tokens) == len(tokens)
        family_stores.families_hold(store)


def _still_there(store: KVStore, flushed: list[Any]) -> list[Any]:
    """Those that the store did not give up, which it counts: what the disk does not give back, members of a donor that
    was deleted where they cannot be written anew, and what is evicted where the file system has no more room."""
    left = [tokens for tokens in flushed if store.contains(tokens) == len(tokens)]
    counters = store.stats()["counters"]
    assert len(left) == len(flushed) or any(counters.get(name) for name in _GIVEN_UP), counters
    return left


def erasing(path: Path, fs: FaultFS, heal: Healing) -> None:
    """Erases sequences and a session. What is not stored any more is in no file, and what was kept is there."""
    gone, must = [tokens_of(number, 9) for number in (31, 32, 33)], [tokens_of(number, 9) for number in (41, 42)]
    kept: list[Any] = []
    refused: list[Any] = []  # whose erase could not be begun, and is to be asked for again
    for _ in range(2):
        fs.forget_failed_syncs()
        try:
            store = KVStore(path, small_stores.IDENTITY, config(), fs=fs)
        except (OSError, KVStoreError):
            continue
        try:
            kept.clear()
            for tokens in (*gone, *must):
                small_stores.put(store, tokens, pin=any(tokens is one for one in must))  # no full disk makes room there
                if store.flush().dropped_blocks == 0 and store.contains(tokens) == len(tokens):
                    kept.append(tokens)
            store.session("s").save(gone[2], small_stores.kv_of(gone[2]))
            refused = [tokens for tokens in gone if not _erase_begun(store, tokens)]
            with contextlib.suppress(KVStoreError):
                store.session("s").delete(blocks=True, erase=True)
        finally:
            store.close()
    heal()
    with KVStore(path, small_stores.IDENTITY, config(), fs=fs) as store:
        for tokens in kept:
            if any(tokens is one for one in must):
                assert small_stores.stored(store, tokens) == len(tokens), "a sequence that was flushed"
        left = [tokens for tokens in gone if store.contains(tokens)]
        if store.session("s").exists:
            left.append(gone[2])
        small_stores.all_is_well(store)
    _in_no_file(path, [tokens for tokens in gone if not any(tokens is one for one in (*left, *refused))])
    with KVStore(path, small_stores.IDENTITY, config(), fs=fs) as store:
        if store.session("s").exists:
            store.session("s").delete(blocks=True, erase=True)
        for tokens in refused:
            store.delete(tokens, erase=True)
    _in_no_file(path, refused)
    with KVStore(path, small_stores.IDENTITY, config(), fs=fs) as store:
        works(store)


def _in_no_file(path: Path, erased: list[Any]) -> None:
    contents = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    for tokens in erased:
        text = tokens[1:3].astype("<u4").tobytes()
        assert not any(text in content for content in contents), f"sequence {tokens[0]} was erased"


def _erase_begun(store: KVStore, tokens: Any) -> bool:
    try:
        store.delete(tokens, erase=True)
    except KVStoreError as error:
        return NOTHING_ERASED not in str(error)
    return True


def _deleted(store: KVStore, tokens: Any) -> bool:
    try:
        return store.delete(tokens) > 0
    except KVStoreError:  # the catalog cannot be written; the sequence is gone from this process all the same
        return True


SCRIPTS: dict[str, Callable[[Path, FaultFS, Healing], None]] = {
    "plain": plain,
    "families": families,
    "erasing": erasing,
}
