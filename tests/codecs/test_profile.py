"""A profile comes back as it was made, or is refused with a reason; hostile files never crash."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from safetensors import safe_open
from safetensors.numpy import save

from kvstore import KVLayout, ModelIdentity
from kvstore.codecs.profile import Profile, ProfileFile
from kvstore.codecs.profile_head import MAX_HEADER_BYTES
from kvstore.errors import ProfileError

IDENTITY = ModelIdentity("model", "1", "aa", "tok", KVLayout.uniform(2, 1, 4))
SECTIONS = {
    "lossless": {"0.k.scale": np.arange(4, dtype=np.int16), "freqs": np.full((2, 3), 7, np.uint16)},
    "aqua": {"weights": np.linspace(-1, 1, 10, dtype=np.float16).reshape(2, 5), "none": np.empty((0, 3), np.float32)},
}
REPORT = {"lossless": {"bits_per_value": 8.25}, "curve": [[1, 9.0], [2, 8.5]]}


def make(**changes: Any) -> Profile:
    return Profile.new(**{"identity": IDENTITY, "sections": SECTIONS, "report": REPORT, **changes})


def patched(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The bytes of a profile whose header was changed."""
    data = make().data
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    made = make(versions={"torch": "2"})
    made.save(tmp_path / "p")
    read = Profile.load(tmp_path / "p", IDENTITY)
    assert read.sections == ("aqua", "lossless")
    for section, arrays in SECTIONS.items():
        assert read.section(section).keys() == arrays.keys()
        for name, array in arrays.items():
            found = read.section(section)[name]
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)
            assert found.shape == array.shape
    assert (read.report, read.versions, read.layout) == (REPORT, {"torch": "2"}, IDENTITY.layout)
    assert read.id == made.id == xxhash.xxh3_128_digest((tmp_path / "p").read_bytes())
    assert read.section_bytes("lossless") == 8 + 12
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_equal_contents_give_equal_bytes() -> None:
    turned = {section: dict(reversed(arrays.items())) for section, arrays in reversed(SECTIONS.items())}
    turned["lossless"]["freqs"] = np.full((3, 2), 7, ">u2").T
    assert make(sections=turned).data == make().data
    assert make(report={}).id != make().id


def test_arrays_cannot_be_written_into() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make().section("lossless")["freqs"][0] = 1


def test_safetensors_reads_it(tmp_path: Path) -> None:
    make().save(tmp_path / "p")
    with safe_open(tmp_path / "p", "numpy") as file:
        assert np.array_equal(file.get_tensor("aqua/weights"), SECTIONS["aqua"]["weights"])
        assert file.metadata()["format"] == "kvstore-profile"
        assert json.loads(file.metadata()["identity"]) == IDENTITY.fields()
        assert len(file.keys()) == 4


def test_what_safetensors_writes_is_read() -> None:
    texts = {"format": "kvstore-profile", "version": "1", "report": "{}", "versions": "{}"}
    texts["identity"] = json.dumps(IDENTITY.fields())
    data = save({"a/b": np.arange(3, dtype=np.int8), "a/c": np.arange(2.0)}, texts)
    assert Profile.from_bytes(data, IDENTITY).section("a")["c"].tolist() == [0.0, 1.0]


def test_replacing_is_atomic_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save(tmp_path / "p")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="space"):
        make(report={}).save(tmp_path / "p")
    assert Profile.load(tmp_path / "p").id == make().id
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


# ---- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"codec_family": "lossy"}, {"tokenizer": ""}])
def test_what_does_not_bind_a_profile(change: dict[str, str]) -> None:
    make().check_identity(dataclasses.replace(IDENTITY, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "bb"},
        {"shard": "0/2"},
        {"tokenizer": "other"},
        {"layout": KVLayout.uniform(2, 1, 8)},
    ],
)
def test_another_identity_is_refused_naming_the_field(change: dict[str, Any], tmp_path: Path) -> None:
    make().save(tmp_path / "p")
    other = dataclasses.replace(IDENTITY, **change)
    with pytest.raises(ProfileError, match=rf"another model \({next(iter(change))}[:.].*kvstore calibrate"):
        Profile.load(tmp_path / "p", other)
    Profile.load(tmp_path / "p")


# ---- bad files -------------------------------------------------------------------------------------------------------


def _set(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].__setitem__(key, value)


def _rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.__setitem__(new, header.pop(old))


BAD = {
    "empty": (b"", "too few for a profile"),
    "text": (b"hello, this is a text and no profile", "not a profile"),
    "huge header": (struct.pack("<Q", 1 << 62) + b"{" * 64, "not a profile"),
    "header over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{" * 64, "not a profile"),
    "header longer than the file": (struct.pack("<Q", 4096) + b"{" * 64, "truncated"),
    "deep": (struct.pack("<Q", 20_005) + b'{"a":' + b"[" * 20_000, "not a profile"),
    "no metadata": (patched(lambda header: header.pop("__metadata__")), "not a profile"),
    "other format": (patched(_set("__metadata__", "format", "pt")), "not a profile"),
    "other version": (patched(_set("__metadata__", "version", "2")), "version '2', this kvstore reads version '1'"),
    "texts": (patched(_set("__metadata__", "extra", 7)), "not a profile"),
    "identity": (patched(_set("__metadata__", "identity", "{}")), "description"),
    "layout": (patched(_set("__metadata__", "identity", '{"layout": "[]"}')), "description"),
    "report": (patched(_set("__metadata__", "report", "[1]")), "description"),
    "dtype": (patched(_set("lossless/freqs", "dtype", "BF16")), "not a profile"),
    "shape": (patched(_set("lossless/freqs", "shape", [2, 4])), "12 bytes"),
    "negative": (patched(_set("lossless/freqs", "shape", [-2, -3])), "not a profile"),
    "absurd": (patched(_set("lossless/freqs", "shape", [1 << 60, 1 << 60])), "not a profile"),
    "fraction": (patched(_set("lossless/freqs", "shape", [2.0, 3.0])), "not a profile"),
    "hole": (patched(_set("lossless/freqs", "data_offsets", [2, 14])), "damaged"),
    "no section": (patched(_rename("lossless/freqs", "freqs")), "in no section"),
    "truncated": (make().data[:-1], "truncated"),
    "longer": (make().data + b"\0", "damaged"),
}


def refused_with_its_reason(name: str, folder: Path, read: Callable[[Path, ModelIdentity], object]) -> None:
    data, reason = BAD[name]
    (folder / "p").write_bytes(data)
    with pytest.raises(ProfileError, match=rf"(?s){folder}.*{reason}.*kvstore calibrate"):
        read(folder / "p", IDENTITY)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    refused_with_its_reason(name, tmp_path, Profile.load)


@pytest.mark.parametrize("name", BAD)
def test_the_header_of_a_bad_file_is_enough_to_refuse_it(name: str, tmp_path: Path) -> None:
    refused_with_its_reason(name, tmp_path, ProfileFile.open)


def test_a_header_says_all_but_the_numbers(tmp_path: Path) -> None:
    made = make(versions={"torch": "2"})
    made.save(tmp_path / "p")
    file = ProfileFile.open(tmp_path / "p", IDENTITY)
    assert (file.sections, file.layout, file.head) == (made.sections, made.layout, made.head)
    assert (file.head.report, file.head.versions, file.head.nbytes) == (REPORT, {"torch": "2"}, made.nbytes)
    assert file.whole().id == made.id


def test_a_header_of_another_model_is_refused(tmp_path: Path) -> None:
    make().save(tmp_path / "p")
    with pytest.raises(ProfileError, match="was made for another model"):
        ProfileFile.open(tmp_path / "p", replace(IDENTITY, weights="other"))


def test_a_file_that_is_another_by_now_is_checked_again(tmp_path: Path) -> None:
    make().save(tmp_path / "p")
    file = ProfileFile.open(tmp_path / "p", IDENTITY)
    (tmp_path / "p").write_bytes(make().data[:-1])
    with pytest.raises(ProfileError, match="truncated"):
        file.whole()
    (tmp_path / "p").unlink()
    with pytest.raises(ProfileError, match="cannot be read"):
        file.whole()


def test_the_header_that_the_bad_ones_are_made_from_is_good() -> None:
    assert Profile.from_bytes(patched(lambda header: None), IDENTITY).report == REPORT


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ProfileError, match="cannot be read"):
            Profile.load(path)


def made(kind: str, path: Path) -> None:
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
            path.read_bytes()  # nothing: it is as /dev/null
        except OSError:
            pytest.skip("no device may be made or opened here")


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, kind: str) -> None:
    made(kind, tmp_path / "p")
    before = os.lstat(tmp_path / "p")
    with pytest.raises(ProfileError, match=f"is {kind}; name a file"):
        make().save(tmp_path / "p")
    for read in (Profile.load, ProfileFile.open):
        with pytest.raises(ProfileError, match=f"it is {kind}; name another file"):
            read(tmp_path / "p", IDENTITY)
    assert os.lstat(tmp_path / "p").st_ino == before.st_ino
    assert [each.name for each in tmp_path.iterdir()] == ["p"]


def test_sizes_are_checked_before_the_file_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "p", "wb") as file:
        file.write(struct.pack("<Q", 2) + b"{}")
        file.truncate(1 << 32)
    with pytest.raises(ProfileError, match="damaged"):
        Profile.load(tmp_path / "p")
    with open(tmp_path / "p", "r+b") as file:
        file.truncate(1 << 34)
    with pytest.raises(ProfileError, match="too many"):
        Profile.load(tmp_path / "p")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ProfileError, match="a/b holds numbers that are not finite"):
        make(sections={"a": {"b": np.array([1.0, value], np.float16)}})


def test_types_that_no_profile_holds_are_refused() -> None:
    with pytest.raises(ProfileError, match="complex"):
        make(sections={"a": {"b": np.zeros(2, np.complex64)}})


def test_a_missing_section_is_named() -> None:
    with pytest.raises(ProfileError, match="no section 'lossy', its sections are: aqua, lossless"):
        make().section("lossy")


def test_every_changed_byte_behind_the_header_is_found() -> None:
    whole = make()
    for place in range(len(whole.head.raw), len(whole.data)):
        damaged = bytearray(whole.data)
        damaged[place] ^= 1
        with pytest.raises(ProfileError, match=r"damaged: its numbers|not finite"):
            Profile.from_bytes(bytes(damaged))


def test_a_profile_of_before_has_no_digest() -> None:
    whole = make()
    assert whole.head.digest
    digest = f'"digest":"{whole.head.digest}",'.encode()
    begin = len(whole.head.raw)
    header = bytes(whole.data[:begin]).replace(digest, b"").ljust(begin)
    found = Profile.from_bytes(header + bytes(whole.data[begin:]))
    assert (found.head.digest, found.sections) == ("", whole.sections)


@settings(max_examples=part(400), deadline=None)
@given(st.data())
def test_flipped_bytes_give_a_profile_or_an_error(data: st.DataObject) -> None:
    damaged = bytearray(make().data)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        profile = Profile.from_bytes(cut)
    except ProfileError:
        return
    assert (profile.id == make().id) == (cut == make().data)
