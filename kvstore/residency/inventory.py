"""What is stored, as sequences: which there are, what their blocks take, and which beginnings they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvstore.codecs.registry import codec_label
from kvstore.config import PAGE_BYTES
from kvstore.core.keys import NamespaceDigest
from kvstore.core.tokens import Tokens
from kvstore.residency.residency import Residency


@dataclass(frozen=True)
class SequenceInfo:
    """A stored sequence.

    Attributes:
        tokens: `[n]` uint32.
        namespace: digest of its namespace; every call of the store takes it as `namespace`.
        blocks: how many blocks it has, shared ones included.
        bytes: what these take on disk; 0 for what is in memory alone.
        expires: end of its life in unix seconds, 0 for never.
        pinned: whether it is kept from eviction.

    Example:
        >>> SequenceInfo(np.zeros(3, np.uint32), NamespaceDigest(bytes(32)), blocks=1, bytes=4096).pinned
        False
    """

    tokens: Tokens
    namespace: NamespaceDigest
    blocks: int
    bytes: int
    expires: float = 0.0
    pinned: bool = False


@dataclass(frozen=True)
class SharedPrefix:
    """A beginning that several sequences have in common.

    Attributes:
        tokens: `[n]` uint32.
        namespace: digest of its namespace.
        sequences: how many begin with it.

    Example:
        >>> SharedPrefix(np.zeros(64, np.uint32), NamespaceDigest(bytes(32)), sequences=3).saved_tokens
        128
    """

    tokens: Tokens
    namespace: NamespaceDigest
    sequences: int

    @property
    def saved_tokens(self) -> int:
        """How many tokens are not stored a second time."""
        return (self.sequences - 1) * len(self.tokens)


@dataclass(frozen=True)
class CodecUse:
    """What is on disk in one codec.

    Attributes:
        records: how many.
        tokens: of them.
        bytes: what they take, whole pages.
    """

    records: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Inventory:
    """What `KVStore.inventory` returns.

    Attributes:
        sequences: those that nothing continues, the longest first.
        prefixes: what more than one sequence begins with, by the tokens that this saves.
        codecs: what is on disk, by the name of its codec.
        ends: of a layout with windows or states, the beginnings of sequences that can be gone on from, block by block.

    Example:
        >>> Inventory(codecs={"raw": CodecUse(records=2, tokens=100, bytes=8192)}).codecs["raw"].tokens
        100
    """

    sequences: tuple[SequenceInfo, ...] = ()
    prefixes: tuple[SharedPrefix, ...] = ()
    codecs: dict[str, CodecUse] = field(default_factory=dict)
    ends: tuple[SequenceInfo, ...] = ()


def inventory_of(residency: Residency, is_grouped: bool, usable: Callable[[bytes, Tokens], int]) -> Inventory:
    """Look at every record of the index; what leaves meanwhile is left out.

    Args:
        residency: of the store.
        is_grouped: whether the layout has windows or states.
        usable: how many leading tokens of a sequence can be had, by the digest of its namespace.

    Raises:
        CatalogError: the catalog cannot be read.
    """
    sizes, codecs = _on_disk(residency)
    index, found, ends, paths = residency.index, list[SequenceInfo](), list[SequenceInfo](), list[list[int]]()
    for record in index.counts()[0].tolist():
        leaf = index.leaf(record)
        if leaf is None and not is_grouped:
            continue
        try:
            namespace, tokens = index.path(record)
        except KeyError:
            continue
        if leaf is None and usable(namespace, tokens) < len(tokens):
            continue
        match = index.match(namespace, tokens, touch=False)
        path = [number for number in match.records.tolist() if number]
        taken = sum(sizes.get(number, 0) for number in path)
        expires, pinned = residency.expiry(record), residency.is_pinned(record)
        sequence = SequenceInfo(tokens, NamespaceDigest(namespace), len(path), taken, expires, pinned)
        if leaf is None:
            ends.append(sequence)
        else:
            found.append(sequence)
            paths.append(path)
    uses = Counter(record for path in paths for record in path)
    next_uses: dict[int, int] = {}
    for path in paths:
        for record, after in pairwise(path):
            next_uses[record] = max(next_uses.get(record, 0), uses[after])
    return Inventory(_sorted(found), tuple(_shared(residency, uses, next_uses)), codecs, _sorted(ends))


def _sorted(found: list[SequenceInfo]) -> tuple[SequenceInfo, ...]:
    return tuple(sorted(found, key=lambda each: (-len(each.tokens), each.namespace, each.tokens.tobytes())))


def _on_disk(residency: Residency) -> tuple[dict[int, int], dict[str, CodecUse]]:
    """Bytes by record, and what is in each codec."""
    if residency.disk is None:
        return {}, {}
    rows = residency.disk.catalog.scan().entries
    nbytes = rows["pages"].astype(np.int64) * PAGE_BYTES
    codecs = {}
    for number in np.unique(rows["codec"]).tolist():
        here = rows["codec"] == number
        tokens = int(rows["count"][here].sum(dtype=np.int64))
        codecs[codec_label(number)] = CodecUse(int(here.sum()), tokens, int(nbytes[here].sum()))
    return dict(zip(rows["record"].tolist(), nbytes.tolist(), strict=True)), codecs


def _shared(residency: Residency, uses: Counter[int], next_uses: dict[int, int]) -> list[SharedPrefix]:
    """The longest beginning of each set of sequences that have one in common.

    Args:
        uses: by record, how many sequences have it.
        next_uses: by record, the most uses of a record that follows it.
    """
    found = []
    for record, count in uses.items():
        if count < 2 or next_uses.get(record, 0) == count:
            continue
        try:
            namespace, tokens = residency.index.path(record)
        except KeyError:
            continue
        found.append(SharedPrefix(tokens, NamespaceDigest(namespace), count))
    return sorted(found, key=lambda prefix: -prefix.saved_tokens)
