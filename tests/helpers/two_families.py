"""A store of two families that do not touch each other: what is done to one must not harm the other.

`TEXT` and `OTHER` are the donors' sequences; `MEMBER` and `UNHARMED` are those that are coded against them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_stores
import small_stores
from family_stores import IDENTITY, behind, config, members, passage

from kvstore import KVStore

TEXT, OTHER = passage(1), passage(2)
MEMBER, UNHARMED = behind(10, TEXT), behind(11, OTHER)


def built(path: Path) -> dict[int, Any]:
    """Makes the store and closes it. Returns the donors' entries of the first family, by position in `TEXT`."""
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT)
        family_stores.put(store, OTHER)
        store.flush()
        family_stores.put(store, MEMBER)
        family_stores.put(store, UNHARMED)
        store.flush()
        assert members(store) == 8
        return {entry.start: entry for entry in small_stores.catalog_entries(store) if entry.record <= 4}


def opened(path: Path, **settings: Any) -> KVStore:
    return KVStore(path, IDENTITY, config(**settings))
