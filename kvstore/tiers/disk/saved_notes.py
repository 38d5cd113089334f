"""What is noted beside sessions, in the catalog (FORMAT.md, "Sessions"). Called inside a transaction of the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstore.core.session_note import SessionNote
from kvstore.core.session_record import SessionHead, SessionRecord
from kvstore.tiers.disk.entry import checked, with_sum

Transaction = Any  # of LMDB, which only `environment` knows
_MARK = b"\0"  # what the keys of notes begin with; the database has tasks, too


@dataclass(frozen=True)
class SavedNotes:
    """The notes of sessions. Immutable; what it reads and writes is the transaction's.

    A program that knows of no notes leaves them when it removes a session. So a note counts only for the session that
    was made when it says, and `orphans` names those that are left.

    Attributes:
        database: where they are; None for a store of format 1 that is only read.
    """

    database: Any

    def of(self, txn: Transaction, head: SessionHead) -> SessionHead:
        """Return the same with what is noted beside the session."""
        note = self._note(txn, head.key)
        if note is None or note.created != head.created:
            return head
        return head._replace(hits=note.hits, metadata=note.metadata)

    def put(self, txn: Transaction, key: bytes, record: SessionRecord | None) -> tuple[bytes | None, bytes | None]:
        """Note what belongs to a session, or forget it if there is nothing; return the values before and after."""
        before = txn.get(_MARK + key, db=self.database)
        if record is None or not (record.hits or record.metadata):
            if before is not None:
                txn.delete(_MARK + key, db=self.database)
            return before, None
        value = with_sum(SessionNote(record.sequence, record.created, record.hits, record.metadata).pack())
        txn.put(_MARK + key, value, db=self.database)
        return before, value

    def pairs(self, txn: Transaction) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key of the session, value) of every note."""
        if self.database is None:
            return
        with txn.cursor(db=self.database) as cursor:
            if cursor.set_range(_MARK):
                for key, value in cursor:
                    if not key.startswith(_MARK):
                        break
                    yield key.removeprefix(_MARK), value

    def orphans(self, txn: Transaction, sessions: Any) -> list[bytes]:
        """Return the keys of notes whose session is not in the database `sessions`."""
        return [key for key, _ in self.pairs(txn) if txn.get(key, db=sessions) is None]

    def is_damaged(self, txn: Transaction, key: bytes) -> bool:
        """Return whether there is a note of a session that cannot be read."""
        there = self.database is not None and txn.get(_MARK + key, db=self.database) is not None
        return there and self._note(txn, key) is None

    def _note(self, txn: Transaction, key: bytes) -> SessionNote | None:
        value = txn.get(_MARK + key, db=self.database) if self.database is not None else None
        return note_of(value) if value is not None else None


def note_of(value: bytes) -> SessionNote | None:
    """Return the note in a value of the catalog; None if it is damaged."""
    body = checked(value)
    return SessionNote.unpack(body) if body is not None else None


def session_key_of(key: bytes) -> bytes | None:
    """Return the key of the session that a key of the database belongs to; None if it is another's."""
    return key.removeprefix(_MARK) if key.startswith(_MARK) else None
