"""The header of a profile: what it is, whose, and which arrays stand where in the file. No numbers are read for it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.errors import ConfigError, ProfileError

FORMAT = "kvstore-profile"
VERSION = "1"
MAX_BYTES = 1 << 33
MAX_HEADER_BYTES = 1 << 24
MAX_ARRAYS = 1 << 16
LENGTH = struct.Struct("<Q")
LENGTH_BYTES = LENGTH.size
HEAD_BYTES = LENGTH_BYTES + MAX_HEADER_BYTES
DTYPES = {
    f"{letter}{8 * size}": np.dtype(f"<{kind}{size}")
    for letter, kind, sizes in (("I", "i", (1, 2, 4, 8)), ("U", "u", (1, 2, 4, 8)), ("F", "f", (2, 4, 8)))
    for size in sizes
}
_MOST = 1 << 40  # of numbers in headers
NEW = "make a new one with `kvstore calibrate`"


@dataclass(frozen=True)
class Entry:
    """An array in the file; begin and end count from the end of the header."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ProfileHead:
    """What the header of a profile says, with its sizes checked against the file's; no numbers. Immutable.

    Attributes:
        raw: the bytes of the header, its length before it.
        nbytes: of the whole file.
        identity, layout, report, versions: as in `Profile`.
        sections: names of the sections that it has, sorted.
        digest: xxh3-128 of all that stands behind the header, in hex; "" in files of before.

    Example:
        >>> from kvstore import KVLayout, ModelIdentity
        >>> from kvstore.codecs import Profile
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> data = Profile.new(identity, {"mine": {"scale": np.ones(3, np.float32)}}).data
        >>> ProfileHead.parse(data, len(data)).sections
        ('mine',)
    """

    raw: bytes = field(repr=False)
    nbytes: int
    identity: dict[str, str]
    layout: KVLayout
    report: dict[str, Any]
    versions: dict[str, str]
    sections: tuple[str, ...]
    digest: str
    entries: list[Entry] = field(repr=False)

    @classmethod
    def parse(cls, data: bytes | memoryview, total: int, name: str = "profile") -> ProfileHead:
        """Check the beginning of a file of `total` bytes. `name` is what error messages call it.

        Args:
            data: at least the first `head_bytes` bytes.

        Raises:
            ProfileError: the file is no profile, of another version, or not of the size that its header says.
        """
        texts, entries, begin = _header(data, total, name)
        if texts.get("format") != FORMAT:
            raise ProfileError(f"{name}: not a profile of kvstore; {NEW}")
        if texts.get("version") != VERSION:
            found = texts.get("version")
            raise ProfileError(f"{name}: version {found!r}, this kvstore reads version {VERSION!r}; {NEW}")
        sections = set[str]()
        for entry in entries:
            section, slash, inner = entry.name.partition("/")
            if not (section and slash and inner):
                raise ProfileError(f"{name}: the array {entry.name!r} is in no section; {NEW}")
            sections.add(section)
        try:
            fields = {str(key): str(value) for key, value in json.loads(texts["identity"]).items()}
            layout = KVLayout.from_canonical(fields["layout"])
            report, versions = json.loads(texts["report"]), json.loads(texts["versions"])
            if not isinstance(report, dict) or not isinstance(versions, dict):
                raise TypeError("report and versions must be objects")
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, ConfigError) as error:
            raise ProfileError(f"{name}: its description cannot be read ({error!r}); {NEW}") from error
        digest, names = texts.get("digest", ""), tuple(sorted(sections))
        return cls(bytes(data[:begin]), total, fields, layout, report, versions, names, digest, entries)

    def check_identity(self, identity: ModelIdentity, name: str = "profile") -> None:
        """Check that the profile was made for the model of `identity`.

        Names and tokenizers are compared as in `ModelIdentity.difference`. Exact and lossy caches of a model share a
        profile. `name` is what error messages call the profile.

        Raises:
            ProfileError: names the fields that differ.
        """
        difference = identity.difference({**self.identity, "codec_family": identity.codec_family})
        if difference:
            raise ProfileError(
                f"{name}: was made for another model ({difference}); calibrate this one with `kvstore calibrate`"
            )


def head_bytes(start: bytes) -> int:
    """Return how many bytes the header of a profile takes, with its length before it, by the first `LENGTH_BYTES` bytes
    of the file; at most `HEAD_BYTES`."""
    return min(HEAD_BYTES, LENGTH_BYTES + int.from_bytes(start[:LENGTH_BYTES], "little"))


def _header(data: bytes | memoryview, total: int, name: str) -> tuple[dict[str, str], list[Entry], int]:
    """(texts, arrays in the order of their bytes, where the bytes begin); every size fits the file of `total` bytes.
    data: at least its header."""
    if len(data) < LENGTH.size:
        raise ProfileError(f"{name}: {total} bytes are too few for a profile; {NEW}")
    (size,) = LENGTH.unpack_from(data)
    begin = LENGTH.size + size
    if size > MAX_HEADER_BYTES or data[LENGTH.size : LENGTH.size + 1] != b"{":
        raise ProfileError(f"{name}: not a profile of kvstore; {NEW}")
    if begin > total:
        raise ProfileError(f"{name}: truncated: its header alone takes {begin} bytes, the file has {total}; {NEW}")
    try:
        document = json.loads(bytes(data[LENGTH.size : begin]).decode(), object_pairs_hook=_unique)
        texts = document.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in texts.values()) or len(document) > MAX_ARRAYS:
            raise ValueError(f"metadata values must be strings, and arrays at most {MAX_ARRAYS}")
        entries = [_entry(key, value) for key, value in document.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{name}: not a profile of kvstore ({error!r}); {NEW}") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise ProfileError(f"{name}: damaged: {entry.name} begins at {entry.begin}, not at {at}; {NEW}")
        at = entry.end
    if begin + at != total:
        what = "truncated" if begin + at > total else "damaged"
        raise ProfileError(f"{name}: {what}: its header speaks of {begin + at} bytes, the file has {total}; {NEW}")
    return texts, entries, begin


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(name: str, value: dict[str, Any]) -> Entry:
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    if len(shape) > 8:
        raise ValueError(f"{name}: a shape of {len(shape)} numbers is out of range")
    count = product = 1  # of what is not 0: numpy makes no larger array, not even an empty one
    for number in shape:
        if type(number) is not int or not 0 <= number < _MOST:
            raise ValueError(f"{name}: the shape {shape} is out of range")
        count, product = count * number, product * (number or 1)
    if product >= _MOST:
        raise ValueError(f"{name}: the shape {shape} is out of range")
    if not (type(begin) is type(end) is int and 0 <= begin < _MOST and 0 <= end < _MOST):
        raise ValueError(f"{name}: the bytes {begin} to {end} are out of range")
    dtype = DTYPES[value["dtype"]]
    if end - begin != count * dtype.itemsize:
        raise ValueError(f"{name}: {end - begin} bytes do not fit {dtype} {list(shape)}")
    return Entry(name, dtype, shape, begin, end)
