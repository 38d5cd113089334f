"""Profiles in a store: records name theirs, the store keeps copies, and what is missing is a counted miss."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.codecs import Codec, Profile, registry
from kvstore.codecs.aqua.predictors import AquaPredictors, weight_shapes
from kvstore.codecs.raw import RawCodec
from kvstore.config import KIB, MIB
from kvstore.core.record import parse
from kvstore.errors import ConfigError, ProfileError
from kvstore.tiers.disk.fs import FileSystem

BLOCK = 8
LAYOUT = KVLayout.uniform(2, 2, 16, rope='{"rope_theta": 10000.0, "rope_type": "default"}')
EXACT = ModelIdentity("m", "r", "w", "t", LAYOUT)
NO_TIER = TierConfig(0)
LOSSY = replace(EXACT, codec_family="lossy")
TOKENS = np.arange(3 * BLOCK + 3, dtype=np.uint32)


def aqua(seed: int = 0) -> dict[str, np.ndarray]:
    """Predictors that predict little; profiles of different seeds have different ids."""
    rng = np.random.default_rng(seed)
    weights = [[rng.normal(0, 0.01, shape).astype(np.float16) for shape in pair] for pair in weight_shapes(LAYOUT)]
    return AquaPredictors(LAYOUT, tuple((key, value) for key, value in weights)).to_arrays()


def profile(seed: int = 0, **sections: Any) -> Profile:
    return Profile.new(EXACT, {"aqua": aqua(seed), **sections})


def saved(made: Profile, folder: Path) -> Path:
    made.save(folder / made.id.hex())
    return folder / made.id.hex()


def kv() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    shape = (2, len(TOKENS), 16)
    return [(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in LAYOUT.layers]


def opened(
    path: Path,
    codec: str = "aqua@4",
    given: Path | None = None,
    *,
    identity: ModelIdentity = LOSSY,
    host: TierConfig = NO_TIER,
    **options: Any,
) -> KVStore:
    disk = TierConfig(0) if codec == "none" else TierConfig(4 * MIB, codec)
    config = StoreConfig(host=host, disk=disk, block_tokens=BLOCK, segment_bytes=64 * KIB, profile=given)
    return KVStore(path, identity, config, **options)


def put(store: KVStore, tokens: np.ndarray = TOKENS) -> None:
    store.put(tokens, [(k[:, : len(tokens)], v[:, : len(tokens)]) for k, v in kv()])
    store.flush()


def error(store: KVStore) -> float:
    """Mean square error of what a get returns; NaN where that is not everything."""
    hit = store.get(TOKENS)
    if hit is None or hit.tokens != len(TOKENS):
        return math.nan
    pairs = [pair for found, wanted in zip(hit.layers, kv(), strict=True) for pair in zip(found, wanted, strict=True)]
    return float(np.mean([(a[0].float() - b.float()).square().mean() for a, b in pairs]))


def counters(store: KVStore) -> dict[str, float]:
    found: dict[str, float] = store.stats()["counters"]
    return found


class Full(FileSystem):
    """Has no room for profiles."""

    def open(self, path: str, flags: int) -> int:
        if path.endswith(".safetensors.new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(path, flags)


def headers(store: KVStore) -> list[Any]:
    """Of all records on disk."""
    disk = store._residency.disk
    assert disk is not None
    entries = disk.locate(disk.catalog.scan().entries["record"].tolist())
    found = []
    for entry in entries:
        assert entry is not None
        buffer = store._engine.pool.take(entry.extent.nbytes)
        disk.read([entry], [buffer])
        found.append(parse(buffer.view, len(buffer.view)))
    disk.release([entry for entry in entries if entry is not None])
    return found


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return saved(profile(), tmp_path)


@pytest.fixture
def store(tmp_path: Path, given: Path) -> Iterator[Path]:
    """A closed store whose records need `profile()`; the profile's own file is gone."""
    with opened(tmp_path / "store", given=given) as made:
        put(made)
    given.unlink()
    return tmp_path / "store"


# ---- what is written -------------------------------------------------------------------------------------------------


def test_records_name_the_profile_and_a_bound(store: Path) -> None:
    with opened(store) as again:
        found = headers(again)
    assert len(found) == 4
    for header in found:
        assert (header.codec, header.profile, header.error_bound) == (5, profile().id, math.inf)


def test_records_of_codecs_without_a_profile_name_none(tmp_path: Path, given: Path) -> None:
    with opened(tmp_path / "store", "entropy", given, identity=EXACT) as made:
        put(made)
        assert {(h.codec, h.profile, h.error_bound) for h in headers(made)} == {(7, bytes(16), 0.0)}
        assert error(made) == 0
    assert not (tmp_path / "store" / "profiles").exists()


def test_the_store_keeps_the_profile_before_the_first_record(tmp_path: Path, given: Path) -> None:
    with opened(tmp_path / "store", given=given):
        folder = tmp_path / "store" / "profiles"
        kept = folder / f"{profile().id.hex()}.safetensors"
        assert kept.read_bytes() == given.read_bytes()
        assert (folder / "newest").read_text() == profile().id.hex() + "\n"
        assert len(list(folder.iterdir())) == 2


def test_an_error_bound_that_the_codec_knows_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RawCodec, "exact", False)
    monkeypatch.setattr(RawCodec, "error_bound", lambda _self, payload, sizes: len(payload) / 1024 + len(sizes))
    with opened(tmp_path / "store", "raw") as made:
        put(made, TOKENS[:BLOCK])
        assert [h.error_bound for h in headers(made)] == [BLOCK * LAYOUT.bytes_per_token / 1024 + 2]


# ---- reading it again ------------------------------------------------------------------------------------------------


def test_a_later_open_needs_no_profile(store: Path) -> None:
    with opened(store) as again:
        assert 0 < error(again) < 0.02
        assert {"unknown_profile", "damaged_profiles"}.isdisjoint(counters(again))


def test_reading_needs_no_codec_of_that_kind_in_the_settings(store: Path) -> None:
    with opened(store, "entropy") as again:
        assert 0 < error(again) < 0.02
    with opened(store, "entropy", read_only=True) as reader:
        assert 0 < error(reader) < 0.02


def test_new_records_use_the_newest_profile_and_old_ones_theirs(store: Path, tmp_path: Path) -> None:
    more = np.concatenate([TOKENS[: 2 * BLOCK], TOKENS[: 2 * BLOCK]])
    with opened(store, given=saved(profile(1), tmp_path)) as second:
        second.put(more, [(k[:, : len(more)].repeat(1, 2, 1)[:, : len(more)],) * 2 for k, _ in kv()])
        second.flush()
    with opened(store) as third:
        by_profile = [header.profile for header in headers(third)]
        assert by_profile.count(profile(0).id) == 4
        assert by_profile.count(profile(1).id) == 2
        assert third.get(more).tokens == len(more)  # records of both
        assert 0 < error(third) < 0.02
        third.put(TOKENS[::-1].copy(), kv())
        third.flush()
        assert profile(1).id in {header.profile for header in headers(third)[6:]}


def test_records_keep_their_profile_through_memory(store: Path) -> None:
    """The host tier takes records from disk as they are; also with its own codec it reads them by their profile."""
    with opened(store, host=TierConfig(1 * MIB, "auto")) as again:
        again.prefetch(TOKENS).result()
        assert again.stats()["host"]["records"] == 4
        hit = again.get(TOKENS)
        assert hit.tiers == {"host": len(TOKENS)}
        assert 0 < error(again) < 0.02


def test_a_store_in_memory_codes_with_the_profile(tmp_path: Path, given: Path) -> None:
    with opened(tmp_path / "store", "none", given, host=TierConfig(1 * MIB, "aqua@3")) as made:
        put(made)
        assert 0 < error(made) < 0.1
        assert made.stats()["host"]["records"] == 4
    assert not (tmp_path / "store").exists()


def test_host_and_disk_share_a_record_of_the_same_codec(tmp_path: Path, given: Path) -> None:
    with opened(tmp_path / "store", given=given, host=TierConfig(1 * MIB, "aqua@4")) as made:
        put(made)
        assert 0 < error(made) < 0.02
        (host,) = {made._residency.host.get(record).header.profile for record in (1, 2, 3, 4)}
        assert host == profile().id


# ---- settings --------------------------------------------------------------------------------------------------------


class Predictive(RawCodec):
    """In place of the predictive codec: raw with its number."""

    id, name = 2, "predictive"

    def __init__(self, profile: bytes) -> None:
        self.profile = profile


@pytest.fixture
def predictive(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(found: Profile, _quality: str | None) -> Codec:
        assert found.section("lossless")
        return Predictive(found.id)

    families = registry.REGISTRY.families
    monkeypatch.setitem(families, "predictive", replace(families["predictive"], make=make))


@pytest.mark.usefixtures("predictive")
def test_auto_is_predictive_where_the_profile_has_it_and_entropy_else(tmp_path: Path) -> None:
    with_lossless = profile(lossless={"x": np.zeros(1, np.int8)})
    for folder, given, number in (("a", None, 7), ("b", profile(), 7), ("c", with_lossless, 2)):
        path = None if given is None else saved(given, tmp_path)
        with opened(tmp_path / folder, "auto", path, identity=EXACT, host=TierConfig(1 * MIB, "auto")) as made:
            put(made)
            assert {(h.codec, h.profile) for h in headers(made)} == {(number, given.id if number == 2 else bytes(16))}
            assert made._residency.host.get(1).header.codec == 1
            assert error(made) == 0
    with opened(tmp_path / "c", "auto", identity=EXACT) as again:  # its own copy is enough to go on
        put(again, TOKENS[::-1].copy())
        assert {h.codec for h in headers(again)} == {2}


def test_the_disk_is_automatic_by_default() -> None:
    assert (StoreConfig().disk.codec, StoreConfig().profile) == ("auto", None)


@pytest.mark.parametrize("codec", ["aqua@2", "predictive", "predictive@0.75"])
def test_a_missing_profile_is_an_error_before_anything_is_made(codec: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=f"codec '{codec}' needs a profile .*kvstore calibrate"):
        opened(tmp_path / "store", codec)
    assert not (tmp_path / "store").exists()


def test_a_bad_profile_is_an_error_before_anything_is_made(tmp_path: Path, given: Path) -> None:
    other = replace(LOSSY, weights="other")
    for path, identity, message in (
        (tmp_path / "none", LOSSY, "cannot be read"),
        (given, other, "another model"),
        (saved(Profile.new(EXACT, {}), tmp_path), LOSSY, "no section 'aqua'"),
        (saved(Profile.new(EXACT, {"aqua": {"key.1": aqua()["key.1"]}}), tmp_path), LOSSY, "missing"),
    ):
        with pytest.raises(ProfileError, match=message):
            opened(tmp_path / "store", given=path, identity=identity)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_lossy_codecs_need_an_identity_of_their_own(tier: str, tmp_path: Path, given: Path) -> None:
    codecs = {"disk": ("aqua@2", TierConfig(1 * MIB, "raw")), "host": ("raw", TierConfig(1 * MIB, "aqua@2"))}
    disk, host = codecs[tier]
    with pytest.raises(ConfigError, match=rf"{tier}\.codec: 'aqua@2' is lossy.*replace\(identity, codec_family="):
        opened(tmp_path / "store", disk, given, identity=EXACT, host=host)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("codec", ["aqua", "aqua@", "aqua@5", "predictive@", "predictive@x", "predictive@0", "raw@2"])
def test_names_that_are_no_codec_are_refused(codec: str, tmp_path: Path, given: Path) -> None:
    with pytest.raises(ConfigError, match=rf"disk\.codec: codec '{codec}' is unknown"):
        opened(tmp_path / "store", codec, given)


def test_a_profile_that_nothing_is_coded_with_is_not_read(store: Path) -> None:
    (store / "profiles" / "newest").write_bytes(b"")
    with opened(store, "entropy") as again:
        assert "damaged_profiles" not in counters(again)
    with opened(store, "auto") as again:
        assert counters(again)["damaged_profiles"] == 1


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_records_of_an_unknown_profile_are_misses_and_stay(store: Path, tmp_path: Path) -> None:
    shutil.move(store / "profiles", tmp_path / "aside")
    with opened(store, "entropy") as without:
        assert without.get(TOKENS) is None
        assert counters(without)["unknown_profile"] == 4
        assert "quarantined_records" not in counters(without)
        assert without.contains(TOKENS) == len(TOKENS)
        shutil.copytree(tmp_path / "aside", store / "profiles")
        assert 0 < error(without) < 0.02


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another", "folder"])
def test_a_damaged_copy_is_counted_once_and_its_records_are_misses(damage: str, store: Path) -> None:
    path = store / "profiles" / f"{profile().id.hex()}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    contents = {"cut": data[:-1], "flipped": data, "empty": b"", "another": profile(1).data}
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(contents[damage])
    with opened(store, "auto") as again:
        for _ in range(2):
            assert again.get(TOKENS) is None
        found = counters(again)
        assert (found["damaged_profiles"], found["unknown_profile"]) == (1, 2 * 4)
        assert "quarantined_records" not in found
        put(again, TOKENS[::-1].copy())
    with pytest.raises(ProfileError, match="needs a profile"):
        opened(store)


def test_a_damaged_copy_is_replaced_by_the_profile_that_is_given(store: Path, tmp_path: Path) -> None:
    path = store / "profiles" / f"{profile().id.hex()}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with opened(store, given=saved(profile(), tmp_path)) as again:
        assert 0 < error(again) < 0.02
    with opened(store) as later:
        assert 0 < error(later) < 0.02
        assert "damaged_profiles" not in counters(later)


@pytest.mark.parametrize("note", [b"", b"zz", b"00", b"00" * 99, "\xff".encode("latin-1")])
def test_a_damaged_note_of_the_newest_is_counted_and_records_are_read(note: bytes, store: Path) -> None:
    (store / "profiles" / "newest").write_bytes(note)
    with opened(store, "auto") as again:
        assert counters(again)["damaged_profiles"] == 1
        assert 0 < error(again) < 0.02


def test_a_profile_without_what_a_record_needs_makes_it_a_miss(tmp_path: Path, given: Path) -> None:
    with opened(tmp_path / "store", given=given) as made:
        put(made)
        made._engine.getter.fetcher.decoder.profiles._decoders.clear()
        made._engine.getter.fetcher.decoder.profiles._loaded[profile().id] = Profile.new(EXACT, {})
        assert made.get(TOKENS) is None
        assert counters(made)["unknown_profile"] == 4
        assert "quarantined_records" not in counters(made)


def test_a_disk_that_refuses_the_copy_is_coded_without_it(tmp_path: Path, given: Path) -> None:
    full = Full()
    with opened(tmp_path / "store", given=given, fs=full) as made:
        put(made)
        assert counters(made)["fallback_profile"] == counters(made)["disk_write_errors"] == 1
        assert {h.codec for h in headers(made)} == {7}
        assert error(made) == 0
    with opened(tmp_path / "store", given=given) as again:
        assert "fallback_profile" not in counters(again)
