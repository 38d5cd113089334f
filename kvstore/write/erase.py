"""Erasing: removes what is stored, overwrites it in every file, and takes it out of the remote tier."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.core.results import EraseResult
from kvstore.core.session_record import SessionRecord
from kvstore.core.tokens import Tokens
from kvstore.residency.residency import Residency
from kvstore.residency.sessions import SessionTable
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.erase import not_removed
from kvstore.write.erase_remote import RemoteErasure
from kvstore.write.queue import WriteQueue


@dataclass
class Erasing(ABC):
    """The calls of `PutPath` that erase. One at a time: they are made by way of `PutPath.whole`.

    Attributes:
        remote_erasure: takes what is erased out of the remote tier; None if there is none, or it is not to be changed.
        arrived: returns when what came from there before is queued, as far as it is kept; None if nothing is.
    """

    residency: Residency
    queue: WriteQueue
    sessions: SessionTable
    remote_erasure: RemoteErasure | None = field(default=None, kw_only=True)
    arrived: Callable[[], None] | None = field(default=None, kw_only=True)

    @abstractmethod
    def note(self, key: bytes, record: SessionRecord | None) -> None:
        """Change a session, or delete it (None)."""

    @abstractmethod
    def delete_stored(self, namespace: bytes, tokens: Tokens, spare: int = 0) -> int:
        """Remove a sequence, or what is left of it if nothing continues that."""

    @abstractmethod
    def delete_namespace(self, namespace: bytes) -> int:
        """Remove all blocks and sessions of a namespace."""

    @abstractmethod
    def _remove(self, records: list[int]) -> None:
        """Removes records from the catalog."""

    def erase(self, namespace: bytes, tokens: Tokens) -> EraseResult:
        """Remove what is stored of a sequence, and overwrite it in every file; see `KVStore.delete`.

        Raises:
            DiskError: the disk refuses. What was begun is ended by the next erase or open; the error says so if nothing
                was, and then it is to be erased again.
        """
        with self._erasing():
            count = self.delete_stored(namespace, tokens)
        return self._erased(namespace, tokens, count)

    def remove_session(self, key: bytes, blocks: bool, erase: bool) -> EraseResult:
        """Forget a session, durably on return; see `Session.delete`.

        Args:
            key: of the session.
            blocks: also remove the blocks that no other session begins with.
            erase: overwrite it in every file.
        """
        record, spare = self.sessions.get(key), 0
        there = erase and blocks and record is not None
        with self._erasing(there) if erase else contextlib.nullcontext():
            spare = self.sessions.longest_shared(record.namespace, record.tokens, but=key) if record else 0
            self.note(key, None)
            count = self.delete_stored(record.namespace, record.tokens, spare) if record and blocks else 0
            self.queue.wait()
        return self._erased(record.namespace, record.tokens, count, spare, there) if record else EraseResult(0)

    def erase_namespace(self, namespace: bytes) -> EraseResult:
        """Remove a namespace with its sessions, and overwrite it in every file; see `KVStore.delete_namespace`."""
        with self._erasing():
            result = EraseResult(self.delete_namespace(namespace))
        return result if self.remote_erasure is None else self.remote_erasure.end(result)

    @contextlib.contextmanager
    def _erasing(self, there: bool = True) -> Iterator[None]:
        """What is removed inside is overwritten at the end. there: it is to go from the remote tier, too."""
        if self.arrived is not None:
            self.arrived()  # or it would be kept after it was erased
        remote = self.remote_erasure if there else None
        if remote is not None:
            remote.begin()
        try:
            yield from self._overwriting()
        except BaseException:
            if remote is not None:
                remote.end(EraseResult(0))  # what is gone here goes there
            raise

    def _overwriting(self) -> Iterator[None]:
        residency, disk = self.residency, self.residency.disk
        if disk is not None:
            disk.begin_erase()
        try:
            yield
            self.queue.wait()
            abandoned = residency.take_abandoned()
            residency.will_remove(abandoned)
            self._remove(abandoned)
        except CatalogError as error:
            raise not_removed(error) from error
        residency.departures.clear()
        residency.index.compact()
        if disk is not None:
            disk.end_erase()

    def _erased(self, namespace: bytes, tokens: Tokens, count: int, spare: int = 0, there: bool = True) -> EraseResult:
        match, size = self.residency.index.match(namespace, tokens, touch=False), self.residency.config.block_tokens
        kept = match.usable(size)
        longer = tokens[: kept + size]
        names = self.sessions.that_begin_with(namespace, longer) if len(longer) > kept else []
        result = EraseResult(count, kept, -(-kept // size), tuple(names))
        if self.remote_erasure is None or not there:
            return result
        self.remote_erasure.note_rest(namespace, tokens, max(kept, spare))
        return self.remote_erasure.end(result)
