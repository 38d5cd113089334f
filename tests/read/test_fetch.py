"""Reading the blocks of a get, and what an interrupt of it leaves behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from interrupts import Boom, Interrupt
from small_stores import config, identity, put, stored, tokens_of

from kvstore import KVStore
from kvstore.core.guard import Guard
from kvstore.read import fetch

TRIALS = 120


@pytest.mark.parametrize(("threads", "large"), [(1, 2 << 20), (4, 2 << 20), (4, 1 << 12)])
@pytest.mark.usefixtures("no_collector")
def test_an_interrupted_get_holds_no_segment(
    threads: int, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_READ_BYTES", large)  # the last case: reads take turns
    monkeypatch.setattr(Guard, "enforced", False)  # the assertions are made in Python, which can be interrupted
    tokens = tokens_of(1, 40)
    with KVStore(tmp_path / "store", identity(), config(disk=1 << 22, host=0, threads=threads)) as store:
        put(store, tokens)
        store.flush()
        counted = Interrupt()
        counted.run(lambda: store.get(tokens))
        inside = 0
        for at in range(1, counted.passed + 1, max(1, counted.passed // TRIALS)):
            interrupt = Interrupt(at)
            with contextlib.suppress(Boom):
                interrupt.run(lambda: store.get(tokens))
            inside += "fetch.py" in interrupt.where
            assert store.check().problems == (), interrupt.where
        assert inside > 3
        assert stored(store, tokens) == len(tokens)
