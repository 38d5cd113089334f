"""Reads every record on disk and compares it with what the catalog says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.core.keys import chain_key, chain_keys
from kvstore.core.record import (
    FLAG_CUT,
    FLAG_STATES,
    DamagedRecord,
    RecordHeader,
    check_payload,
    key_tag,
    padded,
    parse,
)
from kvstore.core.tokens import Tokens
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.survey import Survey
from kvstore.tiers.disk.tier import DiskTier

_AT_ONCE = 256


@dataclass(frozen=True)
class RecordCheck:
    """Verifies checksums, keys and tokens of all records on disk. Thread-safe.

    Attributes:
        pool: gives buffers to read into.
        root: gives the key before the first block of a namespace.
        path: gives namespace and all tokens up to a record's end; None if the record is not in the index.
        block_tokens: tokens of a block.
        decodes: whether records of a codec number and a profile can be decoded here.
    """

    pool: BufferPool
    root: Callable[[bytes], bytes]
    path: Callable[[int], tuple[bytes, Tokens] | None]
    block_tokens: int
    decodes: Callable[[int, bytes], bool]

    def check(self, disk: DiskTier, survey: Survey) -> tuple[int, int, list[str]]:
        """Return (records read; those of them that cannot be decoded here; what is wrong with them). Records that left
        since the survey are skipped, and what a writer process moved while it was read is read again."""
        names = {number: digest for digest, number in survey.namespaces.items()}
        found: list[str] = []
        keys: dict[int, bytes] = {}
        donors: dict[int, tuple[tuple[int, bytes], ...]] = {}
        ends: dict[bytes, int] = {}  # a record that ends with a key, once its whole chain of keys is verified
        numbers = survey.scan.entries["record"].tolist()
        read = unreadable = begin = 0
        while begin < len(numbers):
            entries = [entry for entry in disk.locate(numbers[begin : begin + _AT_ONCE]) if entry is not None]
            begin += _AT_ONCE
            try:
                for entry in entries:
                    problem, header = self._read(disk, entry, names.get(entry.namespace), ends)
                    if problem and disk.read_only and self._left(disk, entry):
                        numbers.append(entry.record)
                        continue
                    read += 1
                    if problem:
                        found.append(f"record {entry.record}: {problem}")
                    elif header is not None:
                        unreadable += not self.decodes(header.codec, header.profile)
                        keys[entry.record] = header.key
                        ends[header.key] = entry.record
                        donors[entry.record] = tuple(
                            zip(entry.donors, (donor.key for donor in header.donors), strict=True)
                        )
            finally:
                disk.release(entries)
        for member, named in donors.items():
            for donor, key in named:
                if keys.get(donor, key) != key:
                    found.append(f"record {member}: donor {donor} is another block than it was coded against")
        return read, unreadable, found

    def _read(
        self, disk: DiskTier, entry: Entry, namespace: bytes | None, ends: dict[bytes, int]
    ) -> tuple[str, RecordHeader | None]:
        buffer = self.pool.take(entry.extent.nbytes)
        try:
            disk.read([entry], [buffer])
        except OSError as error:
            return f"cannot be read: {error}", None
        try:
            header = parse(buffer.view, len(buffer.view))
            check_payload(header, buffer.view)
        except DamagedRecord as damage:
            return f"damaged: {damage}", None
        return self._compare(entry, header, namespace) or self._chain_problem(entry.record, header, ends), header

    def _left(self, disk: DiskTier, entry: Entry) -> bool:
        """Whether a record is not where it was any more: a writer process removes and moves what is read here."""
        now = disk.known([entry.record])[0]
        return now is None or now.extent != entry.extent

    def _compare(self, entry: Entry, header: RecordHeader, namespace: bytes | None) -> str:
        if chain_key(header.parent, header.tokens) != header.key:
            return "its key does not follow from its parent's key and its tokens"
        if header.namespace != namespace:
            return "its namespace is not the one of its catalog entry"
        expected = (entry.tag, entry.start, entry.codec, entry.extent.nbytes, len(entry.donors))
        found = (key_tag(header.key), header.start, header.codec, padded(header.record_bytes), len(header.donors))
        marks = FLAG_CUT | FLAG_STATES
        if (entry.cut, entry.flags & marks) != (header.cut, header.flags & marks):
            return "what it holds of windows or states is not what its catalog entry says"
        if expected != found:
            return "key, position, codec, size or donors are not those of its catalog entry"
        if not np.array_equal(entry.tokens, header.tokens):
            return "its tokens are not those of its catalog entry"
        if entry.parent_tag != (key_tag(header.parent) if header.start else 0):
            return "its parent's key is not the one of its catalog entry"
        return ""

    def _chain_problem(self, record: int, header: RecordHeader, ends: dict[bytes, int]) -> str:
        """Whether the key before it is that of the tokens before it, as the index knows them."""
        path = self.path(record)
        if path is None:
            return ""
        namespace, tokens = path
        if namespace != header.namespace or not np.array_equal(tokens[header.start :], header.tokens):
            return "the index has other tokens for it"
        before = self.path(ends[header.parent]) if header.parent in ends else None
        if before is not None and before[0] == namespace and np.array_equal(before[1], tokens[: header.start]):
            return ""
        root = self.root(namespace)
        *_, parent = root, *chain_keys(root, tokens[: header.start], self.block_tokens)
        return "" if parent == header.parent else "its parent's key is not that of the tokens before it"
