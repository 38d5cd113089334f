"""A store of a layout with windows, coded with a profile, opens for ever (see tests/golden/make.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from goldenstore import digest_of, files_of, unpack
from goldenwindows import LENGTHS, config, identity

from kvstore import KVStore

GOLDEN = Path(__file__).parent.parent / "golden" / "windows"


def everything_is_there(store: KVStore) -> None:
    manifest: dict[str, Any] = json.loads((GOLDEN / "store.json").read_text())
    assert [len(sequence["tokens"]) for sequence in manifest["sequences"]] == list(LENGTHS)
    for sequence in manifest["sequences"]:
        hit = store.get(np.array(sequence["tokens"], np.uint32))
        assert hit is not None
        assert hit.tokens == len(sequence["tokens"])
        assert digest_of(hit.layers) == sequence["sha256"]
        assert {block.codec for block in store.explain(sequence["tokens"]).blocks} == {"predictive"}


def test_reading_finds_everything_and_changes_no_byte(tmp_path: Path) -> None:
    path = unpack(GOLDEN / "store.tar.gz", tmp_path / "store")
    before = files_of(path)
    with KVStore(path, identity(), config(), read_only=True) as store:
        everything_is_there(store)
        assert not {name for name in store.stats()["counters"] if name.startswith(("damaged", "unknown", "fallback"))}
    assert files_of(path) == before


def test_new_blocks_are_coded_with_the_profile_that_the_store_keeps(tmp_path: Path) -> None:
    path = unpack(GOLDEN / "store.tar.gz", tmp_path / "store")
    with KVStore(path, identity(), config()) as store:
        everything_is_there(store)
        assert store.check(deep=True).ok


def test_the_golden_store_stays_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 64_000
