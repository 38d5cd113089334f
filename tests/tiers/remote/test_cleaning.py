"""What goes from a remote tier while others write and use it: nothing that is needed, nothing that is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small
from kvcases import open_store, tokens
from remotecases import LONG_S, S3_KEYS, opened, put
from s3servers import s3_server
from statecases import HYBRID, cache_of

from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.remote.cleaning import older, orphans, remove, to_remove
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.folder import FolderEngine
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.survey import Value, survey

STEM = small.tokens_of(1, 3 * small.BLOCK)
FORKS = [np.concatenate([STEM, small.tokens_of(number, 2 * small.BLOCK)]) for number in (7, 8)]
DAY_S = 86400.0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FolderEngine]:
    """A folder with places and records, all of them old."""
    url = f"folder://{tmp_path}/shared"
    rs.filled(tmp_path / "a", rs.settings(url), *FORKS)
    with open_store(tmp_path / "b", HYBRID, remote=rs.settings(url)) as store:
        for count in (21, 45):
            store.put(tokens(45)[:count], cache_of(tokens(45)[:count], HYBRID))
            assert store.flush(remote=True).remote_due == 0
    for file in (tmp_path / "shared").rglob("*"):
        if file.is_file():
            os.utime(file, (0, 0))
    engine = FolderEngine(f"{tmp_path}/shared")
    yield engine
    engine.close()


def _found(engine: RemoteEngine) -> tuple[list[Value], list[Value], set[str]]:
    """(all values, those that are to go, the names of the old ones)"""
    old, values = older(engine, "", DAY_S, LONG_S), survey(engine, LONG_S)
    return values, to_remove(values, None, old), old


def test_all_that_is_old_goes(engine: FolderEngine) -> None:
    values, going, old = _found(engine)
    assert {value.name for value in remove(engine, values, going, LONG_S, old, DAY_S)} == {v.name for v in values}
    assert survey(engine, LONG_S) == []


@pytest.mark.parametrize("kind", ["record", "place"])
def test_what_is_used_meanwhile_stays_with_all_before_it(engine: FolderEngine, kind: str) -> None:
    values, going, old = _found(engine)
    ends = [value for value in values if (bool(value.parts) if kind == "place" else value.is_record)]
    used = max(ends, key=lambda value: value.depth)
    engine.touch([used.name], DAY_S, LONG_S)
    gone = remove(engine, values, going, LONG_S, old, DAY_S)
    left = survey(engine, LONG_S)
    assert {value.name for value in left} == {v.name for v in values} - {v.name for v in gone}
    assert (used.name in {value.name for value in left}, orphans(left)) == (True, set())
    assert len(left) > 1 + (kind == "place")


def test_marks_stay_where_places_were_written_meanwhile(engine: FolderEngine) -> None:
    values, going, old = _found(engine)
    put(engine, f"kvs1/{'0' * 16}/{'1' * 64}.place", b"a new one")
    remove(engine, values, going, LONG_S, old, DAY_S)
    assert any(value.is_mark for value in survey(engine, LONG_S))


def test_what_is_written_while_values_are_read_is_read_too(
    engine: FolderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record was listed, and the one before it was not: it was not there yet when its folder was looked at."""
    whole, lists = FolderEngine.list, list[str]()
    late = min((v for v in survey(engine, LONG_S) if v.is_record), key=lambda value: value.depth)

    def first_without(self: FolderEngine, prefix: str, timeout_s: float) -> Iterator[str]:
        lists.append(prefix)
        return (name for name in whole(self, prefix, timeout_s) if len(lists) > 1 or name != late.name)

    monkeypatch.setattr(FolderEngine, "list", first_without)
    assert orphans(survey(engine, LONG_S)) == set()


class OtherClock(FileSystem):
    """Files of a server whose clock is some days ahead, or behind."""

    def __init__(self, days: float) -> None:
        self.ahead_s = days * DAY_S

    def modified(self, path: str) -> float:
        return super().modified(path) + self.ahead_s


@pytest.mark.parametrize("days", [-40.0, 0.0, 40.0])
def test_ages_go_by_the_clock_of_the_server(tmp_path: Path, days: float) -> None:
    folder = FolderEngine(f"{tmp_path}/shared", fs=OtherClock(days))
    with s3_server() as server:
        server.ahead_s = days * DAY_S
        with opened(server.url, **S3_KEYS) as bucket:
            for engine in (folder, bucket):
                put(engine, "kvs1/a", b"value")
                (age,) = engine.ages(["kvs1/a"], LONG_S)
                assert age is not None
                assert 0 <= age < DAY_S / 2
            assert list(server.objects) == ["/records/kvs1/a"]
    folder.close()


def test_a_server_without_ages_is_named(tmp_path: Path) -> None:
    engine: Any = open_engine("valkey://127.0.0.1:1")
    with pytest.raises(ValueError, match="does not say how old"):
        older(engine, "", DAY_S, LONG_S)
    engine.close()
