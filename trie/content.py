"""The index of what stored blocks hold: spans of a new sequence that some stored block holds too, under any prefix.

Two prompts that differ early share no block under prefix hashing, yet may hold the same passages. A stored block may
serve as *donor* of the passage that it shares, at another position. `ContentIndex` says which: it posts a few hashes of
token windows a block, chosen by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD
2003, section 3): the least of every `winnow` consecutive windows of `window` tokens. Every run of at least
`window + winnow - 1` tokens that lies inside one block and in the query is found, unless its postings were dropped (see
`postings`); shorter ones often are. What is returned was compared token by token.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

import kvstore.trie._content as _content
from kvstore.trie.index import TrieIndex

__all__ = ["ContentIndex", "DonorSpan"]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

NAMESPACE_BYTES = 32
NO_SPACE = 0xFFFFFFFF  # nothing is ever inserted there
LAST_RECORD = (1 << 64) - 1
LIMITS = {
    "window": (2, 256),
    "winnow": (1, 256),
    "postings": (1, 255),
    "min_length": (1, 65536),
    "seed": (0, LAST_RECORD),
}


@dataclass(frozen=True, slots=True)
class DonorSpan:
    """Tokens of a query that a stored block holds, too. Immutable.

    Tokens [start, start + length) of the query are tokens [donor_start, donor_start + length) of the donor.

    Attributes:
        start, length: of the span in the query.
        record: number of the donor.
        donor_start: where the span begins in the donor.
        run: how many tokens directly before `start` the donor and its chain of parents share with the query, on the
            same diagonal; 0 at a seam. Donors err most right after a seam, so a long run is worth more.

    Example:
        >>> DonorSpan(start=100, length=40, record=7, donor_start=24, run=0).length
        40
    """

    start: int
    length: int
    record: int
    donor_start: int
    run: int


class ContentIndex:
    """The tokens of stored blocks, to find spans of a new sequence under any prefix. Nothing here is durable.

    Thread-safe: readers run in parallel with each other, writers one at a time; both release the GIL.

    A namespace is a 32-byte digest; blocks of different ones never match. One that nothing was ever inserted into costs
    nothing. `tokens` is always a 1-D C-contiguous uint32 array, read in place and not kept; it must not change during
    the call. Record numbers are 1 to 2**64 - 1 and never used again. Every method raises `ValueError` naming the
    argument for anything else, before anything changes.

    Memory: 90 to 102 bytes a block of 64 random tokens where a trie has them, and 4 bytes a token and 8 a block more
    where none has; it comes back when half is unused.

    Args:
        trie: an index that has the same records in blocks of the same tokens; they are read there, by number, when
            donors are looked for, and not kept twice. What has left it is not found, and is to be removed here, too. It
            lives as long as this. None: the tokens are kept here, and overwritten when their block is removed.
        window, winnow: see the module; 2 to 256 and 1 to 256 tokens.
        postings: how many places one hash may name, 1 to 255. Those of the highest record numbers (and last offsets)
            stay, so that tokens that occur often are found in the newest blocks. A place that was dropped does not come
            back when others leave.
        min_length: the least length of a span, 1 to 65536.
        seed: of the hashes; default is random, so that nobody can choose tokens that collide.

    Example:
        >>> index, space = ContentIndex(seed=1), bytes(32)
        >>> passage = np.arange(100, 164, dtype=np.uint32)
        >>> index.insert(space, record=1, parent=0, tokens=passage)
        True
        >>> query = np.concatenate([np.zeros(10, np.uint32), passage])
        >>> index.find(space, query)
        [DonorSpan(start=10, length=64, record=1, donor_start=0, run=0)]
    """

    def __init__(
        self,
        *,
        trie: TrieIndex | None = None,
        window: int = 16,
        winnow: int = 16,
        postings: int = 8,
        min_length: int = 8,
        seed: int | None = None,
    ) -> None:
        seed = secrets.randbits(64) if seed is None else seed
        given = {"window": window, "winnow": winnow, "postings": postings, "min_length": min_length, "seed": seed}
        for name, (low, high) in LIMITS.items():
            _check_int(name, given[name], low, high)
        self._index = _content.ContentIndex(**given, trie=None if trie is None else trie._trie)
        self._spaces: dict[bytes, int] = {}
        self._lock = threading.Lock()  # creation of spaces

    def insert(self, namespace: bytes, record: int, parent: int, tokens: U32) -> bool:
        """Add a block.

        Args:
            namespace: of the block.
            record: its number.
            parent: the record before it in its sequence, 0 for none; it need not be known yet.
            tokens: at most 65,536.

        Returns:
            False, and nothing is kept, if the block is shorter than `window`.

        Raises:
            ValueError: the record is known already, or an argument is malformed.
        """
        _check_namespace(namespace)
        _check_int("record", record, 1, LAST_RECORD)
        _check_int("parent", parent, 0, LAST_RECORD)
        _check_tokens(tokens)
        return self._index.insert(self._space(namespace), record, parent, tokens)

    def insert_many(
        self, namespaces: Sequence[bytes], which: U32, records: U64, parents: U64, counts: U32, tokens: U32 | None
    ) -> int:
        """Add m blocks in one call, as when a store is opened. All or nothing.

        Args:
            namespaces: digests.
            which: uint32 `[m]`; block i is in `namespaces[which[i]]`.
            records, parents: uint64 `[m]`, as for `insert`.
            counts: uint32 `[m]`, tokens of each block.
            tokens: the tokens of all blocks, one after the other. None: the trie has them, and they are read there when
                donors are first looked for; the blocks take 29 bytes each until then.

        Returns:
            How many blocks were long enough to be kept.
        """
        for namespace in namespaces:
            _check_namespace(namespace)
        _check_tokens(which, "which")
        if which.size and int(which.max()) >= len(namespaces):
            raise ValueError(
                f"which: expected indices below {len(namespaces)}, the namespaces, found {int(which.max())}"
            )
        spaces = np.array([self._space(namespace) for namespace in namespaces], np.uint32)
        mapped = spaces[which] if which.size else np.zeros(0, np.uint32)
        return self._index.insert_many(mapped, records, parents, counts, tokens)

    def remove(self, record: int) -> bool:
        """Forget a block; its memory is used again, or given back. False if unknown."""
        return _is_record(record) and self._index.remove(record)

    def find(
        self, namespace: bytes, tokens: U32, first: int = 0, *, exclude: U64 | Iterable[int] = ()
    ) -> list[DonorSpan]:
        """Find spans of `tokens[first:]` that stored blocks hold.

        A span lies inside one block; neighbours on one diagonal are neighbours in the result. If several blocks hold
        the same tokens, the chain (block after block on one diagonal) with the largest predicted saving is taken first,
        and the others get what is left. The saving is the sum over the chain's tokens of a + (1 - a) d / (d + h), d
        tokens after the seam, a = 0.6, h = 64 (worth.py); of equals the chain that ends in the newer record comes
        first.

        Takes time linear in the tokens, also for repetitive text: at most 256 tokens are compared for each, and what
        was found until then is returned. Blocks that are read in a trie count as compared. The first call makes the
        postings of all records that were inserted without tokens, about half a microsecond for each
        (`benchmarks/open.py`); other calls wait for 256 of them at most.

        Args:
            namespace: of the query.
            tokens: the query, at most 2**26 tokens.
            first: tokens before it are context: the last 4,096 of them lengthen runs, and no span covers them.
            exclude: records that must not be donors; they still lengthen the runs of those that follow them.

        Returns:
            Disjoint spans, rising in `start`.
        """
        _check_namespace(namespace)
        _check_tokens(tokens)
        _check_int("first", first, 0, tokens.size)
        columns = self._index.find(self._spaces.get(namespace, NO_SPACE), tokens, first, _records(exclude))
        return [DonorSpan(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def tokens(self, record: int) -> U32:
        """Return a copy of the tokens of a block.

        Raises:
            KeyError: the record is unknown, or has left the trie.
        """
        if not _is_record(record):
            raise KeyError(f"record: {record!r:.80} is not indexed")
        return self._index.tokens(record)

    def __contains__(self, record: object) -> bool:
        return _is_record(record) and record in self._index

    def __len__(self) -> int:
        return len(self._index)

    def stats(self) -> dict[str, int]:
        """Return records, tokens, entries (postings), waiting (records without postings, for nobody has looked for
        donors yet), bytes (of memory) and namespaces."""
        return {**self._index.stats(), "namespaces": len(self._spaces)}

    def _space(self, namespace: bytes) -> int:
        space = self._spaces.get(namespace)
        if space is None:
            with self._lock:
                space = self._spaces.setdefault(namespace, len(self._spaces))
        return space


_INTEGERS = (int, np.integer)  # a union would be made anew with every look


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, _INTEGERS) and not isinstance(value, bool) and low <= int(value) <= high


def _is_record(record: object) -> TypeGuard[int]:
    return _is_int(record, 1, LAST_RECORD)


def _records(values: U64 | Iterable[int]) -> U64:
    if isinstance(values, np.ndarray):
        return values  # the dtype is checked below the facade
    listed = list(values)
    for value in listed:
        _check_int("exclude", value, 0, LAST_RECORD)
    return np.array(listed, np.uint64)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not _is_int(value, low, high):
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, found {value!r:.80}")


def _check_tokens(tokens: U32, name: str = "tokens") -> None:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D C-contiguous uint32 array")


def _check_namespace(namespace: bytes) -> None:
    if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"namespace: expected {NAMESPACE_BYTES} bytes, found {namespace!r:.80}")
