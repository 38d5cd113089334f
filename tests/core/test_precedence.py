"""Long work gives way to short work, and does not wait for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from kvcases import kv_of, open_store, tokens
from threadruns import HANGS_S

from kvstore.core import precedence as module
from kvstore.core.precedence import Precedence


def test_long_work_goes_on_when_short_work_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_S", HANGS_S)
    precedence, done = Precedence(), list[str]()

    def long() -> None:
        precedence.give_way()
        done.append("long")

    with precedence.short:
        thread = threading.Thread(target=long)
        thread.start()
        thread.join(0.05)
        done.append("short")
    thread.join(HANGS_S)
    assert done == ["short", "long"]
    assert not precedence.short.locked()


def test_long_work_does_not_wait_for_what_does_not_end() -> None:
    precedence = Precedence()
    with precedence.short:
        precedence.give_way()
        assert precedence.short.locked()


@pytest.mark.parametrize("pin", [False, True])
def test_a_put_goes_before_encoding_unless_it_may_wait_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: bool
) -> None:
    given_way = list[str]()
    monkeypatch.setattr(Precedence, "give_way", lambda self: given_way.append(threading.current_thread().name))
    with open_store(tmp_path) as store:
        put_path, seen = store._engine.put_path, list[bool]()
        settle = put_path._settle

        def noted(*arguments: Any) -> bool:
            seen.append(put_path.precedence.short.locked())
            return settle(*arguments)

        monkeypatch.setattr(put_path, "_settle", noted)
        store.put(tokens(7), kv_of(tokens(7)), pin=pin)
        store.flush()
        assert seen == [not pin]
        assert not put_path.precedence.short.locked()
    blocks = -(-7 // store.config.block_tokens)
    assert len(given_way) == blocks
