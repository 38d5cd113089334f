"""Code that interrupts the decoding of a layer in its own thread, as a signal handler or a finalizer does, and calls
the store: it is told so, and waits for nothing that waits for itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcases import same_kv
from lazyhits import lazily
from striped_stores import IDS, KV, filled

from kvstore import Hit, KVStore
from kvstore.errors import StoreBusy, StoreClosed
from kvstore.read.layerwise import LayerDecode

pytestmark = pytest.mark.usefixtures("small_records", "alone")

CALLS: dict[str, Callable[[KVStore, Hit], Any]] = {
    "close": lambda store, hit: store.close(),
    "check": lambda store, hit: store.check(),
    "layer": lambda store, hit: hit.layers[11],
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_would_wait_for_itself_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    decode, told = LayerDecode._decode, list[BaseException]()
    with filled(tmp_path) as store:
        hit = lazily(store, IDS)

        def interrupted(self: LayerDecode, unit: Any, work: Any) -> None:
            monkeypatch.setattr(LayerDecode, "_decode", decode)
            with pytest.raises(StoreBusy, match="the decoding of a layer was interrupted in this thread") as error:
                CALLS[call](store, hit)
            told.append(error.value)
            decode(self, unit, work)

        monkeypatch.setattr(LayerDecode, "_decode", interrupted)
        assert same_kv(tuple(hit.layers), KV)
        assert len(told) == 1
        assert store.check().problems == ()  # the store is open, and works
        assert lazily(store, IDS).tokens == len(IDS)
    with pytest.raises(StoreClosed):
        store.stats()


def test_a_handler_that_raises_ends_the_wait_and_the_store_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path)
    hit = lazily(store, IDS)

    def interrupted(self: LayerDecode, unit: Any, work: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerDecode, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuple(hit.layers)
    store.close()
    assert same_kv(tuple(hit.layers), KV)
