"""The index of everything that a store holds: namespaces of token prefixes in one radix trie.

A stored sequence is cut in blocks of `block_tokens` (B). Each stored block is a *record* with a 64-bit id
that is never reused. A record that ends at depth e covers the tokens [floor((e - 1) / B) * B, e): a full
block ends at a multiple of B, a tail anywhere else. The trie keeps every token, so a match is exact to the
token, and the bits (-log2 P) of every prefix.

Traffic is counted per node: `insert`, `touch` and a touching `match` count on all of the path that is
stored. With the model's bits that makes the Dirichlet mixture `(count + a p) / (total + a)` of every token
(`prior.mixture_bits`), which `best_match`, `bits`, `shared_bits`, `ultrametric`, `distance`, `prune` and
`near` go by. All tokens of an edge (a run that nothing branches off from) share a count, and p is there the
geometric mean; what is not stored counts as if it were, with uniform bits and no traffic.

Recency is kept per node: an operation that touches a path makes all of it the most recent, and `evict`
takes from the least recent leaf, so that a stored block always has its parents.

`remove` may take a full block out of the middle of a sequence. That leaves a *hole*: what lies behind it stays where it
is, and can be reached again as soon as a record fills the hole. The index keeps the id of a hole as long as it is one:
until a record fills it (`insert` returns the id then), or nothing is stored behind it any more (`take_released`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.trie._trie import Trie
from kvstore.trie.prior import CONCENTRATION, UNIFORM_BITS_PER_TOKEN

__all__ = ["Match", "TrieIndex"]

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

NO_LIMIT = (1 << 64) - 1  # no record has this number

NAMESPACE_BYTES = 32

# How many nodes `near` looks at: about a millisecond at worst.
VISITS = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """What the trie knows about a query. Immutable.

    Attributes:
        depth: how many leading tokens of the query are in the trie.
        bits: -log2 P of that prefix by the model alone, as it was inserted.
        records: uint64 `[ceil(depth / B)]`; for each block that holds a token < depth the id of the record that covers
            it best, 0 for a hole.
        ends: uint32, of the same length; the depth where that record ends, 0 for a hole. The end of the last one may
            lie beyond `depth` (a block of another sequence, which shares the tokens up to depth) or, if nothing better
            is stored, before it.

    Example:
        >>> match = Match(depth=6, bits=96.0, records=np.array([1, 2], np.uint64), ends=np.array([4, 8], np.uint32))
        >>> match.usable(block_tokens=4)
        6
    """

    depth: int
    bits: float
    records: U64
    ends: U32

    def usable(self, block_tokens: int) -> int:
        """Return how many leading tokens records cover without a gap, at most `depth`."""
        ends: list[int] = self.ends.tolist()
        for i, end in enumerate(ends):
            if end < (i + 1) * block_tokens:
                return min(max(end, i * block_tokens), self.depth)
        return self.depth


_NOTHING = Match(0, 0.0, np.zeros(0, np.uint64), np.zeros(0, np.uint32))


class TrieIndex:
    """Token prefixes and their records, by namespace. Nothing here is durable; `restore` rebuilds it.

    Thread-safe: readers run in parallel with each other, writers one at a time; both release the GIL.

    A namespace is a 32-byte digest. One that nothing was ever inserted into matches nothing and costs nothing. `tokens`
    is always a 1-D C-contiguous uint32 array, read in place and not kept; it must not change during the call. Every
    method raises `ValueError` naming the argument for anything else, before anything changes.

    Args:
        block_tokens: B, tokens of a block, 1 to 65536.
        concentration: a of the mixture, 1e-6 to 1e6: how many observations the model's word is worth.

    Example:
        >>> index, space = TrieIndex(block_tokens=4), bytes(32)
        >>> tokens = np.arange(8, dtype=np.uint32)
        >>> index.insert(space, tokens, ends=np.array([4, 8], np.uint32), ids=np.array([1, 2], np.uint64)).tolist()
        []
        >>> match = index.match(space, tokens[:6])
        >>> match.depth, match.records.tolist(), match.usable(4)
        (6, [1, 2], 6)
        >>> index.evict(), index.longest_prefix(space, tokens)
        (2, 4)
    """

    def __init__(self, block_tokens: int = 64, concentration: float = CONCENTRATION) -> None:
        self._trie = Trie(block_tokens, concentration)
        self._roots: dict[bytes, int] = {}
        self._names: list[bytes] = []  # root -> namespace
        self._lock = threading.Lock()  # creation of roots

    @property
    def block_tokens(self) -> int:
        """Tokens of a full block."""
        return self._trie.block_tokens

    @property
    def concentration(self) -> float:
        """How many observations the model's word is worth."""
        return self._trie.concentration

    @property
    def namespaces(self) -> tuple[bytes, ...]:
        """Digests of the namespaces that anything was ever inserted into."""
        return tuple(self._names)

    def longest_prefix(self, namespace: bytes, tokens: U32) -> int:
        """Return how many leading tokens are in the trie. The fastest look-up; touches nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return self._unknown(namespace, tokens)
        return self._trie.longest_prefix(root, tokens)

    def best_match(self, namespace: bytes, tokens: U32) -> tuple[int, float]:
        """Return (depth, shared bits) of the stored prefix that shares the most information with the query.

        Bits are by the mixture. Information only grows with depth, so this is the longest prefix; (0, 0.0) if none.
        """
        root = self._roots.get(namespace)
        if root is None:
            return self._unknown(namespace, tokens), 0.0
        return self._trie.best_match(root, tokens)

    def bits(self, namespace: bytes, tokens: U32) -> float:
        """Return -log2 P of a path by the mixture, >= 0. O(nodes on the path)."""
        root = self._roots.get(namespace)
        if root is None:
            self._unknown(namespace, tokens)
            return len(tokens) * UNIFORM_BITS_PER_TOKEN
        return self._trie.bits(root, tokens)

    def shared_bits(self, namespace: bytes, p: U32, q: U32) -> float:
        """Return -log2 P(p ^ q), the information in the common prefix of two paths. Neither need be stored."""
        root = self._roots.get(namespace)
        if root is None:
            return self._unknown_shared(namespace, p, q) * UNIFORM_BITS_PER_TOKEN
        return self._trie.shared_bits(root, p, q)

    def ultrametric(self, namespace: bytes, p: U32, q: U32) -> float:
        """Return P(p ^ q), in (0, 1]: of three paths the two largest are equal (the strong triangle inequality).

        Not zero for p = q: how close a path is to itself is how probable it is. Below the smallest double it
        stays there; compare `shared_bits` instead.
        """
        return max(math.exp2(-self.shared_bits(namespace, p, q)), math.ulp(0.0))

    def distance(self, namespace: bytes, p: U32, q: U32) -> float:
        """Return the bits of p and of q below their common prefix: a tree metric, zero only if p equals q."""
        root = self._roots.get(namespace)
        if root is None:
            apart = len(p) + len(q) - 2 * self._unknown_shared(namespace, p, q)
            return apart * UNIFORM_BITS_PER_TOKEN
        return self._trie.distance(root, p, q)

    def match(self, namespace: bytes, tokens: U32, *, touch: bool = True) -> Match:
        """Return the longest stored prefix with its records.

        The record that covers a partial last block is searched among at most 4096 nodes below the match point; in a
        wider fan without records it may go unfound.

        Args:
            namespace, tokens: the query.
            touch: count the prefix as traffic, and mark it and the covering record as used now.
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
        keep_tails: bool = False,
    ) -> U64:
        """Add a path, of which any part may be stored already, and set the records that end at `ends`; touch it.

        Args:
            namespace, tokens: the path.
            ends: uint32 `[m]`, strictly rising, each a multiple of B or len(tokens).
            ids: uint64 `[m]`, 1 to 2^63 - 1, none in use.
            bits: float32 `[len(tokens)]`, finite and >= 0, or one number for every token; only those of new tokens
                count.
            keep_tails: no tail is superseded.

        Returns:
            The ids that this supersedes (uint64, rising): records that were replaced, holes that were filled, and tails
            on this path inside a newly covered block. A tail at a pinned depth is kept.
        """
        root = self._roots.get(namespace)
        if root is None:
            self._check_namespace(namespace)
            with self._lock:
                root = self._root(namespace)
        return self._trie.insert(root, tokens, bits, ends, ids, keep_tails)

    def tails(self, namespace: bytes, tokens: U32) -> list[tuple[int, int]]:
        """Return (id, end) of every tail on the stored path of `tokens`, the deepest first: also of those inside of a
        longer record, which `match` does not name. Touches nothing."""
        root = self._roots.get(namespace)
        return [] if root is None else self._trie.tails(root, tokens)

    def covers(self, namespace: bytes, tokens: U32) -> list[tuple[int, int]]:
        """Return (id, end) of every record that holds the stored path of `tokens` to its end inside a block, the one
        that `match` names among them; nothing if it ends with a block. Looks where `match` does. Touches nothing."""
        root = self._roots.get(namespace)
        return [] if root is None else self._trie.covers(root, tokens)

    def touch(self, namespace: bytes, tokens: U32) -> int:
        """Mark what is stored of this path as used now; return its depth."""
        root = self._roots.get(namespace)
        return self._unknown(namespace, tokens) if root is None else self._trie.touch(root, tokens)

    def pin(self, namespace: bytes, tokens: U32) -> None:
        """Count a pin at depth len(tokens): nothing on the path to there is evicted.

        A record that ends beyond is not protected; pin the path of that record for it.

        Raises:
            ValueError: the path is not stored in full.
        """
        self._trie.pin(self._known(namespace), tokens, 1)

    def unpin(self, namespace: bytes, tokens: U32) -> None:
        """Take one pin back and touch the path.

        Raises:
            ValueError: no pin is counted at exactly this depth.
        """
        self._trie.pin(self._known(namespace), tokens, -1)

    def evict(self, below: int = NO_LIMIT) -> int | None:
        """Remove the last record of the least recently used leaf that is not pinned, and trim the path.

        Args:
            below: leaves whose last record has this id or a higher one stay.

        Returns:
            The id. None if there is nothing to evict.
        """
        return self._trie.evict(below)

    def remove(self, record_id: int) -> bool:
        """Remove one record: trim the path if nothing is stored beyond it, else leave a hole. False if unknown."""
        return self._trie.remove(record_id)

    def prune(self, namespace: bytes, max_bits: float) -> U64:
        """Remove every record whose prefix has more than `max_bits`, but for those that a pin protects.

        Returns:
            Their ids (uint64), the deepest first. O(nodes of the namespace).
        """
        root = self._roots.get(namespace)
        if root is None:
            self._check_namespace(namespace)
            if math.isnan(max_bits):
                raise ValueError("max_bits: must not be NaN")
            return np.zeros(0, np.uint64)
        return self._trie.prune(root, max_bits)

    def erase(self, namespace: bytes, tokens: U32) -> U64:
        """Remove a sequence that is stored in full.

        This takes the block of its last token and all that continues it (with any pins there), then every ancestor that
        no other stored sequence shares, up to the first that is pinned.

        Returns:
            The ids removed (uint64, rising); none if the path is not stored in full.
        """
        root = self._roots.get(namespace)
        if root is None:
            self._unknown(namespace, tokens)
            return np.zeros(0, np.uint64)
        return self._trie.erase(root, tokens)

    def __contains__(self, record_id: int) -> bool:
        return self._trie.contains(record_id)

    def path(self, record_id: int) -> tuple[bytes, U32]:
        """Return the namespace, and all tokens up to the record's end.

        Raises:
            KeyError: the record is unknown.
        """
        root, tokens = self._trie.path(record_id)
        return self._names[root], tokens

    def leaf(self, record_id: int) -> tuple[float, U64] | None:
        """Return the bits of a leaf record, and the records above it (uint64, the deepest first).

        A leaf record is the last one of a path that nothing continues. None for any other record and for an unknown
        one. O(records on the path).
        """
        return self._trie.leaf(record_id)

    def near(self, record_id: int, radius_bits: float, visits: int = VISITS) -> tuple[U64, F64] | None:
        """Return the other leaf records of the namespace within a `distance` of this one.

        The search goes up from the leaf while that is within the radius, and from there down.

        Args:
            record_id: a leaf record.
            radius_bits: the largest distance.
            visits: how many nodes to look at, the newest branches of the nearest ancestors first; in a wider fan some
                records are missed.

        Returns:
            Ids (uint64) and distances (float64), in no order. None if the record is no leaf.
        """
        return self._trie.near(record_id, radius_bits, visits)

    def counts(self) -> tuple[U64, U32]:
        """Return the ids of all records (uint64 `[m]`, rising) and their traffic (uint32 `[m]`), for `restore`.

        Traffic is how often operations went through the last tokens of a record; it saturates at 2^32 - 1.
        """
        return self._trie.counts()

    def holes(self) -> tuple[U64, U32]:
        """Return the ids of all holes (uint64 `[m]`, rising) and their traffic (uint32 `[m]`), for `restore`."""
        return self._trie.holes()

    def is_hole(self, record_id: int) -> bool:
        """Return whether this record left a hole, which is there still."""
        return self._trie.is_hole(record_id)

    def take_released(self) -> U64:
        """Return the ids of holes that went since the last call because nothing is stored behind them any more.

        Each is returned once (uint64, rising). Until this is called they are kept in a list.
        """
        return self._trie.take_released()

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
        traffic: U32 | None = None,
        holes: U8 | None = None,
        keep_tails: bool = False,
        token_at: U64 | None = None,
    ) -> U64:
        """Rebuild an empty index from m catalog entries.

        Entries may come in any order of ids. An entry is dropped if it is impossible, if its parent is missing, or if
        the parent does not end where the entry starts. A hole is a parent like any other; it is dropped if nothing is
        behind it. Of two entries for the same path the record stays and not the hole, else the higher id. Tails inside
        a longer, newer record go. Recency is by id.

        With `traffic` the count is as before where a record ends. Elsewhere (where paths part inside a block, and at
        the empty prefix) it is what went on into the branches that are stored: traffic that ended there, or went on
        into what is gone, is forgotten. The model's bits of a block are spread evenly over it. If neither applies,
        every probability is as before, to the float32 of `bits`. If counts contradict each other, a prefix gets the sum
        of what continues it.

        Args:
            namespaces: digests.
            which: uint32 `[m]`; entry i is in `namespaces[which[i]]`.
            ids: uint64 `[m]`.
            starts: uint32 `[m]`, the depth where an entry starts.
            counts: uint32 `[m]`, its tokens.
            tags: uint64 `[m]`, the tag of its key.
            parent_tags: uint64 `[m]`, the tag of its parent's key, 0 for a first block.
            bits: float32 `[m]`, of all its tokens.
            tokens: the tokens of all entries.
            pinned: uint8 `[m]`, not 0 for an entry that is pinned.
            traffic: uint32 `[m]`, what `counts()` or `holes()` returned for it; default is none.
            holes: uint8 `[m]`, not 0 for an entry that is a hole; default is none.
            keep_tails: tails inside of a longer record stay.
            token_at: uint64 `[m]`, where in `tokens` those of each begin; default is one after the other.

        Returns:
            The ids dropped (uint64, rising).

        Raises:
            ValueError: the columns differ in length, tokens are missing, or the index is not empty.
        """
        with self._lock:
            mapped = self._roots_of(namespaces, which)
            columns = mapped, ids, starts, counts, tags, parent_tags, bits, tokens, pinned, traffic, holes
            return self._trie.restore(*columns, keep_tails, token_at)

    def compact(self) -> None:
        """Rebuild the token arena without garbage. Happens by itself when more than half is garbage."""
        self._trie.compact()

    def stats(self) -> dict[str, int]:
        """Return nodes, tokens, records, holes, bytes (of memory), arena_tokens, garbage_tokens and namespaces."""
        return {**self._trie.stats(), "namespaces": len(self._names)}

    def _roots_of(self, namespaces: Sequence[bytes], which: U32) -> U32:
        for namespace in namespaces:
            self._check_namespace(namespace)
        most = int(which.max()) if which.size else -1
        if most >= len(namespaces):
            raise ValueError(f"which: expected indices below {len(namespaces)}, the namespaces, found {most}")
        roots = np.array([self._root(namespace) for namespace in namespaces], np.uint32)
        return roots[which] if which.size else np.zeros(0, np.uint32)

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
            raise ValueError("tokens: this path is not stored; insert it first")
        return root

    def _unknown(self, namespace: bytes, tokens: U32) -> int:
        self._check_namespace(namespace)
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.uint32 or tokens.ndim != 1:
            raise ValueError("tokens: expected a 1-D C-contiguous uint32 array")
        return 0

    def _unknown_shared(self, namespace: bytes, p: U32, q: U32) -> int:
        self._unknown(namespace, p)
        self._unknown(namespace, q)
        count = min(len(p), len(q))
        apart = np.flatnonzero(p[:count] != q[:count])
        return int(apart[0]) if apart.size else count

    @staticmethod
    def _check_namespace(namespace: bytes) -> None:
        if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"namespace: expected {NAMESPACE_BYTES} bytes, found {namespace!r:.80}")
