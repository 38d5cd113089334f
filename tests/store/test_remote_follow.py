"""A store that follows its server believes nothing that others changed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import remotestores as rs
import small_stores as small
from valkeys import Valkey, valkey

from kvstore.errors import ConfigError

TOKENS = small.tokens_of(1, 6 * small.BLOCK)
LONG_S = 3600.0


def _settings(server: Valkey, **remote: Any) -> Any:
    return rs.settings(server.url, miss_s=LONG_S, belief_s=LONG_S, **remote)


@pytest.mark.processes
@pytest.mark.parametrize("follow", [True, False])
def test_what_was_absent_and_is_written_is_asked_for_again(tmp_path: Path, follow: bool) -> None:
    with valkey() as server, rs.open_store(tmp_path / "b", _settings(server, follow=follow)) as store:
        rs.until(lambda: store.get(TOKENS) is None and rs.counters(store).get("remote_told", 0) >= follow)
        assert store.get(TOKENS) is None  # and is believed to be absent from now on
        rs.filled(tmp_path / "a", _settings(server), TOKENS)
        if follow:
            rs.until(lambda: small.stored(store, TOKENS) == len(TOKENS))
            assert rs.counters(store)["remote_told"] >= 7
        else:
            assert store.get(TOKENS) is None


@pytest.mark.processes
def test_what_was_there_and_is_removed_is_not_read(tmp_path: Path) -> None:
    with valkey() as server:
        rs.filled(tmp_path / "a", _settings(server), TOKENS)
        with rs.open_store(tmp_path / "b", _settings(server, follow=True, promote="second")) as store:
            rs.until(lambda: rs.counters(store).get("remote_told", 0) >= 1)
            rs.got(store, TOKENS)
            server.ask("FLUSHALL")
            rs.until(lambda: store.stats()["remote"]["believed"] == 0)
            assert store.get(TOKENS) is None
            assert rs.counters(store).get("remote_gone", 0) == 0  # it was not read in vain


def test_a_server_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not tell of changes"):
        rs.open_store(tmp_path / "a", rs.settings(f"folder://{tmp_path}/shared", follow=True))
