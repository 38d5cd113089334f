"""Takes out of the remote tier what is erased here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvstore.core.keys import chain_key, chain_keys
from kvstore.core.record import key_tag
from kvstore.core.results import EraseResult
from kvstore.core.tokens import Tokens
from kvstore.residency.residency import Residency
from kvstore.tiers.remote.tier import RemoteTier


class RemoteErasure:
    """The keys of the blocks that one erase removes, and then their values. For one thread.

    Args:
        root: gives the key before the first block of a namespace.
        settle: returns when nothing is on its way to the remote tier that was begun before.
    """

    def __init__(
        self,
        residency: Residency,
        tier: RemoteTier,
        root: Callable[[bytes], bytes],
        settle: Callable[[], None],
    ) -> None:
        self._residency = residency
        self._tier = tier
        self._root = root
        self._settle = settle
        self._keys: dict[bytes, None] | None = None  # None: nothing is being erased

    def begin(self) -> None:
        """An erase begins."""
        self._keys = {}

    def note(self, namespace: bytes, records: Iterable[int], tokens: Tokens | None = None) -> None:
        """These records, which the index has given up and the tiers still have, are removed: all of a namespace, or
        those of a sequence `tokens` and what continues it."""
        if self._keys is None:
            return
        size, root = self._residency.config.block_tokens, self._root(namespace)
        before = [] if tokens is None else chain_keys(root, tokens[: len(tokens) // size * size], size)
        by_tag = {key_tag(key): key for key in before}
        for start, parent_tag, block, known in sorted(self._blocks(records), key=lambda found: found[0]):
            parent = by_tag.get(parent_tag) if start else root
            key = known if known is not None or parent is None else chain_key(parent, block)
            if key is not None and len(block) == size:
                by_tag[key_tag(key)] = key
                self._keys[key] = None

    def note_rest(self, namespace: bytes, tokens: Tokens, kept: int) -> None:
        """So are the whole blocks of a sequence behind its first `kept` tokens, which may not be stored here."""
        if self._keys is None:
            return
        size = self._residency.config.block_tokens
        whole = tokens[: len(tokens) // size * size]
        keys = list(chain_keys(self._root(namespace), whole, size))
        self._keys.update(dict.fromkeys(keys[kept // size :]))
        for key in keys[: kept // size]:  # a block that is kept in part is another sequence's record there
            self._keys.pop(key, None)

    def end(self, result: EraseResult) -> EraseResult:
        """Remove the values of what was noted; return the result with what came of it."""
        keys, self._keys = list(self._keys or ()), None
        self._settle()
        removed, left = self._tier.delete(keys)
        return replace(result, remote_blocks=removed, remote_left=left)

    def _blocks(self, records: Iterable[int]) -> list[tuple[int, int, Tokens, bytes | None]]:
        """(start, tag of the key before, tokens, key if it is known) of records."""
        found: list[tuple[int, int, Tokens, bytes | None]] = []
        stored: list[int] = []
        for record in records:
            block = self._residency.queued(record)
            held = self._residency.host.get(record) if block is None else None
            if block is not None:
                found.append((block.start, key_tag(block.parent_key), block.tokens, block.key))
            elif held is not None:
                head = held.header
                found.append((head.start, key_tag(head.parent), head.tokens, head.key))
            else:
                stored.append(record)
        return found + self._stored(stored)

    def _stored(self, records: Sequence[int]) -> list[tuple[int, int, Tokens, bytes | None]]:
        disk = self._residency.disk
        entries = disk.known(records) if disk is not None and records else []
        return [(entry.start, entry.parent_tag, entry.tokens, None) for entry in entries if entry is not None]
