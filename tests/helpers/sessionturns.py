"""A conversation in a session: each turn in a store that was opened anew. And prefixes of sequences, put one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcases import open_store, quick_directory, tokens

from kvstore import Hit, KVLayout, KVStore


def six_turns(
    path: Path,
    layout: KVLayout,
    cache_of: Callable[[Any, KVLayout], Any],
    is_right: Callable[[Hit, Any, KVLayout], bool],
    longer: int = 7,
) -> None:
    """Saves six turns, each `longer` tokens longer than the last; every store resumes what the one before it saved.

    cache_of: what a model keeps of tokens. is_right: whether a hit is that.
    """
    ids, end = tokens(300), 0
    for turn in range(6):
        with open_store(path, layout) as store:
            if turn:
                hit = store.session("chat").resume()
                assert hit is not None
                assert hit.tokens == end
                assert is_right(hit, ids, layout)
            end += 13 + longer * turn
            store.session("chat").save(ids[:end], cache_of(ids[:end], layout))


@contextmanager
def put_one_by_one(
    layout: KVLayout,
    put: Callable[[KVStore, Any, KVLayout], None],
    sequences: Sequence[Any],
    steps: Iterable[tuple[int, int, bool]],
    check: Callable[[KVStore, set[tuple[int, int]]], None] = lambda store, ends: None,
) -> Iterator[tuple[KVStore, set[tuple[int, int]]]]:
    """A store into which a prefix was put a step, and what was put: (which sequence, length).

    steps: the same, and whether the store is closed and opened then. check: called after each step.
    """
    ends = set()
    with quick_directory() as folder:
        store = open_store(folder / "s", layout)
        for which, count, reopen in steps:
            put(store, sequences[which][:count], layout)
            ends.add((which, count))
            if reopen:
                store.close()
                store = open_store(folder / "s", layout)
            check(store, ends)
        yield store, ends
        assert store.check(deep=True).problems == ()
        store.close()
