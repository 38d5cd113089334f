"""Sessions in the catalog: what they share is there once, what nobody needs any more is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessioncases import NAMESPACE, deleted, found, saved, session, tokens_in, write_format_1

from kvstore.config import MIB
from kvstore.core.session_record import TEXT_TOKENS, SessionChange
from kvstore.tiers.disk.catalog import Catalog


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    yield opened
    opened.close()


def texts(path: Path) -> int:
    """How many texts the closed catalog has."""
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env, env.begin() as txn:
        return int(txn.stat(env.open_db(b"texts", txn=txn, create=False))["entries"])


def all_is_well(catalog: Catalog, sessions: int) -> None:
    assert catalog.session_problems() == (sessions, [])


def test_sessions_are_put_replaced_listed_and_deleted(catalog: Catalog) -> None:
    catalog.commit(sessions=[saved("a", 1), saved("b", 2)])
    catalog.commit(sessions=[saved("a", 3)])
    assert tokens_in(catalog) == {"a": [0, 1, 2], "b": [0, 1]}
    catalog.commit(sessions=[deleted("a"), deleted("none")])
    assert found(catalog, "a") is None
    assert tokens_in(catalog) == {"b": [0, 1]}


def test_the_last_of_several_changes_of_one_session_wins(catalog: Catalog) -> None:
    catalog.commit(sessions=[saved("a", 300), deleted("a"), saved("a", 2)])
    assert tokens_in(catalog) == {"a": [0, 1]}
    catalog.commit(sessions=[saved("a", 3), deleted("a")])
    assert found(catalog, "a") is None
    all_is_well(catalog, 0)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 511, 512, 20_000])
def test_all_of_a_session_comes_back(catalog: Catalog, count: int) -> None:
    record = session("a", count, 7, expiry=9.0, pinned=True)
    catalog.commit(sessions=[SessionChange(record.key, record, 7)])
    again = found(catalog, "a")
    assert again is not None
    assert again.tokens.tolist() == list(range(count))
    assert (again.created, again.used, again.sequence, again.expiry, again.pinned) == (1.0, 2.0, 7, 9.0, True)
    assert not again.tokens.flags.writeable
    all_is_well(catalog, 1)


def test_sessions_that_begin_alike_share_what_they_share(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(sessions=[saved(f"s{n}", 20_000 + n) for n in range(100)])
    all_is_well(catalog, 100)
    catalog.close()
    assert texts(tmp_path) == 20_000 // TEXT_TOKENS
    assert (tmp_path / "data.mdb").stat().st_size < 100 * 1000 + 4 * 20_000 * 2


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(sessions=[saved("a", 600), saved("a", 600, namespace=b"m" * 32)])
    all_is_well(catalog, 2)
    catalog.close()
    assert texts(tmp_path) == 4


def test_what_no_session_needs_any_more_is_gone(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(sessions=[saved("a", 1000), saved("b", 1300), saved("c", 600)])
    catalog.commit(sessions=[deleted("b"), saved("c", 300, first=500)])
    assert tokens_in(catalog) == {"a": list(range(1000)), "c": list(range(500, 800))}
    all_is_well(catalog, 2)
    catalog.commit(sessions=[deleted("a"), deleted("c")])
    catalog.close()
    assert texts(tmp_path) == 0


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 900), st.sampled_from([0, 1])), max_size=4),
        max_size=8,
    )
)
def test_any_history_leaves_what_it_says(
    tmp_path_factory: pytest.TempPathFactory, history: list[list[tuple[str, int, int]]]
) -> None:
    catalog = Catalog(str(tmp_path_factory.mktemp("catalog")), 64 * MIB, readonly=False)
    model: dict[str, list[int] | None] = {}
    for commit in history:
        catalog.commit(sessions=[saved(n, count, first=first) if count else deleted(n) for n, count, first in commit])
        for name, count, first in commit:
            model[name] = list(range(first, first + count))
            if not count:
                del model[name]
    assert tokens_in(catalog) == model
    all_is_well(catalog, len(model))
    catalog.close()


def test_a_damaged_session_is_none_and_is_not_listed(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(sessions=[saved("a", 5), saved("b", 6)])
    catalog.close()
    path = tmp_path / "data.mdb"
    victim = session("a", 5).head().pack()
    path.write_bytes(path.read_bytes().replace(victim, victim[:-3] + b"\xff" * 3))
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    assert found(catalog, "a") is None
    assert tokens_in(catalog) == {"b": list(range(6))}
    assert not catalog.is_sound()
    assert catalog.session_problems()[1]
    catalog.close()


def test_a_session_with_a_damaged_text_is_none(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.commit(sessions=[saved("a", 600), saved("b", 600, first=1000)])
    catalog.close()
    path = tmp_path / "data.mdb"
    victim = np.arange(0, 256, dtype=np.uint32).tobytes()
    path.write_bytes(path.read_bytes().replace(victim, b"\1" * len(victim)))
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    assert tokens_in(catalog) == {"a": None, "b": list(range(1000, 1600))}
    assert not catalog.is_sound()
    catalog.commit(sessions=[saved("c", 700)])  # writes the text anew
    catalog.commit(sessions=[deleted("c")])
    assert tokens_in(catalog)["a"] == list(range(600))
    catalog.close()


# ---- format 1 ----------------------------------------------------------------------------------------------------


def test_sessions_of_format_1_are_read_as_they_are(tmp_path: Path) -> None:
    records = [session("a", 5), session("long", 5000)]
    write_format_1(tmp_path, records)
    before = (tmp_path / "data.mdb").read_bytes()
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=True)
    assert tokens_in(catalog) == {"a": list(range(5)), "long": list(range(5000))}
    assert [head.length for head in catalog.sessions()] == [5, 5000]
    assert catalog.is_sound()
    all_is_well(catalog, 2)
    catalog.close()
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_an_upgrade_keeps_every_session(tmp_path: Path) -> None:
    records = [session(f"s{n}", 1 + n % 700, n) for n in range(2500)]  # three commits
    write_format_1(tmp_path, records)
    for _ in range(2):  # the second one finds nothing to do
        catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
        catalog.upgrade_sessions()
        assert tokens_in(catalog) == {record.name: record.tokens.tolist() for record in records}
        all_is_well(catalog, 2500)
        assert max(head.sequence for head in catalog.sessions()) == 2499
        catalog.close()


def test_an_upgrade_of_a_full_catalog_finds_room(tmp_path: Path) -> None:
    write_format_1(tmp_path, [session(f"s{n}", 20_000, n, first=n) for n in range(100)])
    size = (tmp_path / "data.mdb").stat().st_size
    catalog = Catalog(str(tmp_path), size + MIB, readonly=False)
    catalog.upgrade_sessions()
    all_is_well(catalog, 100)
    catalog.close()


def test_an_upgrade_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    records = [session(f"s{n}", 300, n) for n in range(20)]
    write_format_1(tmp_path, records[:10])
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    catalog.upgrade_sessions()
    catalog.close()
    write_format_1(tmp_path, records[10:])  # as if these had not been reached
    catalog = Catalog(str(tmp_path), 64 * MIB, readonly=False)
    assert len(tokens_in(catalog)) == 20
    catalog.upgrade_sessions()
    assert tokens_in(catalog) == {record.name: record.tokens.tolist() for record in records}
    all_is_well(catalog, 20)
    catalog.close()


def test_namespaces_of_other_sessions_are_not_listed_as_this_one(catalog: Catalog) -> None:
    catalog.commit(sessions=[saved("a", 2), saved("a", 3, namespace=b"m" * 32)])
    record = found(catalog, "a")
    assert record is not None
    assert (record.namespace, len(record.tokens)) == (NAMESPACE, 2)
