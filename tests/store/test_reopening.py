"""Finding 16, "Reopening": a store that exists says how large its parts are, and names are not what it is bound to."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_stores
import torch
import xxhash

from kvstore import KVStore, ModelIdentity
from kvstore.codecs import Profile
from kvstore.errors import ConfigError, CorruptStore, IdentityMismatch, ProfileError, StoreNotFound
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.superblock import Superblock

TOKENS, MORE = small_stores.tokens_of(1, 10), small_stores.tokens_of(2, 10)
IDENTITY = small_stores.IDENTITY
NAMED = replace(IDENTITY, tokenizer="t1")


def made(path: Path, identity: ModelIdentity = IDENTITY) -> Path:
    with KVStore(path, identity, small_stores.config()) as store:
        small_stores.put(store, TOKENS)
    return path


# ---- what the store says is taken ------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"segment_bytes": 128 << 10}, {"block_tokens": 8}], ids=str)
@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
def test_other_sizes_than_those_of_the_store_are_no_mismatch(
    tmp_path: Path, settings: dict[str, int], read_only: bool
) -> None:
    config = small_stores.config(**settings)
    with KVStore(made(tmp_path), IDENTITY, config, read_only=read_only) as store:
        assert (store.config.segment_bytes, store.config.block_tokens) == (small_stores.SEGMENT, small_stores.BLOCK)
        assert small_stores.stored(store, TOKENS) == 10
        if not read_only:
            small_stores.put(store, MORE)
            store.flush()
            small_stores.all_is_well(store, deep=True)
    with KVStore(tmp_path, IDENTITY, small_stores.config()) as store:
        assert small_stores.stored(store, MORE) == (0 if read_only else 10)


def test_a_budget_below_the_segments_of_the_store_is_refused_by_name(tmp_path: Path) -> None:
    with KVStore(tmp_path, IDENTITY, small_stores.config(disk=1 << 30, segment_bytes=1 << 20)) as store:
        small_stores.put(store, TOKENS)
    with pytest.raises(ConfigError, match=r"was made with; disk\.bytes.* 3 segments of 1048576 bytes .*set it to"):
        KVStore(tmp_path, IDENTITY, small_stores.config(disk=1 << 20, segment_bytes=64 << 10))


# ---- names are labels ------------------------------------------------------------------------------------------------

LABELS: dict[str, dict[str, Any]] = {
    "renamed-folder": {"model": "/models/moved/here"},
    "other-revision": {"revision": "abc123"},
    "both": {"model": "x", "revision": "y"},
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
def test_a_renamed_checkpoint_is_the_same_model(tmp_path: Path, labels: dict[str, str], read_only: bool) -> None:
    made(tmp_path)
    with KVStore(tmp_path, replace(IDENTITY, **labels), small_stores.config(), read_only=read_only) as store:
        assert small_stores.stored(store, TOKENS) == 10
        if read_only:
            return
        small_stores.put(store, MORE)
        store.flush()
        small_stores.all_is_well(store, deep=True)
    with KVStore(tmp_path, IDENTITY, small_stores.config()) as store:  # keys are still those of the first name
        assert small_stores.stored(store, TOKENS) == small_stores.stored(store, MORE) == 10
        small_stores.all_is_well(store, deep=True)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_without_a_fingerprint_of_the_weights_names_tell_models_apart(tmp_path: Path, labels: dict[str, str]) -> None:
    unknown = replace(IDENTITY, weights="")
    made(tmp_path, unknown)
    for other in (replace(unknown, **labels), replace(IDENTITY, **labels)):
        with pytest.raises(IdentityMismatch, match=next(iter(labels))):
            KVStore(tmp_path, other, small_stores.config())


def test_a_profile_of_the_model_under_another_name_is_its_profile() -> None:
    profile = Profile.new(IDENTITY, {"mine": {"scale": np.ones(3, np.float32)}})
    profile.check_identity(replace(IDENTITY, model="elsewhere", revision="another", codec_family="lossy"))
    with pytest.raises(ProfileError, match="weights"):
        profile.check_identity(replace(IDENTITY, model="elsewhere", weights="another"))


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(IDENTITY, NAMED), (NAMED, IDENTITY)], ids=["named-later", "named-once"])
def test_a_tokenizer_that_is_named_only_once_is_no_mismatch(
    tmp_path: Path, first: ModelIdentity, then: ModelIdentity
) -> None:
    made(tmp_path, first)
    for identity in (then, first, then):
        with KVStore(tmp_path, identity, small_stores.config()) as store:
            assert small_stores.stored(store, TOKENS) == 10
            small_stores.all_is_well(store, deep=True)
    with pytest.raises(IdentityMismatch, match="tokenizer: stored 't1', given 't2'"):
        KVStore(tmp_path, replace(IDENTITY, tokenizer="t2"), small_stores.config())


def test_a_reader_names_no_tokenizer(tmp_path: Path) -> None:
    made(tmp_path)
    KVStore(tmp_path, NAMED, small_stores.config(), read_only=True).close()
    KVStore(tmp_path, replace(IDENTITY, tokenizer="t2"), small_stores.config()).close()


@pytest.mark.parametrize("copy", ["store.json", "store.json.copy"])
def test_a_crash_while_a_tokenizer_is_noted_costs_no_key(tmp_path: Path, copy: str) -> None:
    before = (made(tmp_path / "store") / copy).read_bytes()
    KVStore(tmp_path / "store", NAMED, small_stores.config()).close()
    (tmp_path / "store" / copy).write_bytes(before)  # only the other copy was replaced
    superblock = Superblock.read(FileSystem(), str(tmp_path / "store"))
    assert superblock is not None
    assert superblock.digest == IDENTITY.digest
    with KVStore(tmp_path / "store", NAMED, small_stores.config()) as store:
        assert small_stores.stored(store, TOKENS) == 10


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with KVStore("~/mine", IDENTITY, small_stores.config()) as store:
        assert store.path == str(tmp_path / "mine")
    assert sorted(os.listdir(tmp_path)) == ["mine"]


def test_a_store_stays_where_it_is_when_the_program_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with KVStore("here", IDENTITY, small_stores.config()) as store:
        monkeypatch.chdir(tmp_path / "other")
        small_stores.put(store, TOKENS)
        store.flush()
    assert os.listdir(tmp_path / "other") == []


def test_the_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    made(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with KVStore(tmp_path / "link", IDENTITY, small_stores.config()) as store:
        assert small_stores.stored(store, TOKENS) == 10


@pytest.mark.parametrize("present", [False, True], ids=["no-folder", "empty-folder"])
def test_a_missing_store_that_is_to_be_read_says_so(tmp_path: Path, present: bool) -> None:
    path = tmp_path / "nothing"
    if present:
        path.mkdir()
    with pytest.raises(StoreNotFound, match="read_only=True makes none; open it for writing first"):
        KVStore(path, IDENTITY, small_stores.config(), read_only=True)
    assert path.exists() == present


def test_a_store_without_its_superblock_is_still_called_damaged(tmp_path: Path) -> None:
    made(tmp_path)
    for name in ("store.json", "store.json.copy"):
        (tmp_path / name).unlink()
    with pytest.raises(CorruptStore, match=r"store\.json is missing"):
        KVStore(tmp_path, IDENTITY, small_stores.config(), read_only=True)


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_path_that_is_a_file_is_refused_and_named(tmp_path: Path, name: str, read_only: bool) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"^path: .*/file.* is a file; name a folder"):
        KVStore(tmp_path / name, IDENTITY, small_stores.config(), read_only=read_only)
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("path", ["", "with\0zero", 5, None, ["a"], b"/tmp/no-utf8-\xff"], ids=repr)
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^path: expected the name of a folder"):
        KVStore(path, IDENTITY, small_stores.config())


# ---- devices ---------------------------------------------------------------------------------------------------------


MISSING = ["cuda:63", torch.device("cuda", 62), "meta", *([] if torch.cuda.is_available() else ["cuda", "cuda:0"])]


@pytest.mark.parametrize("device", MISSING, ids=str)
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path: Path, device: Any) -> None:
    with KVStore(made(tmp_path), IDENTITY, small_stores.config()) as store:
        for tokens in (TOKENS, MORE):  # whether or not anything is stored
            with pytest.raises(ConfigError, match=r"^device: .*cannot be used here.*omit it"):
                store.get(tokens, device=device)
        assert small_stores.stored(store, TOKENS) == 10
        small_stores.all_is_well(store)


def test_a_superblock_of_today_is_read_whatever_is_named(tmp_path: Path) -> None:
    """The bytes of a store that never had a tokenizer are those of before."""
    made(tmp_path)
    line, check = (tmp_path / "store.json").read_bytes().splitlines()
    assert b'"tokenizer": ""' in line
    assert line.count(b"tokenizer") == 1
    assert check.decode() == xxhash.xxh3_128_hexdigest(line + b"\n")
    shutil.copytree(tmp_path, tmp_path / "copy")


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_a_store_made_among_other_files_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for _ in range(2):
        KVStore(tmp_path, IDENTITY, small_stores.config()).close()
    (record,) = [each for each in caplog.records if each.name == "kvstore.folder_not_empty"]
    assert record.levelname == "WARNING"
    assert f"{tmp_path}: the folder is not empty and holds no store (thesis.txt, ...)" in record.getMessage()
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("present", [(), ("lost+found",), ("segments", "notes"), ("writer.lock",)], ids=str)
def test_a_folder_of_its_own_is_no_matter(
    tmp_path: Path, present: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for name in present:
        (tmp_path / name).touch() if name == "writer.lock" else (tmp_path / name).mkdir()
    KVStore(tmp_path, IDENTITY, small_stores.config()).close()
    assert "folder_not_empty" not in caplog.text


def test_what_stands_in_place_of_segments_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "segments")
    with pytest.raises(ConfigError, match="segments is a FIFO; name a folder"):
        KVStore(tmp_path, IDENTITY, small_stores.config())
