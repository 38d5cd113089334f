"""A conversation in a session: each turn in a store that was opened anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcases import open_store, tokens

from kvstore import Hit, KVLayout


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
