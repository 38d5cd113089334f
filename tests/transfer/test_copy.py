"""Sequences and sessions on their way from one store to another, and space that is given back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_stores
from small_stores import all_is_well, config, disk_use, identity, kv_of, put, stored, tokens_of
from statecases import ALTERNATING, WITH_WINDOWS, cache_of, is_state_of
from windowcases import WINDOWED, is_kept, kept

from kvstore import IdentityMismatch, KVLayout, KVStore
from kvstore.transfer.copy import Choice, copy_store
from kvstore.transfer.portable import backup_store, export_store, import_bundle


def filled(folder: Path) -> KVStore:
    store = KVStore(folder, identity(), config())
    for number in (1, 2):
        put(store, tokens_of(number, 21))
    put(store, tokens_of(3, 9), namespace=b"apart", ttl=1e6, pin=True)
    store.session("alice").save(tokens_of(1, 21), kv_of(tokens_of(1, 21)))
    store.session("bob", namespace=b"apart").save(tokens_of(5, 7), kv_of(tokens_of(5, 7), b"apart"))
    return store


def test_a_copy_has_everything_bit_for_bit(tmp_path: Path) -> None:
    with filled(tmp_path / "a") as source, KVStore(tmp_path / "b", identity(), config()) as target:
        told: list[tuple[str, int, int]] = []
        report = copy_store(source, target, progress=lambda *each: told.append(each))
        assert (report.sequences, report.sessions, report.short, report.dropped_blocks) == (
            4,
            2,
            0,
            0,
        )  # those of sessions once
        assert told[-1] == ("sequences and sessions", 6, 6)
        assert [stored(target, tokens_of(number, 21)) for number in (1, 2)] == [21, 21]
        assert stored(target, tokens_of(3, 9), b"apart") == 9
        assert target.session("bob", namespace=b"apart").resume().tokens == 7  # type: ignore[union-attr]
        pinned = next(each for each in target.inventory().sequences if each.pinned)
        assert 9e5 < pinned.expires - time.time() < 1.1e6
        assert copy_store(source, target).new_tokens == 0
        all_is_well(target, deep=True)


def test_what_is_chosen_is_copied(tmp_path: Path) -> None:
    with filled(tmp_path / "a") as source:
        for name, choice, sequences in (
            ("session", Choice(sessions=("bob",)), [7]),
            ("prefix", Choice(prefixes=(tokens_of(2, 5),)), [21]),
            ("namespace", Choice(namespace=source.inventory().sequences[-1].namespace), [9, 7]),
            ("nothing", Choice(sessions=("nobody",)), []),
        ):
            with KVStore(tmp_path / name, identity(), config()) as target:
                report = copy_store(source, target, choice)
                assert [len(each.tokens) for each in target.inventory().sequences] == sequences, name
                assert report.missing == (["nobody"] if name == "nothing" else [])


def test_a_session_whose_cache_left_keeps_its_tokens(tmp_path: Path) -> None:
    with filled(tmp_path / "a") as source, KVStore(tmp_path / "b", identity(), config()) as target:
        source.delete(tokens_of(1, 21))
        assert copy_store(source, target).short == 0  # all that the source has came
        assert target.session("alice").tokens.tolist() == tokens_of(1, 21).tolist()


def test_a_session_that_has_a_token_more_than_its_cache_is_whole(tmp_path: Path) -> None:
    """As `generate` saves it: nothing was ever computed for the last token of an answer."""
    with filled(tmp_path / "a") as source, KVStore(tmp_path / "b", identity(), config()) as target:
        source.session("chat").save(tokens_of(6, 10), kv_of(tokens_of(6, 10)), then=[7])
        for new in (21 + 21 + 9 + 7 + 10, 0):
            report = copy_store(source, target)
            assert (report.sequences, report.sessions, report.short, report.new_tokens) == (5, 3, 0, new)
        session = target.session("chat")
        assert (session.tokens.tolist(), session.resume().tokens) == ([*tokens_of(6, 10), 7], 10)  # type: ignore[union-attr]


_WRITER = """
import sys
import small_stores
with small_stores.KVStore(sys.argv[1], small_stores.identity(), small_stores.config()) as store:
    store.delete(small_stores.tokens_of(1, 21), erase=True)
    store.delete(small_stores.tokens_of(2, 21))
"""


@pytest.mark.parametrize("is_reader", [False, True], ids=["by itself", "by its writer"])
def test_what_leaves_meanwhile_is_no_damage(is_reader: bool, tmp_path: Path) -> None:
    def leave(_: str, done: int, total: int) -> None:
        if is_reader and not done:
            command = [sys.executable, "-c", _WRITER, str(tmp_path / "a")]
            subprocess.run(command, cwd=Path(small_stores.__file__).parent, check=True)
        elif not done:
            source.delete(tokens_of(1, 21))
            source.delete(tokens_of(2, 21))

    filled(tmp_path / "a").close()
    with (
        KVStore(tmp_path / "a", identity(), config(), read_only=is_reader) as source,
        KVStore(tmp_path / "b", identity(), config()) as target,
    ):
        report = copy_store(source, target, progress=leave)
        assert (report.left, report.short) == (2, 0)
        assert (target.contains(tokens_of(1, 21)), stored(target, tokens_of(3, 9), b"apart")) == (0, 9)


def test_what_is_damaged_is_not_whole(tmp_path: Path) -> None:
    filled(tmp_path / "a").close()
    for segment in (tmp_path / "a" / "segments").iterdir():
        segment.write_bytes(bytes(segment.stat().st_size))
    with (
        KVStore(tmp_path / "a", identity(), config(), read_only=True) as source,
        KVStore(tmp_path / "b", identity(), config()) as target,
    ):
        report = copy_store(source, target)
        assert (report.left, report.short > 0, report.new_tokens) == (0, True, 0)


def test_stores_of_two_models_are_not_merged(tmp_path: Path) -> None:
    with (
        filled(tmp_path / "a") as source,
        KVStore(tmp_path / "b", identity(KVLayout.uniform(1, 1, 4)), config()) as target,
    ):
        with pytest.raises(IdentityMismatch, match="another identity"):
            copy_store(source, target)
        assert len(target) == 0


@pytest.mark.parametrize("layout", [WINDOWED, ALTERNATING, WITH_WINDOWS], ids=["windows", "states", "both"])
def test_windows_and_states_arrive_with_every_end(layout: KVLayout, tmp_path: Path) -> None:
    ids = np.arange(50, dtype=np.uint32)
    of, same = (cache_of, is_state_of) if layout.states else (kept, is_kept)
    settings = config(segment_bytes=1 << 20, disk=64 << 20)
    with KVStore(tmp_path / "a", identity(layout), settings) as source:
        ends = (13, 26, 50)
        for end in ends:
            kv: Any = of(ids[:end], layout)
            source.put(ids[:end], kv)
        source.flush()
        want = [source.contains(ids[:end]) for end in range(1, 51)]
        with KVStore(tmp_path / "b", identity(layout), settings) as target:
            assert copy_store(source, target).short == 0
            assert [target.contains(ids[:end]) for end in ends] == list(ends)
            assert all(mine <= its for mine, its in zip(want, map(target.contains, _starts(ids)), strict=True))
            assert all(same(target.get(ids[:end]), ids, layout) for end in ends)  # type: ignore[arg-type]


def _starts(ids: np.ndarray) -> list[np.ndarray]:
    return [ids[:end] for end in range(1, len(ids) + 1)]


def test_one_file_brings_a_store_to_another_machine(tmp_path: Path) -> None:
    with filled(tmp_path / "a") as source:
        report, nbytes = export_store(source, str(tmp_path / "file"), Choice())
        assert nbytes == (tmp_path / "file").stat().st_size
    assert report.sequences == 4
    assert import_bundle(str(tmp_path / "file"), str(tmp_path / "b"), config()).short == 0
    with KVStore(tmp_path / "b", identity(), config()) as target:
        assert stored(target, tokens_of(2, 21)) == 21
        assert sorted(each.id for each in target.sessions()) == ["alice", "bob"]
        all_is_well(target, deep=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "file"]


def test_an_import_merges(tmp_path: Path) -> None:
    with filled(tmp_path / "a") as source:
        export_store(source, str(tmp_path / "file"), Choice(prefixes=(tokens_of(1, 4),)))
    with KVStore(tmp_path / "b", identity(), config()) as target:
        put(target, tokens_of(7, 11))
    import_bundle(str(tmp_path / "file"), str(tmp_path / "b"), config())
    with KVStore(tmp_path / "b", identity(), config()) as target:
        assert (stored(target, tokens_of(7, 11)), stored(target, tokens_of(1, 21))) == (11, 21)
        assert target.contains(tokens_of(2, 21)) == 0


def test_a_second_backup_adds_what_is_new(tmp_path: Path) -> None:
    with filled(tmp_path / "a") as source:
        assert backup_store(source, str(tmp_path / "b")).new_tokens == 58
        put(source, tokens_of(9, 8))
        assert backup_store(source, str(tmp_path / "b")).new_tokens == 8
    with KVStore(tmp_path / "b", identity(), config(disk=64 << 20)) as target:
        all_is_well(target, deep=True)


def test_compact_gives_files_back_and_keeps_every_block(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        for number in range(1, 31):
            put(store, tokens_of(number, 40))
            store.flush()
        for number in range(1, 31):
            if number % 3:
                store.delete(tokens_of(number, 40))
        before, segments = disk_use(tmp_path), store.stats()["disk"]["segments"]
        assert store.compact(move=False).moved_records == 0
        done = store.compact()
        assert done.moved_records > 0
        assert store.stats()["disk"]["segments"] < segments / 2
        assert disk_use(tmp_path) < before
        all_is_well(store, deep=True)
        assert [stored(store, tokens_of(number, 40)) for number in range(3, 31, 3)] == [40] * 10
        put(store, tokens_of(99, 40))
        store.flush()
        assert stored(store, tokens_of(99, 40)) == 40


def test_compact_removes_what_has_expired(tmp_path: Path, clock: list[float]) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        put(store, tokens_of(1, 8), ttl=10.0)
        store.flush()
        clock[0] = 11.0
        assert store.compact().expired_records == 2
        assert len(store) == 0
