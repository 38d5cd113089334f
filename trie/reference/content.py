"""`ReferenceContent`: the content index in obvious Python. The oracle that tests compare `_content.ContentIndex` with.

It has the same methods, arguments and results, except that it knows nothing of bytes. Hashes are the same, so that the
same windows are chosen and the same postings dropped; everything else is done the long way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.trie.worth import weight

__all__ = ["ReferenceContent"]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15
STEP = 0xD1342543DE82EF95
MAX_BLOCK = 65536
MAX_CONTEXT = 4096
WORK, WORK_LEAST = 256, 4096


def mix64(x: int) -> int:
    for _ in range(2):
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & MASK
    return x ^ x >> 32


@dataclass(slots=True)
class _Block:
    space: int
    parent: int
    tokens: list[int]


@dataclass(slots=True, eq=False)
class _Match:
    """query[begin:end] is the block's [start : start + end - begin]."""

    record: int
    begin: int
    end: int
    start: int
    before: _Match | None = None
    last: bool = True  # nothing continues it
    taken: bool = False

    def seam(self) -> int:
        match = self
        while match.before is not None:
            match = match.before
        return match.begin


def _equal_before(query: list[int], at: int, tokens: list[int], start: int) -> int:
    """How many tokens directly before query[at] and tokens[start] are equal."""
    n = 0
    while n < min(at, start) and query[at - n - 1] == tokens[start - n - 1]:
        n += 1
    return n


def _equal_after(query: list[int], at: int, tokens: list[int], start: int) -> int:
    """How many tokens from query[at] and tokens[start] on are equal."""
    n = 0
    while n < min(len(query) - at, len(tokens) - start) and query[at + n] == tokens[start + n]:
        n += 1
    return n


class ReferenceContent:
    """See `kvstore.trie._content.ContentIndex`. Not thread-safe, not fast."""

    def __init__(self, window: int, winnow: int, postings: int, min_length: int, seed: int) -> None:
        given = (window, winnow, postings, min_length)
        for value, (low, high) in zip(given, ((2, 256), (1, 256), (1, 255), (1, 65536)), strict=True):
            if not low <= value <= high:
                raise ValueError(f"{value} is not in {low}..{high}")
        self.window, self.winnow, self.postings, self.min_length = given
        self.seed = seed
        self._blocks: dict[int, _Block] = {}
        self._places: dict[int, list[tuple[int, int]]] = {}  # hash -> (record, offset), rising

    def chosen(self, space: int, tokens: list[int]) -> list[tuple[int, int]]:
        """(first token, 32-bit hash) of every window that winnowing chooses, rising."""
        key = mix64(self.seed + (space + 1) * STEP & MASK)
        hashes = []
        for i in range(len(tokens) - self.window + 1):
            total = 0
            for token in tokens[i : i + self.window]:
                total = (total * BASE + mix64(token ^ self.seed)) & MASK
            hashes.append(mix64(total ^ key))
        wide = min(self.winnow, len(hashes))
        places = set()
        for i in range(len(hashes) - wide + 1) if hashes else ():
            least = min(hashes[i : i + wide])
            places.add(max(j for j in range(i, i + wide) if hashes[j] == least))
        return [(place, hashes[place] & 0xFFFFFFFF) for place in sorted(places)]

    # ---- writing ----

    def insert(self, space: int, record: int, parent: int, tokens: U32) -> bool:
        one = np.array([record], np.uint64), np.array([parent], np.uint64), np.array([len(tokens)], np.uint32)
        return self.insert_many(np.array([space], np.uint32), *one, tokens) == 1

    def insert_many(self, spaces: U32, records: U64, parents: U64, counts: U32, tokens: U32) -> int:
        rows = list(zip(spaces.tolist(), records.tolist(), parents.tolist(), counts.tolist(), strict=True))
        numbers = [record for _, record, _, _ in rows]
        if sum(count for *_, count in rows) != len(tokens) or any(count > MAX_BLOCK for *_, count in rows):
            raise ValueError("counts")
        if 0 in numbers or len(set(numbers)) < len(numbers) or any(x in self._blocks for x in numbers):
            raise ValueError("records")
        if any(record == parent for _, record, parent, _ in rows):
            raise ValueError("parents")
        kept = at = 0
        for space, record, parent, count in rows:
            part: list[int] = tokens[at : at + count].tolist()
            at += count
            if count < self.window:
                continue
            kept += 1
            self._blocks[record] = _Block(space, parent, part)
            for offset, hashed in self.chosen(space, part):
                places = self._places.setdefault(hashed, [])
                places.append((record, offset))
                places.sort()
                del places[: -self.postings]
        return kept

    def remove(self, record: int) -> bool:
        if self._blocks.pop(record, None) is None:
            return False
        for places in self._places.values():
            places[:] = [place for place in places if place[0] != record]
        return True

    # ---- reading ----

    def __contains__(self, record: int) -> bool:
        return record in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def tokens(self, record: int) -> U32:
        return np.array(self._blocks[record].tokens, np.uint32)

    def stats(self) -> dict[str, int]:
        return {
            "records": len(self._blocks),
            "tokens": sum(len(block.tokens) for block in self._blocks.values()),
            "entries": sum(map(len, self._places.values())),
        }

    def find(self, space: int, tokens: U32, first: int, exclude: U64) -> tuple[U32, U32, U64, U32, U32]:
        if first > len(tokens):
            raise ValueError("first")
        shift = max(0, first - MAX_CONTEXT)
        barred: set[int] = set(exclude.tolist())
        query: list[int] = tokens[shift:].tolist()
        spans = self._choose(self._matches(space, query, first - shift, barred), first - shift, len(query), barred)
        rows = [
            (begin + shift, end - begin, m.record, m.start + begin - m.begin, begin - m.seam())
            for begin, end, m in spans
        ]
        kinds = (np.uint32, np.uint32, np.uint64, np.uint32, np.uint32)
        columns = list(zip(*rows, strict=True)) or [()] * 5
        a, b, c, d, e = (np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))
        return a, b, c, d, e

    def _matches(self, space: int, query: list[int], first: int, barred: set[int]) -> list[_Match]:
        """All maximal matches that the windows lead to, and what they continue in the parents' blocks."""
        found: list[_Match] = []
        work = WORK * len(query) + WORK_LEAST

        def newest(record: int, diagonal: int) -> _Match | None:
            same = [m for m in found if m.record == record and m.begin - m.start == diagonal]
            return same[-1] if same else None

        begin = max(0, first - (self.window + self.winnow - 2))
        for place, hashed in self.chosen(space, query[begin:]) if first < len(query) else ():
            at = begin + place
            for record, offset in reversed(self._places.get(hashed, [])):
                block = self._blocks[record]
                if block.space != space or record in barred:
                    continue
                known = newest(record, at - offset)
                if known is not None and at + self.window <= known.end:
                    continue
                if work <= 0:
                    return found
                if query[at : at + self.window] != block.tokens[offset : offset + self.window]:
                    work -= 1
                    continue
                back, on = _equal_before(query, at, block.tokens, offset), _equal_after(query, at, block.tokens, offset)
                match = _Match(record, at - back, at + on, offset - back)
                found.append(match)
                work -= 1 + back + on
                while match.start == 0 and match.begin > 0:
                    name = self._blocks[match.record].parent
                    parent = self._blocks.get(name)
                    if parent is None or parent.space != space:
                        break
                    n = len(parent.tokens)
                    before = newest(name, match.begin - n)
                    if before is None or before.end != match.begin:
                        if work <= 0:
                            break
                        back = _equal_before(query, match.begin, parent.tokens, n)
                        if not back:
                            break
                        match.before = _Match(name, match.begin - back, match.begin, n - back)
                        found.append(match.before)
                        work -= 1 + back
                        match.before.last = False
                        match = match.before
                        continue
                    match.before = before
                    before.last = False
                    break
        return found

    def _choose(self, matches: list[_Match], first: int, count: int, barred: set[int]) -> list[tuple[int, int, _Match]]:
        """Disjoint (begin, end, match), rising: chains by value, each cut by those before it."""

        def value(end: _Match) -> int:
            total, seam, match = 0, end.seam(), end
            while True:
                if match.record not in barred:
                    total += sum(weight(i - seam) for i in range(max(match.begin, first), match.end))
                if match.before is None:
                    return total
                match = match.before

        ends = [m for m in matches if m.last and m.end > first]
        ends.sort(key=lambda m: (-value(m), -m.record, m.begin, m.start))
        free = [i >= first for i in range(count)]
        spans = []
        for end in ends:
            match: _Match | None = end
            while match is not None and not match.taken:
                match.taken = True
                at = match.begin
                while at < match.end and match.record not in barred:
                    stop = at
                    while stop < match.end and free[stop]:
                        stop += 1
                    if stop - at >= self.min_length:
                        spans.append((at, stop, match))
                        free[at:stop] = [False] * (stop - at)
                    at = max(stop, at + 1)
                match = match.before
        return sorted(spans, key=lambda span: span[0])
