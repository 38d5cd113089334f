"""What a store is bound to: format, identity, sizes. Two copies, each with a checksum.

Written when the store is made, by an upgrade, and when a tokenizer is named first. Keys follow from it for ever.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from kvstore.config import MIN_SEGMENT_BYTES, PAGE_BYTES, StoreConfig
from kvstore.core.identity import ModelIdentity, digest_of
from kvstore.errors import CorruptStore, FormatVersion, IdentityMismatch
from kvstore.tiers.disk.fs import FileSystem, is_passing, read_file, write_file

FORMAT = 2
_OLDER = (1,)  # formats that are read, and that a writer upgrades
NAMES = ("store.json", "store.json.copy")
_LIMIT = 1 << 20
_ID_BYTES = 16
_MOST_SEGMENT_BYTES, _MOST_BLOCK_TOKENS = 1 << 32, 4096  # that any version of this format wrote


@dataclass(frozen=True)
class Superblock:
    """What a store is bound to. Immutable.

    Attributes:
        store_id: 16 random bytes, also in every segment.
        identity: what `ModelIdentity.fields` returned when the store was made.
        block_tokens, segment_bytes: settings that cannot change.
        format: what the catalog is written in, or is being upgraded from.
        tokenizer: fingerprint of the tokenizer that was named first, "" if none was yet.

    Example:
        >>> from kvstore import KVLayout
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> superblock = Superblock.new(identity, block_tokens=64, segment_bytes=1 << 26)
        >>> superblock.check("/var/kv", identity)
    """

    store_id: bytes
    identity: dict[str, str]
    block_tokens: int
    segment_bytes: int
    format: int = FORMAT
    tokenizer: str = ""

    @classmethod
    def new(cls, identity: ModelIdentity, block_tokens: int, segment_bytes: int) -> Superblock:
        """Make the superblock of a new store."""
        return cls(uuid.uuid4().bytes, identity.fields(), block_tokens, segment_bytes, tokenizer=identity.tokenizer)

    @property
    def digest(self) -> bytes:
        """32 bytes that all keys of the store begin with: of the identity that the store was made with."""
        return digest_of(self.identity)

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
        if self.tokenizer != self.identity.get("tokenizer", ""):
            document["tokenizer"] = self.tokenizer
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
            OSError: a copy cannot be read, which says nothing about its bytes.
        """
        found = []
        for name in NAMES:
            path = os.path.join(directory, name)
            try:
                found.append(path)
                return cls._parse(read_file(fs, path, _LIMIT), path)
            except FileNotFoundError:
                found.pop()
            except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                if isinstance(error, OSError) and is_passing(error):
                    raise
        if found:
            raise CorruptStore(
                f"{found[0]}: damaged, or another program's; there is no intact copy: restore the store from a backup, "
                "or name another folder"
            )
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
        identity = {str(k): str(v) for k, v in document["identity"].items()}
        block_tokens, segment_bytes = int(document["block_tokens"]), int(document["segment_bytes"])
        in_range = MIN_SEGMENT_BYTES <= segment_bytes <= _MOST_SEGMENT_BYTES and segment_bytes % PAGE_BYTES == 0
        if not (in_range and 1 <= block_tokens <= _MOST_BLOCK_TOKENS):
            raise ValueError(f"block_tokens {block_tokens} or segment_bytes {segment_bytes} are out of range")
        before = int(document.get("upgrading_from", found))
        tokenizer = str(document.get("tokenizer", identity.get("tokenizer", "")))
        return cls(store_id, identity, block_tokens, segment_bytes, before, tokenizer)

    def check(self, directory: str, identity: ModelIdentity) -> None:
        """Compare with what the caller opens the store with. Names are labels: see `ModelIdentity.difference`.

        Raises:
            IdentityMismatch: names what differs.
        """
        difference = identity.difference({**self.identity, "tokenizer": self.tokenizer})
        if difference:
            raise IdentityMismatch(
                f"{directory} holds caches of another identity ({difference}); use another directory for this model"
            )

    def settled(self, config: StoreConfig) -> StoreConfig:
        """Return the settings with the sizes that the store was made with, which cannot change."""
        return replace(config, block_tokens=self.block_tokens, segment_bytes=self.segment_bytes)
