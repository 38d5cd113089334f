"""The messages of vLLM's KV events: batches in msgpack, each event a map, or an array as before June 2026."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any

import msgpack

from kvstore.errors import MalformedEvents

BlockHash = int | bytes


@dataclass(frozen=True)
class BlockStored:
    """Blocks of one sequence that follow each other are in a medium now.

    Attributes:
        block_hashes: their names.
        parent_block_hash: of the block before the first of them; None for the first of a sequence.
        token_ids: all their tokens; empty where they were told before, of another medium.
        block_size: tokens of a block.
        lora_id: of no use here, as a store's identity has the adapters.
        medium: "GPU", "CPU", or "STORAGE".
        extra_keys: for each block what else its hash is made from; here the namespace, where it is not the default.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks are in a medium no more."""

    block_hashes: Sequence[BlockHash]
    medium: str | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing that was told before is true any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}


@dataclass(frozen=True)
class Batch:
    """Events that are sent together. time: unix seconds. rank: of data parallelism, None for none."""

    time: float
    events: Sequence[Event]
    rank: int | None = None


def packed(batch: Batch) -> bytes:
    """Return a message.

    Example:
        >>> unpacked(packed(Batch(1.5, [BlockRemoved([7], "CPU")])))
        Batch(time=1.5, events=[BlockRemoved(block_hashes=[7], medium='CPU')], rank=None)
    """
    events = [{"type": type(event).__name__, **_values(event)} for event in batch.events]
    message: bytes = msgpack.packb([batch.time, events, batch.rank])
    return message


def unpacked(message: bytes) -> Batch:
    """Return what a message says. Fields that are not known are left out, as in vLLM.

    Raises:
        MalformedEvents: it is no batch of events.
    """
    try:
        parts = msgpack.unpackb(message)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedEvents(f"the message is not msgpack: {error}") from error
    if not isinstance(parts, list) or not 2 <= len(parts) <= 3 or not isinstance(parts[1], list):
        raise MalformedEvents("the message is not [time, events, rank]")
    time, events = parts[:2]
    rank = parts[2] if len(parts) > 2 else None
    if isinstance(time, bool) or not isinstance(time, int | float) or not isinstance(rank, int | None):
        raise MalformedEvents("time is no number, or rank is no integer")
    return Batch(float(time), [_event(event) for event in events], rank)


def _values(event: Event) -> dict[str, Any]:
    """Its fields. Only `extra_keys` has a default in vLLM, and may be left out."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: value for name, value in values.items() if value is not None or name != "extra_keys"}


def _event(value: Any) -> Event:
    """A map with its type, or an array of its type and its fields in order."""
    given: dict[Any, Any]
    if isinstance(value, Mapping):
        kind, given = value.get("type"), {name: item for name, item in value.items() if name != "type"}
    elif isinstance(value, list) and value:
        kind, given = value[0], dict(enumerate(value[1:]))
    else:
        raise MalformedEvents("an event is neither a map nor an array")
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise MalformedEvents(f"an event of an unknown type: {kind!r}")
    known = [field.name for field in fields(made)]
    if isinstance(value, list):
        given = {known[place]: item for place, item in given.items() if place < len(known)}
    else:
        given = {name: item for name, item in given.items() if name in known}
    try:
        event = made(**given)
    except TypeError as error:
        raise MalformedEvents(f"{kind}: {error}") from error
    for name, (is_one, what) in _FIELDS.items():
        if name in given and not is_one(given[name]):
            raise MalformedEvents(f"{kind}: {name}: expected {what}")
    return event


def _are(found: Any, kinds: UnionType | type) -> bool:
    return isinstance(found, list) and all(isinstance(item, kinds) for item in found)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_hashes": (lambda found: _are(found, int | bytes), "integers or bytes"),
    "token_ids": (lambda found: _are(found, int), "integers"),
    "parent_block_hash": (lambda found: isinstance(found, int | bytes | None), "an integer, bytes or nothing"),
    "block_size": (lambda found: isinstance(found, int), "an integer"),
    "medium": (lambda found: isinstance(found, str | None), "a name or nothing"),
}
