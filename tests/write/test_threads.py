"""Which threads code what was put."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from small_stores import IDENTITY, config, put, stored, tokens_of

from kvstore import KVStore
from kvstore.write.encode import Encoder

TOKENS = tokens_of(1, 64)


@pytest.mark.parametrize(("codec", "host", "alone"), [("raw", 0, True), ("raw", 1 << 20, True), ("entropy", 0, False)])
def test_small_blocks_that_are_only_copied_are_not_shared_among_threads(
    codec: str, host: int, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, encode = set[str](), Encoder._encode

    def noted(encoder: Encoder, *arguments: Any) -> Any:
        seen.add(threading.current_thread().name)
        return encode(encoder, *arguments)

    monkeypatch.setattr(Encoder, "_encode", noted)
    with KVStore(tmp_path, IDENTITY, config(host=host, codec=codec, threads=2)) as store:
        for number in range(4):
            put(store, tokens_of(number, 64))
        put(store, TOKENS)
        store.flush()
        assert stored(store, TOKENS) == 64
    assert (seen == {"kvstore-encode-0"}) is alone
