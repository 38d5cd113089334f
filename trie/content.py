"""The index of what stored blocks hold: spans of a new sequence that some stored block holds too, under any prefix.

Two prompts that differ early share no block under prefix hashing, yet may hold the same passages. A stored block may
serve as *donor* of the passage that it shares, at another position. `ContentIndex` says which: it keeps the tokens of
every block and posts a few hashes of token windows a block, chosen by winnowing (Schleimer, Wilkerson and Aiken, SIGMOD
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
    """tokens[start : start + length] of the query are the donor's [donor_start : donor_start + length].

    `record`: the donor. `run`: how many tokens directly before `start` the donor and its chain of parents share with
    the query, on the same diagonal; 0 at a seam. Donors err most right after a seam, so a long run is worth more.
    """

    start: int
    length: int
    record: int
    donor_start: int
    run: int


class ContentIndex:
    """Thread-safe: readers run in parallel with each other, writers one at a time; the GIL is released in both.

    `window`, `winnow`: see the module; 2..256 and 1..256 tokens. `postings`: how many places one hash may name,
    1..255; those of the highest record numbers (and last offsets) stay, so what is said often is found in the newest
    blocks; one that was dropped does not come back when others leave. `min_length`: the least length of a span,
    1..65536. `seed`: of the hashes; by default from the system, so that nobody can choose tokens that collide.

    Namespaces are 32-byte digests; blocks of different ones never match. One that nothing was ever inserted into costs
    nothing. `tokens` is always a 1-D C-contiguous uint32 numpy array, read in place and not kept; it must not change
    during the call. Record numbers are 1..2**64 - 1 and never used again. Every method raises `ValueError` naming the
    argument for anything else, before anything changes. Nothing here is durable: `insert_many` fills a new index.

    Memory: 6 to 8 bytes a token in blocks of 64, the 4 of the token among them; it comes back when half is unused.
    """

    def __init__(
        self, *, window: int = 16, winnow: int = 16, postings: int = 8, min_length: int = 8, seed: int | None = None
    ) -> None:
        seed = secrets.randbits(64) if seed is None else seed
        given = {"window": window, "winnow": winnow, "postings": postings, "min_length": min_length, "seed": seed}
        for name, (low, high) in LIMITS.items():
            _check_int(name, given[name], low, high)
        self._index = _content.ContentIndex(**given)
        self._spaces: dict[bytes, int] = {}
        self._lock = threading.Lock()  # creation of spaces

    def insert(self, namespace: bytes, record: int, parent: int, tokens: U32) -> bool:
        """Adds a block of at most 65,536 tokens, which are copied. `parent`: the record before it in its sequence, 0
        for none; it need not be known (yet). False, and nothing is kept, for a block shorter than `window`.
        `ValueError` if the record is known."""
        _check_namespace(namespace)
        _check_int("record", record, 1, LAST_RECORD)
        _check_int("parent", parent, 0, LAST_RECORD)
        _check_tokens(tokens)
        return self._index.insert(self._space(namespace), record, parent, tokens)

    def insert_many(
        self, namespaces: Sequence[bytes], which: U32, records: U64, parents: U64, counts: U32, tokens: U32
    ) -> int:
        """Adds m blocks in one call, as when a store is opened; returns how many were long enough to be kept.

        Block i is in `namespaces[which[i]]` (uint32) and has the number `records[i]`, the parent `parents[i]` (uint64)
        and `counts[i]` tokens (uint32); `tokens` holds those of all blocks, one after the other. All or nothing.
        """
        for namespace in namespaces:
            _check_namespace(namespace)
        _check_tokens(which, "which")
        if which.size and int(which.max()) >= len(namespaces):
            raise ValueError(f"which: {int(which.max())} is not an index into {len(namespaces)} namespaces")
        spaces = np.array([self._space(namespace) for namespace in namespaces], np.uint32)
        mapped = spaces[which] if which.size else np.zeros(0, np.uint32)
        return self._index.insert_many(mapped, records, parents, counts, tokens)

    def remove(self, record: int) -> bool:
        """Forgets a block; its memory is used again, or given back. False if unknown."""
        return _is_record(record) and self._index.remove(record)

    def find(
        self, namespace: bytes, tokens: U32, first: int = 0, *, exclude: U64 | Iterable[int] = ()
    ) -> list[DonorSpan]:
        """Spans of `tokens[first:]` (at most 2**26 tokens in all) that stored blocks hold; disjoint, rising in start.

        Tokens before `first` are context: they lengthen runs (the last 4,096 of them), no span covers them. `exclude`:
        records that must not serve; they still lengthen the runs of those that follow them. A span lies inside one
        block; neighbours on one diagonal are neighbours in the result.

        Where several blocks hold the same tokens, the chain (block after block on one diagonal) with the largest
        predicted saving is taken first and the others get what is left: the sum over its tokens of
        a + (1 - a) d / (d + h), d tokens after the seam, a = 0.6, h = 64; of equals the one that ends in the newer
        record. Takes time linear in the tokens, also for repetitive text: at most 256 tokens are compared for each,
        and what was found until then is returned.
        """
        _check_namespace(namespace)
        _check_tokens(tokens)
        _check_int("first", first, 0, tokens.size)
        columns = self._index.find(self._spaces.get(namespace, NO_SPACE), tokens, first, _records(exclude))
        return [DonorSpan(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def tokens(self, record: int) -> U32:
        """A copy of the tokens of a block. `KeyError` if unknown."""
        if not _is_record(record):
            raise KeyError(f"record: {record!r:.80} is not indexed")
        return self._index.tokens(record)

    def __contains__(self, record: object) -> bool:
        return _is_record(record) and record in self._index

    def __len__(self) -> int:
        return len(self._index)

    def stats(self) -> dict[str, int]:
        """records, tokens, entries (postings), bytes (of memory), namespaces."""
        return {**self._index.stats(), "namespaces": len(self._spaces)}

    def _space(self, namespace: bytes) -> int:
        space = self._spaces.get(namespace)
        if space is None:
            with self._lock:
                space = self._spaces.setdefault(namespace, len(self._spaces))
        return space


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= high


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
        raise ValueError(f"{name}: expected a whole number in {low}..{high}, found {value!r:.80}")


def _check_tokens(tokens: U32, name: str = "tokens") -> None:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D C-contiguous uint32 array")


def _check_namespace(namespace: bytes) -> None:
    if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"namespace: expected {NAMESPACE_BYTES} bytes, found {namespace!r:.80}")
