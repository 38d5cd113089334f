"""Where a cache with windows or states can be gone on from, by what the remote tier has of its sequence.

A store that has nothing knows only tokens. So it asks for marks, which say behind which blocks places are, then for the
places of one block, and reads the last: that names every record. Records that lack nothing need no place where they
follow each other from the beginning on, for there every end of a block is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_key, chain_keys
from kvstore.core.layout import KVLayout
from kvstore.core.places import PLACE_BYTES, Place
from kvstore.core.windows import usable_end
from kvstore.metrics import Metric, Metrics
from kvstore.read.remote import RemoteRequest
from kvstore.read.remote_check import RemoteCheck
from kvstore.tiers.remote.names import mark_of, part_of, place_of
from kvstore.tiers.remote.tier import RemoteTier

_AT_ONCE = 64
_MOST_STATES = 16  # times the largest, of all blocks before a place: those in the middle have states where puts ended


@dataclass(frozen=True)
class FoundPlace:
    """A place, and what its records must be.

    Attributes:
        parts: what the record of each block goes by in the remote tier, from the first block on.
        checks: what each of them must be.
        place: what was read; where no record lacks anything it was not needed, and is made up.
        values: everything there that the place needs.
    """

    parts: Sequence[bytes]
    checks: Sequence[RemoteCheck]
    place: Place
    values: Sequence[bytes]

    @property
    def end(self) -> int:
        """How many tokens come before it."""
        return self.checks[-1].end


@dataclass(frozen=True)
class PlaceSearch:
    """Looks for the last place of a sequence. Thread-safe: has no state of its own.

    Attributes:
        exact: refuse what codecs with loss made.
        most_state_bytes: larger states are refused.
    """

    tier: RemoteTier
    layout: KVLayout
    block_tokens: int
    exact: bool
    most_state_bytes: int
    metrics: Metrics

    def find(self, request: RemoteRequest, deadline: float) -> FoundPlace | None:
        """Return the last place behind the tokens that are here; None for none, or none in time."""
        size, tokens = self.block_tokens, request.tokens
        whole = len(tokens) // size
        keys = [request.root, *chain_keys(request.root, tokens[: whole * size], size)]
        plain = 0
        if not self.layout.states:
            plain = self.tier.leading(keys[1:], deadline) * size
        least = max(request.local, plain)
        blocks = range(least // size, -(-len(tokens) // size))
        for begin in range(len(blocks), 0, -_AT_ONCE):
            some = blocks[max(0, begin - _AT_ONCE) : begin]
            marks = self.tier.there([mark_of(keys[i]) for i in some], deadline)
            for i in (i for i, there in zip(reversed(some), reversed(marks), strict=True) if there):
                if self.tier.clock() >= deadline:
                    return None  # not the earlier ones: marks may be there without end
                found = self._in_block(request, keys[: i + 1], least, deadline)
                if found is not None:
                    return found
        if plain <= request.local:
            return None
        count = plain // size
        nothing = (0,) * count, (False,) * count
        place = Place(keys[count], request.namespace, plain, size, *nothing)
        return self._found(request, keys[: count + 1], place, [])

    def _in_block(
        self, request: RemoteRequest, keys: Sequence[bytes], least: int, deadline: float
    ) -> FoundPlace | None:
        """The last place in the block behind `keys`, and behind `least` tokens."""
        size, tokens = self.block_tokens, request.tokens
        start = (len(keys) - 1) * size
        ends = range(min(len(tokens), start + size), max(start, least), -1)
        ids = [chain_key(keys[-1], tokens[start:end]) for end in ends]
        answers = self.tier.there([place_of(key) for key in ids], deadline)
        for end, key in (pair for pair, there in zip(zip(ends, ids, strict=True), answers, strict=True) if there):
            value = self.tier.read(place_of(key), PLACE_BYTES, deadline)
            if isinstance(value, Reason):
                if value in (Reason.REMOTE_GONE, Reason.REMOTE_REFUSED):  # else that says nothing of what is there
                    self.tier.beliefs.note([place_of(key)], False)
                continue
            place = self._usable(value, request, key, end)
            if place is not None:
                return self._found(request, [*keys, key], place, [place_of(key), mark_of(keys[-1])])
            self.tier.beliefs.note([place_of(key)], False)
        return None

    def _usable(self, value: bytes, request: RemoteRequest, key: bytes, end: int) -> Place | None:
        """The place that was asked for, if a cache can be gone on with there."""
        size = self.block_tokens
        try:
            place = Place.unpack(value)
            if (place.key, place.namespace, place.end, place.block_tokens) != (key, request.namespace, end, size):
                raise ValueError("another place")
            ends = [min((i + 1) * size, end) for i in range(len(place.cuts))]
            if usable_end(self.layout, size, place.cuts, ends, end) != end:
                raise ValueError("a cache cannot be gone on with there, by its own account")
            has_states = bool(self.layout.states)
            if has_states != place.with_states[-1] or (any(place.with_states) and not has_states):
                raise ValueError("states are missing there, or the layout has none")
            if has_states != bool(place.state_bytes) or place.state_bytes > self.most_state_bytes:
                raise ValueError(f"states of {place.state_bytes} bytes")
            if place.state_bytes * sum(place.with_states) > _MOST_STATES * self.most_state_bytes:
                raise ValueError(f"{sum(place.with_states)} blocks with states of {place.state_bytes} bytes")
        except ValueError as error:
            self.metrics.add(Metric.REMOTE_DAMAGED, because=f"a place at {end} tokens: {error}")
            return None
        return place

    def _found(
        self, request: RemoteRequest, keys: Sequence[bytes], place: Place, others: Sequence[bytes]
    ) -> FoundPlace:
        size, tokens = self.block_tokens, request.tokens
        rows = list(zip(keys[1:], place.cuts, place.with_states, strict=True))
        parts = [part_of(*row) for row in rows]
        checks = [
            RemoteCheck(
                self.layout,
                self.exact,
                request.namespace,
                key,
                keys[i],
                i * size,
                tokens[i * size : min((i + 1) * size, place.end)],
                cut,
                place.state_bytes * has_states,
            )
            for i, (key, cut, has_states) in enumerate(rows)
        ]
        return FoundPlace(parts, checks, place, [*parts, *others])
