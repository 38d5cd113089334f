"""The index of everything that a store holds: namespaces of token prefixes in one radix trie.

A stored sequence is cut in blocks of `block_tokens` (B). Each stored block is a *record* with a 64-bit id
that is never reused. A record that ends at depth e covers the tokens [floor((e - 1) / B) * B, e): a full
block ends at a multiple of B, a tail anywhere else. The trie keeps every token, so a match is exact to the
token, and the bits (-log2 P) of every prefix.

Recency is kept per node: an operation that touches a path makes all of it the most recent, and `evict`
takes from the least recent leaf, so that a stored block always has its parents.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.trie._trie import Trie
from kvstore.trie.prior import UNIFORM_BITS_PER_TOKEN

__all__ = ["Match", "TrieIndex"]

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

NO_LIMIT = (1 << 64) - 1  # no record has this number

NAMESPACE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Match:
    """What the trie knows about a query.

    `depth`: how many leading tokens of the query are in the trie. `bits`: -log2 P of that prefix.
    `records`, `ends`: uint64 and uint32 `[ceil(depth / B)]`; for each block that holds a token < depth the
    id of the record that covers it best and the depth where that record ends, or 0 and 0 for a hole. The
    end of the last block's record may lie beyond `depth` (another sequence's block, which shares the tokens
    up to depth) or, where nothing better is stored, before it.
    """

    depth: int
    bits: float
    records: U64
    ends: U32

    def usable(self, block_tokens: int) -> int:
        """Leading tokens that records cover without a gap, at most `depth`."""
        ends: list[int] = self.ends.tolist()
        for i, end in enumerate(ends):
            if end < (i + 1) * block_tokens:
                return min(max(end, i * block_tokens), self.depth)
        return self.depth


_NOTHING = Match(0, 0.0, np.zeros(0, np.uint64), np.zeros(0, np.uint32))


class TrieIndex:
    """Thread-safe: readers run in parallel with each other, writers one at a time; the GIL is released in
    both.

    Namespaces are 32-byte digests. One that nothing was ever inserted into matches nothing and costs
    nothing. `tokens` is always a 1-D C-contiguous uint32 numpy array, read in place and not kept; it must
    not change during the call. Every method raises `ValueError` naming the argument for anything else,
    before anything changes. Nothing here is durable: `restore` rebuilds the index from the catalog.
    """

    def __init__(self, block_tokens: int = 64) -> None:
        self._trie = Trie(block_tokens)
        self._roots: dict[bytes, int] = {}
        self._names: list[bytes] = []  # root -> namespace
        self._lock = threading.Lock()  # creation of roots

    @property
    def block_tokens(self) -> int:
        return self._trie.block_tokens

    def longest_prefix(self, namespace: bytes, tokens: U32) -> int:
        """How many leading tokens are in the trie. The fastest look-up; touches nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return self._unknown(namespace, tokens)
        return self._trie.longest_prefix(root, tokens)

    def best_match(self, namespace: bytes, tokens: U32) -> tuple[int, float]:
        """(depth, shared bits) of the stored prefix that shares the most information with the query; (0,
        0.0) if none."""
        root = self._roots.get(namespace)
        if root is None:
            return self._unknown(namespace, tokens), 0.0
        return self._trie.best_match(root, tokens)

    def match(self, namespace: bytes, tokens: U32, *, touch: bool = True) -> Match:
        """The longest stored prefix with its records; `touch` marks it (and the covering record) as used now.

        The covering record of a partial last block is searched below the match point among at most 4096
        nodes; in a wider fan than that, all without records, it may go unfound.
        """
        root = self._roots.get(namespace)
        if root is None:
            self._unknown(namespace, tokens)
            return _NOTHING
        return Match(*self._trie.match(root, tokens, touch))

    def insert(
        self,
        namespace: bytes,
        tokens: U32,
        ends: U32,
        ids: U64,
        *,
        bits: F32 | float = UNIFORM_BITS_PER_TOKEN,
    ) -> U64:
        """Adds a path, of which any part may be stored already, and sets the records that end at `ends`;
        touches it.

        `ends`: uint32 `[m]`, strictly rising, each a multiple of B or len(tokens). `ids`: uint64 `[m]`, not
        0, none in use. `bits`: float32 `[len(tokens)]`, finite and >= 0, or one number for every token;
        only those of new tokens count. Returns the ids that this supersedes (uint64, rising): records that
        were replaced, and tails on this path inside a newly covered block. A tail at a pinned depth is
        kept.
        """
        root = self._roots.get(namespace)
        if root is None:
            self._check_namespace(namespace)
            with self._lock:
                root = self._root(namespace)
        return self._trie.insert(root, tokens, bits, ends, ids)

    def touch(self, namespace: bytes, tokens: U32) -> int:
        """Marks what is stored of this path as used now; returns its depth."""
        root = self._roots.get(namespace)
        return self._unknown(namespace, tokens) if root is None else self._trie.touch(root, tokens)

    def pin(self, namespace: bytes, tokens: U32) -> None:
        """Counts a pin at depth len(tokens): nothing on the path to there is evicted. The path must be
        stored in full.

        A record that ends beyond is not protected; pin the path of that record for it.
        """
        self._trie.pin(self._known(namespace), tokens, 1)

    def unpin(self, namespace: bytes, tokens: U32) -> None:
        """Takes one pin back and touches the path. `ValueError` if none is counted at exactly this depth."""
        self._trie.pin(self._known(namespace), tokens, -1)

    def evict(self, below: int = NO_LIMIT) -> int | None:
        """Removes the last record of the least recently used leaf that is not pinned, trims the path, and
        returns the id; None if there is nothing to evict. Leaves whose last record is not `below` stay."""
        return self._trie.evict(below)

    def remove(self, record_id: int) -> bool:
        """Removes one record: trims the path if nothing is stored beyond it, else leaves a hole. False if
        unknown."""
        return self._trie.remove(record_id)

    def erase(self, namespace: bytes, tokens: U32) -> U64:
        """Removes a sequence that is stored in full: the block of its last token and all that continues it
        (with any pins there), then every ancestor that no other stored sequence shares, up to the first
        that is pinned.

        Returns the ids removed (uint64, rising); none if the path is not stored in full.
        """
        root = self._roots.get(namespace)
        if root is None:
            self._unknown(namespace, tokens)
            return np.zeros(0, np.uint64)
        return self._trie.erase(root, tokens)

    def __contains__(self, record_id: int) -> bool:
        return self._trie.contains(record_id)

    def path(self, record_id: int) -> tuple[bytes, U32]:
        """(namespace, all tokens up to the record's end). `KeyError` if unknown."""
        root, tokens = self._trie.path(record_id)
        return self._names[root], tokens

    def restore(
        self,
        namespaces: Sequence[bytes],
        which: U32,
        ids: U64,
        starts: U32,
        counts: U32,
        tags: U64,
        parent_tags: U64,
        bits: F32,
        tokens: U32,
        pinned: U8,
    ) -> U64:
        """Rebuilds an empty index from m catalog entries; returns the ids dropped (uint64, rising).

        Entry i is a block of `counts[i]` tokens at depth `starts[i]` in `namespaces[which[i]]`, `bits[i]`
        in all, with the 64-bit tag of its own key and of its parent's (0 for the first block); `tokens`
        holds the tokens of all entries, one after the other. An entry whose parent is missing or does not
        end where it starts, or that is impossible, is dropped; of two for the same path the higher id
        stays, and tails inside a longer, newer record go. Recency is by id. `ValueError` if the columns
        differ in length or the index is not empty.
        """
        for namespace in namespaces:
            self._check_namespace(namespace)
        if which.size and int(which.max()) >= len(namespaces):
            raise ValueError(f"which: {int(which.max())} is not an index into {len(namespaces)} namespaces")
        with self._lock:
            roots = np.array([self._root(namespace) for namespace in namespaces], np.uint32)
            mapped = roots[which] if which.size else np.zeros(0, np.uint32)
            return self._trie.restore(mapped, ids, starts, counts, tags, parent_tags, bits, tokens, pinned)

    def compact(self) -> None:
        """Rebuilds the token arena without garbage. Happens by itself when more than half is garbage."""
        self._trie.compact()

    def stats(self) -> dict[str, int]:
        """nodes, tokens, records, bytes (of memory), arena_tokens, garbage_tokens, namespaces."""
        return {**self._trie.stats(), "namespaces": len(self._names)}

    def _root(self, namespace: bytes) -> int:
        root = self._roots.get(namespace)
        if root is None:
            root = self._trie.new_root()
            self._names.append(namespace)
            self._roots[namespace] = root  # last: whoever finds it may use all of it
        return root

    def _known(self, namespace: bytes) -> int:
        self._check_namespace(namespace)
        root = self._roots.get(namespace)
        if root is None:
            raise ValueError("tokens: this path is not stored")
        return root

    def _unknown(self, namespace: bytes, tokens: U32) -> int:
        self._check_namespace(namespace)
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.uint32 or tokens.ndim != 1:
            raise ValueError("tokens: expected a 1-D C-contiguous uint32 array")
        return 0

    @staticmethod
    def _check_namespace(namespace: bytes) -> None:
        if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"namespace: expected {NAMESPACE_BYTES} bytes, found {namespace!r:.80}")
