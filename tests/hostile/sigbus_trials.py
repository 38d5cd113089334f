"""A catalog that lost its last pages, and who opens it then; run by helpers/trials.py, one forked process per case."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import small_stores

from kvstore import KVStore
from kvstore.errors import CorruptStore

PAGE = 4096
TOKENS = small_stores.tokens_of(1, 10)
LONG = small_stores.tokens_of(2, 30_000)  # a session whose tokens take some thirty pages


def trial(who: str, pages: int) -> Any:
    """Opens the store whose catalog lost that many pages at its end, and reads everything that is in it."""
    with small_stores.scratch() as folder:
        path = folder / "store"
        build(path)
        file = path / "catalog" / "data.mdb"
        os.truncate(file, file.stat().st_size - pages * PAGE)
        if who in ("writer", "reader"):
            return read_all(path, read_only=who == "reader")
        with open(path / "writer.lock", "r+b") as lock:  # a live writer, or just anybody who locked that file
            fcntl.flock(lock, fcntl.LOCK_SH if who == "reader-beside-another" else fcntl.LOCK_EX)
            return read_all(path, read_only=True)


def build(path: Path) -> None:
    with KVStore(path, small_stores.IDENTITY, small_stores.config()) as store:
        small_stores.put(store, TOKENS)
        store.flush()
        store.session("long").save(LONG[:10], small_stores.kv_of(LONG[:10]))
        store.flush()


def read_all(path: Path, read_only: bool) -> str:
    try:
        store = KVStore(path, small_stores.IDENTITY, small_stores.config(), read_only=read_only)
    except CorruptStore as error:
        if not read_only or "open the store for writing to rebuild it" not in str(error):
            raise
        return "refused"
    with store:
        assert small_stores.stored(store, TOKENS) == 10
        store.session("long").resume()
        store.check(deep=True)
        if not read_only:
            small_stores.put(store, small_stores.tokens_of(3, 10))
            store.flush()
        return "rebuilt" if "catalog_rebuilt" in store.stats()["counters"] else "opened"
