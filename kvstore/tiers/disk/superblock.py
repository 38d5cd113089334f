"""What a store is bound to: format, identity, sizes. Two copies, each with a checksum; changed by an upgrade alone."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from typing import Any

import xxhash

from kvstore.core.identity import ModelIdentity
from kvstore.errors import CorruptStore, FormatVersion, IdentityMismatch
from kvstore.tiers.disk.fs import FileSystem, read_file, write_file

FORMAT = 2
_OLDER = (1,)  # formats that are read, and that a writer upgrades
NAMES = ("store.json", "store.json.copy")
_LIMIT = 1 << 20
_ID_BYTES = 16


@dataclass(frozen=True)
class Superblock:
    """What a store is bound to. Immutable.

    Attributes:
        store_id: 16 random bytes, also in every segment.
        identity: what `ModelIdentity.fields` returned.
        block_tokens, segment_bytes: settings that cannot change.
        format: what the catalog is written in, or is being upgraded from.

    Example:
        >>> from kvstore import KVLayout
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> superblock = Superblock.new(identity, block_tokens=64, segment_bytes=1 << 26)
        >>> superblock.check("/var/kv", identity, 64, 1 << 26)
    """

    store_id: bytes
    identity: dict[str, str]
    block_tokens: int
    segment_bytes: int
    format: int = FORMAT

    @classmethod
    def new(cls, identity: ModelIdentity, block_tokens: int, segment_bytes: int) -> Superblock:
        """Make the superblock of a new store."""
        return cls(uuid.uuid4().bytes, identity.fields(), block_tokens, segment_bytes)

    def write(self, fs: FileSystem, directory: str) -> None:
        """Write both copies, one after the other. Durable on return. Raises `OSError`.

        That of an older format is written as of this one, with a note that the upgrade is not finished: programs that
        know only the older one refuse it from then on.
        """
        document: dict[str, Any] = {
            "format": FORMAT,
            "store_id": self.store_id.hex(),
            "identity": self.identity,
            "block_tokens": self.block_tokens,
            "segment_bytes": self.segment_bytes,
        }
        if self.format != FORMAT:
            document["upgrading_from"] = self.format
        body = json.dumps(document, sort_keys=True).encode() + b"\n"
        for name in NAMES:
            write_file(fs, os.path.join(directory, name), body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")

    @classmethod
    def read(cls, fs: FileSystem, directory: str) -> Superblock | None:
        """Return the first intact copy; None if there is no copy at all.

        Raises:
            FormatVersion: an intact copy is of another version.
            CorruptStore: there are copies, and none is intact.
        """
        found = []
        for name in NAMES:
            path = os.path.join(directory, name)
            try:
                found.append(path)
                return cls._parse(read_file(fs, path, _LIMIT), path)
            except FileNotFoundError:
                found.pop()
            except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue
        if found:
            raise CorruptStore(f"{found[0]}: damaged, and there is no intact copy; restore it, or delete the store")
        return None

    @classmethod
    def _parse(cls, data: bytes, path: str) -> Superblock:
        body, _, check = data.rstrip(b"\n").partition(b"\n")
        body += b"\n"
        if xxhash.xxh3_128_hexdigest(body).encode() != check:
            raise ValueError("the checksum differs")
        document = json.loads(body)
        found = document["format"]
        if found != FORMAT and found not in _OLDER:
            raise FormatVersion(
                f"{path}: format {found}, this version of kvstore reads formats {_OLDER[0]} to {FORMAT}; open the "
                "store with the version that wrote it, or start a new one"
            )
        store_id = bytes.fromhex(document["store_id"])
        if len(store_id) != _ID_BYTES:
            raise ValueError(f"store_id: expected {_ID_BYTES} bytes, found {len(store_id)}")
        return cls(
            store_id,
            {str(k): str(v) for k, v in document["identity"].items()},
            int(document["block_tokens"]),
            int(document["segment_bytes"]),
            int(document.get("upgrading_from", found)),
        )

    def check(self, directory: str, identity: ModelIdentity, block_tokens: int, segment_bytes: int) -> None:
        """Compare with what the caller opens the store with.

        Raises:
            IdentityMismatch: names what differs.
        """
        if self.identity != identity.fields():
            raise IdentityMismatch(
                f"{directory} holds caches of another identity ({identity.difference(self.identity)}); use another "
                "directory for this model"
            )
        for name, stored, given in (
            ("block_tokens", self.block_tokens, block_tokens),
            ("segment_bytes", self.segment_bytes, segment_bytes),
        ):
            if stored != given:
                raise IdentityMismatch(
                    f"{directory} was made with {name}={stored}, not {given}; open it with that value"
                )
