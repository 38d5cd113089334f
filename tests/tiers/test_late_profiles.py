"""Opening a store reads the header of a profile alone; the numbers are read, and checked, when a block needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import profile_stores
import pytest
import small_stores
from threadruns import run_together

from kvstore import KVStore
from kvstore.codecs.profile import Profile, ProfileFile
from kvstore.errors import ProfileError
from kvstore.tiers.disk.fs import FileSystem

TOKENS, OTHERS = profile_stores.tokens_of(1, 128), profile_stores.tokens_of(2, 128)


class Watched(FileSystem):
    """Counts the bytes that are read of copies of profiles."""

    def __init__(self) -> None:
        self.read = 0
        self._profiles: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._profiles.discard(fd)
        if path.endswith(".safetensors"):
            self._profiles.add(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().preadv(fd, buffers, offset)
        self.read += got if fd in self._profiles else 0
        return got


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return profile_stores.save(0, tmp_path)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of profiles that were given and read whole."""
    found: list[str] = []
    whole = ProfileFile.whole

    def watched(self: ProfileFile) -> Profile:
        found.append(self.path)
        return whole(self)

    monkeypatch.setattr(ProfileFile, "whole", watched)
    return found


@pytest.fixture
def store(tmp_path: Path, given: Path) -> Path:
    """A closed store with one sequence, coded with the profile."""
    with profile_stores.open_store(tmp_path / "store", given) as made:
        put(made, TOKENS)
        assert codecs(made) == {2}
    return tmp_path / "store"


def put(store: KVStore, tokens: Any) -> None:
    store.put(tokens, profile_stores.kv_of(tokens))
    store.flush()


def counters(store: KVStore) -> dict[str, float]:
    found: dict[str, float] = store.stats()["counters"]
    return found


def codecs(store: KVStore) -> set[int]:
    """The numbers of the codecs of all records on disk."""
    disk = store._residency.disk
    assert disk is not None
    entries = [entry for entry in disk.locate(disk.catalog.scan().entries["record"].tolist()) if entry is not None]
    found = {entry.codec_id for entry in entries}
    disk.release(entries)
    return {number for number in found if number is not None}


def copy_of(store: Path) -> Path:
    (found,) = (store / "profiles").glob("*.safetensors")
    return found


def spoil(path: Path) -> None:
    """Makes a number of a profile a NaN. Its header stays good."""
    profile = Profile.load(path)
    data = bytearray(profile.data)
    entry = next(entry for entry in profile.head.entries if entry.dtype.kind == "f")
    begin = len(profile.head.raw) + entry.begin
    data[begin : begin + 4] = b"\xff" * 4
    path.write_bytes(data)


# ---- what is read when -----------------------------------------------------------------------------------------------


def test_an_open_reads_the_header_of_the_stores_own_profile_alone(store: Path) -> None:
    head = len(Profile.load(copy_of(store)).head.raw)
    with profile_stores.open_store(store, fs=(fs := Watched())) as again:
        assert fs.read <= head + 8
        assert profile_stores.stored(again, TOKENS) == len(TOKENS)
        after = fs.read
        assert after >= copy_of(store).stat().st_size
        put(again, OTHERS)
        assert codecs(again) == {2}
        assert fs.read == after


def test_an_open_reads_the_header_of_a_given_profile_alone(store: Path, given: Path, loads: list[str]) -> None:
    with profile_stores.open_store(store, given, fs=(fs := Watched())) as again:
        assert not loads
        assert fs.read < copy_of(store).stat().st_size
        put(again, OTHERS)
        assert loads == [str(given)]
        assert codecs(again) == {2}
        assert profile_stores.stored(again, OTHERS) == len(OTHERS)
        assert loads == [str(given)]


def test_the_first_open_with_a_profile_keeps_a_copy(tmp_path: Path, given: Path) -> None:
    with profile_stores.open_store(tmp_path / "store", given):
        assert copy_of(tmp_path / "store").read_bytes() == given.read_bytes()


def test_another_profile_of_the_same_header_is_kept_before_a_record_names_it(store: Path, tmp_path: Path) -> None:
    other = profile_stores.save(1, tmp_path)
    with profile_stores.open_store(store, other) as again:
        put(again, OTHERS)
    other.unlink()
    with profile_stores.open_store(store) as later:
        assert profile_stores.stored(later, TOKENS) == len(TOKENS)
        assert profile_stores.stored(later, OTHERS) == len(OTHERS)
    assert len(list((store / "profiles").glob("*.safetensors"))) == 2


def test_threads_that_need_it_at_once_read_it_once(store: Path) -> None:
    with profile_stores.open_store(store, fs=(fs := Watched())) as again:
        before = fs.read

        def work(number: int) -> None:
            if number % 2:
                put(again, profile_stores.tokens_of(10 + number, 64))
            else:
                assert profile_stores.stored(again, TOKENS) == len(TOKENS)

        run_together(*(partial(work, number) for number in range(8)))
        profile = copy_of(store)
        assert fs.read - before <= profile.stat().st_size + len(Profile.load(profile).head.raw) + 8
        assert codecs(again) == {2}


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_header_that_is_wrong_is_an_error_that_changes_nothing(tmp_path: Path, given: Path) -> None:
    data = given.read_bytes()
    settings = small_stores.config(codec="predictive", profile=given, block_tokens=64)
    for wrong in (b"", data[:-1], data[:100], b"{" + data):
        given.write_bytes(wrong)
        with pytest.raises(ProfileError):
            KVStore(tmp_path / "store", small_stores.IDENTITY, settings)
    given.write_bytes(data)
    with pytest.raises(ProfileError, match="another model"):
        KVStore(tmp_path / "store", replace(small_stores.IDENTITY, weights="other"), settings)
    given.unlink()
    with pytest.raises(ProfileError, match="cannot be read"):
        KVStore(tmp_path / "store", small_stores.IDENTITY, settings)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("change", ["spoilt", "cut", "gone"])
def test_a_given_profile_that_turns_out_damaged_is_counted_and_not_coded_with(
    change: str, store: Path, given: Path
) -> None:
    if change == "spoilt":
        spoil(given)
    with profile_stores.open_store(store, given) as again:
        assert "damaged_profiles" not in counters(again)
        if change == "cut":
            given.write_bytes(given.read_bytes()[:-1])
        elif change == "gone":
            given.unlink()
        put(again, OTHERS)
        assert counters(again)["fallback_profile"] == counters(again)["damaged_profiles"] == 1
        assert codecs(again) == {2, 7}
        for tokens in (TOKENS, OTHERS):
            assert profile_stores.stored(again, tokens) == len(tokens)


def test_the_stores_own_profile_that_turns_out_damaged_is_counted_and_its_records_stay(store: Path) -> None:
    spoil(copy_of(store))
    with profile_stores.open_store(store) as again:
        assert "damaged_profiles" not in counters(again)
        assert profile_stores.stored(again, TOKENS) == 0
        put(again, OTHERS)
        assert profile_stores.stored(again, OTHERS) == len(OTHERS)
        found = counters(again)
        assert found["damaged_profiles"] == found["fallback_profile"] == 1
        assert found["unknown_profile"] == 2
        assert "quarantined_records" not in found
        assert codecs(again) == {2, 7}


def test_a_given_profile_stands_in_for_a_damaged_copy_and_mends_it(store: Path, given: Path) -> None:
    spoil(copy_of(store))
    with profile_stores.open_store(store, given) as again:
        assert profile_stores.stored(again, TOKENS) == len(TOKENS)
        assert counters(again)["damaged_profiles"] == 1
        put(again, OTHERS)
        assert "fallback_profile" not in counters(again)
    with profile_stores.open_store(store) as later:
        assert profile_stores.stored(later, TOKENS) == profile_stores.stored(later, OTHERS) == len(TOKENS)
        assert "damaged_profiles" not in counters(later)
