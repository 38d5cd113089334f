"""Takes out of the remote tier what is erased here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_key, chain_keys
from kvstore.core.places import PLACE_BYTES, Place
from kvstore.core.record import FLAG_STATES, key_tag
from kvstore.core.results import EraseResult
from kvstore.core.tokens import Tokens
from kvstore.residency.residency import Residency
from kvstore.tiers.remote.names import KEY_BYTES, mark_of, part_of, place_of
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.write.upload import Uploader

# Of a block: start, tag of the key before, tokens, key if it is known, and its cut and whether it has states.
_Known = tuple[int, int, Tokens, bytes | None, tuple[int, bool]]


class RemoteErasure:
    """The keys of the blocks that one erase removes, and then their values. For one thread.

    Args:
        root: gives the key before the first block of a namespace.
        uploader: has what is on its way to the remote tier.
        has_places: the layout has windows or states.
    """

    def __init__(
        self,
        residency: Residency,
        tier: RemoteTier,
        root: Callable[[bytes], bytes],
        uploader: Uploader,
        has_places: bool = False,
    ) -> None:
        self._residency = residency
        self._tier = tier
        self._root = root
        self._uploader = uploader
        self._has_places = has_places
        self._keys: dict[bytes, None] | None = None  # None: nothing is being erased
        self._namespace: bytes | None = None  # which is erased as a whole
        self._parents: dict[bytes, bytes] = {}  # of keys, as far as they are known
        self._tokens: dict[bytes, Tokens] = {}  # of blocks, by their keys
        self._starts: dict[bytes, int] = {}  # where blocks begin, by their keys
        self._spared: tuple[bytes, int] = b"", 0  # a block by its key, and how many of its tokens stay
        self._parts: dict[bytes, None] = {}  # what records go by that lack something, or have states
        self._unknown = 0  # what may be there, for no server said so in time

    def begin(self) -> None:
        """An erase begins."""
        self._keys, self._parts, self._parents, self._tokens, self._starts = {}, {}, {}, {}, {}
        self._spared, self._namespace, self._unknown = (b"", 0), None, 0

    def note(self, namespace: bytes, records: Iterable[int], tokens: Tokens | None = None) -> None:
        """These records, which the index has given up and the tiers still have, are removed: all of a namespace, or
        those of a sequence `tokens` and what continues it."""
        if self._keys is None:
            return
        if tokens is None:
            self._namespace = namespace
        size, root = self._residency.config.block_tokens, self._root(namespace)
        before = [] if tokens is None else chain_keys(root, tokens[: len(tokens) // size * size], size)
        by_tag = {key_tag(key): key for key in before}
        for start, parent_tag, block, known, kind in sorted(self._blocks(records), key=lambda found: found[0]):
            parent = by_tag.get(parent_tag) if start else root
            key = known if known is not None or parent is None else chain_key(parent, block)
            if key is not None and (len(block) == size or self._has_places):
                by_tag[key_tag(key)] = key
                self._keys[key] = None
                self._starts[key] = start
                self._parts[part_of(key, *kind)] = None
                if parent is not None:
                    self._parents[key], self._tokens[key] = parent, block

    def note_rest(self, namespace: bytes, tokens: Tokens, kept: int) -> None:
        """So are the whole blocks of a sequence behind its first `kept` tokens, which may not be stored here."""
        if self._keys is None:
            return
        size = self._residency.config.block_tokens
        whole = tokens if self._has_places else tokens[: len(tokens) // size * size]
        keys = list(chain_keys(self._root(namespace), whole, size))
        first = kept // size if kept < len(whole) else len(keys)  # a block kept in part is another sequence's there
        self._keys.update(dict.fromkeys(keys[first:]))
        for i, key in enumerate(keys):
            self._parents[key] = keys[i - 1] if i else self._root(namespace)
            self._tokens[key], self._starts[key] = whole[i * size : (i + 1) * size], i * size
        for key in keys[:first]:
            self._keys.pop(key, None)
        if first < len(keys):
            self._spared = keys[first], kept % size

    def end(self, result: EraseResult) -> EraseResult:
        """Remove the values of what was noted; return the result with what came of it."""
        keys, parts, self._keys, self._parts = list(self._keys or ()), self._parts, None, {}
        for header in self._uploader.erase(keys, self._namespace):
            keys.append(header.key)
            parts[part_of(header.key, header.cut, bool(header.flags & FLAG_STATES))] = None
            self._parents[header.key], self._tokens[header.key] = header.parent, header.tokens
            self._starts[header.key] = header.start
        self._unknown += not self._uploader.settle()
        keys = list(dict.fromkeys(keys))
        if self._has_places:
            keys = self._values(keys, parts)
            removed, left = self._tier.delete(keys)
        else:
            removed, left = self._tier.erase(keys, self._before(keys))
        return replace(result, remote_blocks=removed, remote_left=left + self._unknown)

    def _before(self, keys: Sequence[bytes]) -> list[bytes]:
        """The blocks that stay, of the groups of those that go: a parcel that begins with one of them may hold more."""
        erased, size, found = set(keys), self._residency.config.block_tokens, dict[bytes, None]()
        for key in keys if self._tier.group > 1 else ():
            at = key
            for _ in range(self._starts[key] // size % self._tier.group):
                parent = self._parents.get(at)
                if parent is None or parent in erased or parent in found:
                    self._unknown += parent is None  # it cannot be asked for
                    break
                found[parent] = None
                at = parent
        return list(found)

    def _values(self, keys: Sequence[bytes], parts: Iterable[bytes]) -> list[bytes]:
        """All that may be there of these blocks: records of theirs that are known here or that a place of theirs names,
        places and marks."""
        deadline = self._tier.clock() + self._tier.config.write_timeout_s
        keys = [*keys, *self._tails(keys, deadline)]
        erased = set(keys)
        found = dict.fromkeys([*keys, *(part for part in parts if part[:KEY_BYTES] in erased)])
        for key in self._there(keys, place_of, deadline):
            value = self._tier.read(place_of(key), PLACE_BYTES, deadline)
            self._unknown += isinstance(value, Reason) and value is not Reason.REMOTE_GONE
            with contextlib.suppress(ValueError):
                place, at = Place.unpack(value if isinstance(value, bytes) else b""), key
                for cut, has_states in zip(reversed(place.cuts), reversed(place.with_states), strict=True):
                    if at not in erased:
                        break
                    found[part_of(at, cut, has_states)] = None
                    at = self._parents.get(at, b"")
        for key in keys:
            found |= {place_of(key): None, mark_of(key): None}
        return list(found)

    def _tails(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """The keys of places inside of these blocks: earlier ends of what is erased, which this store may have no
        record of any more."""
        spared, kept = self._spared
        tails: list[bytes] = []
        known = [key for key in keys if key in self._tokens]
        marked = set(self._there(list({self._parents[key] for key in known}), mark_of, deadline))
        for key in (key for key in known if self._parents[key] in marked):
            parent, tokens = self._parents[key], self._tokens[key]
            first = kept if key == spared else 0
            inside = [chain_key(parent, tokens[:count]) for count in range(first + 1, len(tokens))]
            self._parents |= dict.fromkeys(inside, parent)
            tails += inside
        return self._there(tails, place_of, deadline)

    def _there(self, keys: Sequence[bytes], value: Callable[[bytes], bytes], deadline: float) -> list[bytes]:
        """Those of the keys of which there is such a value."""
        answers = self._tier.there([value(key) for key in keys], deadline, sure=True) if keys else []
        self._unknown += answers.count(None)
        return [key for key, there in zip(keys, answers, strict=True) if there]

    def _blocks(self, records: Iterable[int]) -> list[_Known]:
        found: list[_Known] = []
        stored: list[int] = []
        for record in records:
            block = self._residency.queued(record)
            held = self._residency.host.get(record) if block is None else None
            if block is not None:
                kind = block.cut, block.has_states
                found.append((block.start, key_tag(block.parent_key), block.tokens, block.key, kind))
            elif held is not None:
                head = held.header
                kind = head.cut, bool(head.flags & FLAG_STATES)
                found.append((head.start, key_tag(head.parent), head.tokens, head.key, kind))
            else:
                stored.append(record)
        return found + self._stored(stored)

    def _stored(self, records: Sequence[int]) -> list[_Known]:
        disk = self._residency.disk
        entries = disk.known(records) if disk is not None and records else []
        return [
            (entry.start, entry.parent_tag, entry.tokens, None, (entry.cut, bool(entry.flags & FLAG_STATES)))
            for entry in entries
            if entry is not None
        ]
