"""The sessions in the catalog, and the texts that they share (FORMAT.md, "Sessions").

Every method is called inside a transaction of the catalog, so sessions, texts and counts of references change together.
What changes something returns by how many bytes (`bytes_of`) sessions and texts have grown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvstore.core.session_record import (
    TEXT_KEY_BYTES,
    TEXT_TOKENS,
    UNCOUNTED,
    SessionHead,
    SessionRecord,
    SessionText,
    no_text,
    tokens_of,
)
from kvstore.tiers.disk.entry import checked, with_sum
from kvstore.tiers.disk.format1 import session_of_format_1
from kvstore.tiers.disk.saved_notes import SavedNotes

Transaction = Any  # of LMDB, which only `environment` knows
# LMDB: a node has 10 bytes beside key and value. Its pages are two thirds full, for keys arrive in no order.
_NODE_BYTES = 10
_OVER, _UNDER = 3, 2
_RELIEF = 16  # what is over its budget is brought this share of it below, so that the next change is not over again


_NOTE_BYTES = 8 + 24  # sum and head of a note; its key has a byte more than the session's, which is nothing


def bytes_of(key: bytes, value: bytes) -> int:
    """Return how many bytes of the catalog's pages a pair takes, about."""
    return (_NODE_BYTES + len(key) + len(value)) * _OVER // _UNDER


_TEXT_COST = bytes_of(bytes(TEXT_KEY_BYTES), with_sum(SessionText(b"", 1, bytes(4 * TEXT_TOKENS)).pack()))


def most_bytes(record: SessionRecord) -> int:
    """Return how many bytes a session takes if it shares nothing."""
    head = bytes_of(record.key, with_sum(record.head(no_text(record.namespace)).pack()))
    note = bytes_of(record.key, bytes(_NOTE_BYTES) + record.metadata)
    return len(record.tokens) // TEXT_TOKENS * _TEXT_COST + head + note


@dataclass(frozen=True)
class SavedSessions:
    """The databases that sessions are kept in. Immutable; what it reads and writes is the transaction's.

    Attributes:
        sessions: heads by session key.
        texts: texts by their keys; None for a store of format 1 that is only read.
        notes: what is noted beside them.
    """

    sessions: Any
    texts: Any
    notes: SavedNotes

    # ---- reading -------------------------------------------------------------------------------------------------

    def head(self, txn: Transaction, key: bytes) -> SessionHead | None:
        """Return what stands with a session; None if there is none or it is damaged."""
        value = txn.get(key, db=self.sessions)
        return self._head(txn, key, value) if value is not None else None

    def get(self, txn: Transaction, key: bytes) -> SessionRecord | None:
        """Return a session with its tokens; None if there is none, or something of it is damaged."""
        value = txn.get(key, db=self.sessions)
        body = checked(value) if value is not None else None
        if body is None:
            return None
        head = SessionHead.unpack(key, body)
        if head is None:
            return session_of_format_1(key, body)
        tokens = tokens_of(head, lambda text: self._text(txn, text))
        return self.notes.of(txn, head).with_tokens(tokens) if tokens is not None else None

    def heads(self, txn: Transaction) -> Iterator[SessionHead]:
        """Yield every intact session, by key."""
        with txn.cursor(db=self.sessions) as cursor:
            for key, value in cursor:
                head = self._head(txn, key, value)
                if head is not None:
                    yield head

    def count(self, txn: Transaction) -> int:
        """Return how many sessions there are, damaged ones included."""
        return int(txn.stat(self.sessions)["entries"])

    def held(self, txn: Transaction, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of some keys that have a session here, a damaged one included; looks at these keys alone."""
        with txn.cursor(db=self.sessions) as cursor:
            return {key for key in keys if cursor.set_key(key)}

    def nbytes(self, txn: Transaction) -> int:
        """Return how many bytes all sessions and texts take."""
        with txn.cursor(db=self.sessions) as cursor:
            total = sum(bytes_of(key, value) for key, value in cursor)
        total += sum(bytes_of(key, value) for key, value in self.notes.pairs(txn))
        if self.texts is None:
            return total
        return total + _TEXT_COST * int(txn.stat(self.texts)["entries"])

    def by_namespace(self, txn: Transaction) -> Counter[bytes]:
        """Return how many sessions each namespace has, by the first bytes of its digest; damaged ones included."""
        with txn.cursor(db=self.sessions) as cursor:
            return Counter(key[:TEXT_KEY_BYTES] for key in cursor.iternext(values=False))

    # ---- writing -------------------------------------------------------------------------------------------------

    def put(self, txn: Transaction, key: bytes, record: SessionRecord) -> int:
        """Add a session, or replace the one under `key`."""
        texts, old, grown = record.texts(), self._referring(txn, key), 0
        end = texts[-1][0] if texts else no_text(record.namespace)
        if old is None or old.end != end:
            grown = self._refer(txn, texts)
            if old is not None:
                grown -= self._release(txn, old.end)
        before, value = txn.get(key, db=self.sessions), with_sum(record.head(end).pack())
        txn.put(key, value, db=self.sessions)
        grown += self._note(txn, key, record)
        return grown + bytes_of(key, value) - (bytes_of(key, before) if before is not None else 0)

    def delete(self, txn: Transaction, key: bytes) -> int:
        """Remove a session, and the texts that no other one needs."""
        head, before = self._referring(txn, key), txn.get(key, db=self.sessions)
        if before is None:
            return 0
        txn.delete(key, db=self.sessions)
        grown = self._note(txn, key, None)
        return grown - bytes_of(key, before) - (self._release(txn, head.end) if head is not None else 0)

    def counted(self, txn: Transaction) -> int:
        """Remove notes whose sessions are gone; return how many bytes the rest takes."""
        for key in self.notes.orphans(txn, self.sessions):
            self.notes.put(txn, key, None)
        return self.nbytes(txn)

    def shrink(self, txn: Transaction, now: float, over: int, budget: int) -> tuple[int, int, int]:
        """Remove the sessions whose time is over, and if that is not enough those that were used least recently; those
        that are pinned go last.

        Args:
            now: unix seconds.
            over: by how many bytes they take more than the budget; 0 or less: only time counts.
            budget: bytes that they may take.

        Returns:
            By how many bytes they have grown (0 or less), and how many went for their time, and for space.
        """
        rows = [
            (not 0.0 < head.expiry <= now, head.pinned, head.used, key)
            for key, head in ((head.key, head) for head in self.heads(txn))
        ]
        grown, expired, evicted = 0, 0, 0
        goal = over + budget // _RELIEF if over > 0 else 0
        for lives, _, _, key in sorted(rows):
            if lives and -grown >= goal:
                break
            grown += self.delete(txn, key)
            expired, evicted = expired + (not lives), evicted + lives
        return grown, expired, evicted

    def upgrade(self, txn: Transaction, after: bytes, most: int) -> bytes | None:
        """Rewrite those of the next `most` sessions behind the key `after` that are of format 1. Counts no bytes.

        Returns:
            The key to go on behind; None if that was all.
        """
        old: list[SessionRecord] = []
        last: bytes | None = None
        with txn.cursor(db=self.sessions) as cursor:
            there = cursor.set_range(after + b"\0")
            for _ in range(most):
                if not there:
                    last = None
                    break
                last, value = cursor.item()
                body = checked(value)
                record = session_of_format_1(last, body) if body is not None else None
                if record is not None:
                    old.append(record)
                there = cursor.next()
        for record in old:
            self.put(txn, record.key, record)
        return last

    # ---- soundness -----------------------------------------------------------------------------------------------

    def is_intact(self, database: Any, key: bytes, value: bytes) -> bool:
        """Return whether a value of `sessions` or of `texts` is whole, and that of its key."""
        body = checked(value)
        if body is None:
            return False
        if database is self.texts:
            return SessionText.unpack(key, body) is not None
        return SessionHead.unpack(key, body) is not None or session_of_format_1(key, body) is not None

    def problems(self, txn: Transaction) -> list[str]:
        """Return what is wrong with sessions, texts and counts of references."""
        found, needed = [], Counter[bytes]()
        with txn.cursor(db=self.sessions) as cursor:
            for key, value in cursor:
                head = self._head(txn, key, value)
                if head is None:
                    found.append(f"session {key[16:]!r}: its entry is damaged")
                    continue
                needed[head.end] += 1
                if self.get(txn, key) is None:
                    found.append(f"session {key[16:]!r}: some of its tokens are missing or damaged")
                if self.notes.is_damaged(txn, key):
                    found.append(f"session {key[16:]!r}: what is noted beside it is damaged")
        if self.texts is None:
            return found
        counted: dict[bytes, int] = {}
        with txn.cursor(db=self.texts) as cursor:
            for key, value in cursor:
                body = checked(value)
                text = SessionText.unpack(key, body) if body is not None else None
                if text is None:
                    found.append(f"text {key.hex()} of sessions is damaged")
                else:
                    counted[key] = text.references
                    needed[text.before] += 1
        found += [
            f"text {key.hex()} of sessions: {count} references are noted, {needed[key]} are there"
            for key, count in counted.items()
            if needed[key] != count and count != UNCOUNTED
        ]
        return found

    # ---- inside --------------------------------------------------------------------------------------------------

    def _head(self, txn: Transaction, key: bytes, value: bytes) -> SessionHead | None:
        body = checked(value)
        if body is None:
            return None
        head = SessionHead.unpack(key, body)
        if head is None and (record := session_of_format_1(key, body)) is not None:
            return record.head()
        return self.notes.of(txn, head) if head is not None else None

    def _note(self, txn: Transaction, key: bytes, record: SessionRecord | None) -> int:
        before, after = self.notes.put(txn, key, record)
        return sum(sign * bytes_of(key, value) for sign, value in ((-1, before), (1, after)) if value is not None)

    def _referring(self, txn: Transaction, key: bytes) -> SessionHead | None:
        """What stands with a session, if that is of format 2: then a text may count it."""
        value = txn.get(key, db=self.sessions)
        body = checked(value) if value is not None else None
        return SessionHead.unpack(key, body) if body is not None else None

    def _text(self, txn: Transaction, key: bytes) -> SessionText | None:
        value = txn.get(key, db=self.texts) if self.texts is not None else None
        body = checked(value) if value is not None else None
        return SessionText.unpack(key, body) if body is not None else None

    def _refer(self, txn: Transaction, texts: list[tuple[bytes, bytes, bytes]]) -> int:
        """One more session ends with the last of these texts, and each names the one before: the first that is there
        already is named once more, and those before it are. One that is damaged is written again, to stay: how often
        it was named is not known any more."""
        there, grown = False, 0
        for key, before, tokens in reversed(texts):
            text = self._text(txn, key)
            if text is None:
                damaged = txn.get(key, db=self.texts)
                text = SessionText(before, 1 if damaged is None and not there else UNCOUNTED, tokens)
                grown += _TEXT_COST - (bytes_of(key, damaged) if damaged is not None else 0)
            elif not there:
                there, text = True, text.referred(1)
            else:
                continue
            txn.put(key, with_sum(text.pack()), db=self.texts)
        return grown

    def _release(self, txn: Transaction, key: bytes) -> int:
        """One session fewer ends with this text. A text that nobody names any more goes, and names no other. Returns
        how many bytes went."""
        text, freed = self._text(txn, key), 0
        while text is not None:
            if text.references > 1:
                txn.put(key, with_sum(text.referred(-1).pack()), db=self.texts)
                break
            txn.delete(key, db=self.texts)
            freed += _TEXT_COST
            key = text.before
            text = self._text(txn, key)
        return freed
