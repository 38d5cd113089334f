"""Profiles: what calibration found out about one model, in one file that codecs read.

A profile is a safetensors file with named arrays in sections ("lossless/0.k.scale" is array "0.k.scale" of section
"lossless") and four texts beside them. It is bound to a model's identity, and known by the hash of its bytes: equal
contents give equal files. FORMAT.md has the schema. A profile holds numbers only, and is checked whole before use.

What a profile is and whose can be told from its header alone (`ProfileHead`); the numbers, tens of megabytes, are read
when they are needed (`ProfileFile`).
"""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.codecs.profile_head import (
    DTYPES,
    FORMAT,
    LENGTH,
    LENGTH_BYTES,
    MAX_BYTES,
    NEW,
    VERSION,
    ProfileHead,
    head_bytes,
)
from kvstore.core.file_kinds import kind_of
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.errors import ProfileError

Array = npt.NDArray[Any]
Sections = Mapping[str, Mapping[str, Array]]

NO_PROFILE = bytes(16)
_NAMES = {kind: name for name, kind in DTYPES.items()}


class Described(Protocol):
    """What is known of a profile, whether its numbers were read or not."""

    @property
    def layout(self) -> KVLayout:
        """Of the model's caches."""

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections that it has, sorted."""

    @property
    def report(self) -> dict[str, Any]:
        """What was measured when it was made, plain JSON values."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""


@dataclass(frozen=True, eq=False)
class Profile:
    """A checked profile. Immutable and thread-safe; its arrays are read-only and share the file's bytes.

    Attributes:
        data: the whole file.
        head: what its header says.
        identity: the fields of the model's identity.
        layout: of the model's caches.
        report: what calibration measured, plain JSON values.
        versions: versions of the programs that made it.
        id: 16 bytes that stand for the contents.

    Example:
        >>> from kvstore import KVLayout, ModelIdentity
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> profile = Profile.new(identity, {"mine": {"scale": np.ones(3, np.float32)}})
        >>> profile.sections, profile.section("mine")["scale"].shape
        (('mine',), (3,))
        >>> Profile.from_bytes(profile.data, identity).id == profile.id
        True
    """

    data: bytes | memoryview = field(repr=False)
    head: ProfileHead
    id: bytes
    """16 bytes: xxh3-128 of the file. Records name the profile they need by it."""
    _arrays: dict[str, dict[str, Array]] = field(repr=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str], identity: ModelIdentity | None = None) -> Profile:
        """Read a profile and check everything in it. Nothing is allocated for sizes that the file does not have.

        Args:
            path: of the file.
            identity: of the caches that it is to be used for; None accepts any.

        Raises:
            ProfileError: says what is wrong and what to do: the file is missing, no profile, truncated, of another
                version or identity, or its sizes or numbers are out of range.
        """
        name = os.fspath(path)
        try:
            with _opened(name) as file:
                head = _head_of(file, name)  # before the rest, which may be large, is read
                file.seek(0)
                data = file.read(head.nbytes)
        except OSError as error:
            raise ProfileError(f"{name}: cannot be read: {error.strerror}; name another file, or {NEW}") from error
        return cls.from_bytes(data, identity, name, head)

    @classmethod
    def from_bytes(
        cls,
        data: bytes | memoryview,
        identity: ModelIdentity | None = None,
        name: str = "profile",
        known: ProfileHead | None = None,
    ) -> Profile:
        """Do the same with the bytes of a file. `name` is what error messages call it.

        Args:
            data: the whole file.
            identity: as for `load`.
            name: what error messages call it.
            known: a header that was read before; it is not read again if the file begins with the same bytes.

        Raises:
            ProfileError: as `load`.
        """
        head = known
        if head is None or head.nbytes != len(data) or head.raw != data[: len(head.raw)]:
            head = ProfileHead.parse(data, len(data), name)
        arrays = _arrays(data, head, name)
        profile = cls(data, head, profile_id_of(data), arrays)
        if identity is not None:
            profile.check_identity(identity, name)
        return profile

    @classmethod
    def new(
        cls,
        identity: ModelIdentity,
        sections: Sections,
        report: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Profile:
        """Make a profile of arrays. Equal arguments give equal bytes.

        Args:
            identity: of the model.
            sections: arrays by section and name.
            report: what calibration measured, plain JSON values.
            versions: versions of the programs that made it.

        Raises:
            ProfileError: an array holds other types than integers and floats, or numbers that are not finite.
        """
        arrays = {f"{section}/{name}": array for section, named in sections.items() for name, array in named.items()}
        texts = {
            "format": FORMAT,
            "version": VERSION,
            "identity": json.dumps(identity.fields(), sort_keys=True),
            "report": json.dumps(report or {}, sort_keys=True),
            "versions": json.dumps(dict(versions or {}), sort_keys=True),
        }
        return cls.from_bytes(_file(arrays, texts), identity, "the new profile")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; replace one that is there. Durable on return.

        Raises:
            ProfileError: something else than a file is there.
            OSError: the file cannot be written.
        """
        target = Path(path)
        check_target(target)
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(fd, "wb") as file:
                file.write(self.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def whole(self) -> Profile:
        """Return itself, as `ProfileFile.whole` returns what it reads."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    @property
    def identity(self) -> dict[str, str]:
        return self.head.identity

    @property
    def layout(self) -> KVLayout:
        return self.head.layout

    @property
    def report(self) -> dict[str, Any]:
        return self.head.report

    @property
    def versions(self) -> dict[str, str]:
        return self.head.versions

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections that it has, sorted."""
        return self.head.sections

    def section(self, name: str) -> dict[str, Array]:
        """Return the arrays of a section by name, read-only.

        Raises:
            ProfileError: the profile has no such section.
        """
        if name not in self._arrays:
            there = ", ".join(self.sections) or "none"
            raise ProfileError(f"the profile has no section {name!r}, its sections are: {there}; {NEW}")
        return dict(self._arrays[name])

    def section_bytes(self, name: str) -> int:
        """Return the bytes of all arrays of a section. Raises `ProfileError` as `section` does."""
        return sum(array.nbytes for array in self.section(name).values())

    def check_identity(self, identity: ModelIdentity, name: str = "profile") -> None:
        """Do what `ProfileHead.check_identity` does."""
        self.head.check_identity(identity, name)


@dataclass(frozen=True)
class ProfileFile:
    """A profile in a file, of which only the header was read. Immutable and thread-safe.

    Attributes:
        path: of the file.
        head: what the header said when the file was opened.

    Example:
        >>> from kvstore import KVLayout, ModelIdentity
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Profile.new(identity, {"mine": {"scale": np.ones(3, np.float32)}}).save(f"{folder}/profile")
        ...     file = ProfileFile.open(f"{folder}/profile", identity)
        ...     file.sections, file.whole().section("mine")["scale"].shape
        (('mine',), (3,))
    """

    path: str
    head: ProfileHead
    _identity: ModelIdentity

    @classmethod
    def open(cls, path: str | os.PathLike[str], identity: ModelIdentity) -> ProfileFile:
        """Read the header and check it.

        Raises:
            ProfileError: as `Profile.load`, but for what only the numbers can tell.
        """
        name = os.fspath(path)
        try:
            with _opened(name) as file:
                head = _head_of(file, name)
        except OSError as error:
            raise ProfileError(f"{name}: cannot be read: {error.strerror}; name another file, or {NEW}") from error
        head.check_identity(identity, name)
        return cls(name, head, identity)

    def whole(self) -> Profile:
        """Read all of the file, as it is now. Raises `ProfileError` as `Profile.load` does."""
        return Profile.load(self.path, self._identity)

    @property
    def layout(self) -> KVLayout:
        return self.head.layout

    @property
    def sections(self) -> tuple[str, ...]:
        return self.head.sections

    @property
    def report(self) -> dict[str, Any]:
        return self.head.report

    @property
    def nbytes(self) -> int:
        return self.head.nbytes


# ---- the file --------------------------------------------------------------------------------------------------------


def profile_id_of(data: bytes | memoryview) -> bytes:
    """Return the id of the profile with these bytes."""
    return xxhash.xxh3_128_digest(data)


def check_target(path: Path) -> None:
    """Check that a profile may be written there.

    Raises:
        ProfileError: something else than a file is there, or a link to something else.
        OSError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ProfileError(f"{path}: is {kind_of(mode)}; name a file")


def _opened(name: str) -> BinaryIO:
    """A regular file, opened without waiting for whoever else may open it. Raises `OSError` and `ProfileError`."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise ProfileError(f"{name}: cannot be read: it is {kind_of(mode)}; name another file, or {NEW}")
    return open(fd, "rb")


def _head_of(file: BinaryIO, name: str) -> ProfileHead:
    """The header of an open file. Raises `OSError` and `ProfileError`."""
    size = os.fstat(file.fileno()).st_size
    if size > MAX_BYTES:
        raise ProfileError(f"{name}: {size} bytes are too many for a profile (at most {MAX_BYTES}); {NEW}")
    start = file.read(LENGTH_BYTES)
    return ProfileHead.parse(start + file.read(head_bytes(start) - len(start)), size, name)


def _arrays(data: bytes | memoryview, head: ProfileHead, name: str) -> dict[str, dict[str, Array]]:
    found: dict[str, dict[str, Array]] = {}
    for entry in head.entries:
        section, _, inner = entry.name.partition("/")
        begin = len(head.raw) + entry.begin
        array = np.frombuffer(data, entry.dtype, math.prod(entry.shape), begin).reshape(entry.shape)
        if entry.dtype.kind == "f" and not np.isfinite(array).all():
            raise ProfileError(f"{name}: the array {entry.name} holds numbers that are not finite; {NEW}")
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        found.setdefault(section, {})[inner] = array
    if head.digest and head.digest != xxhash.xxh3_128_hexdigest(data[len(head.raw) :]):
        raise ProfileError(f"{name}: damaged: its numbers are not those that it was made of; copy it again, or {NEW}")
    return found


def _file(arrays: Mapping[str, Array], texts: Mapping[str, str]) -> bytes:
    """A safetensors file. Widest types first, so that every array is aligned; safetensors' own writer does the same,
    but puts the texts in any order."""
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    at, parts = 0, []
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        kind = _NAMES.get(array.dtype.newbyteorder("<"))
        if kind is None:
            raise ProfileError(f"{name}: a profile cannot hold {array.dtype}; use integers or floats of 2 to 8 bytes")
        part = array.astype(DTYPES[kind], copy=False).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    header["__metadata__"]["digest"] = xxhash.xxh3_128_hexdigest(b"".join(parts))
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return b"".join([LENGTH.pack(len(text)), text, *parts])
