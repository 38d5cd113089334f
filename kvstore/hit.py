"""What `put` and `get` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kvstore.approximate import ReusedSpan
    from kvstore.identity import Tokens
    from kvstore.layout import KVLayers


@dataclass(frozen=True)
class PutResult:
    """tokens: length of the sequence. new_tokens: tokens that were not stored before. new_blocks: blocks queued for
    writing. dropped_blocks: blocks not taken because the write queue stayed full and, with durability "put", those that
    could not be made durable (both also counted in `stats()`). waited_s: how long the queue made `put` wait."""

    tokens: int
    new_tokens: int
    new_blocks: int
    dropped_blocks: int
    waited_s: float


@dataclass(frozen=True)
class FlushResult:
    """durable_blocks: blocks written to disk since the last flush. dropped_blocks: blocks that could not be (full or
    failing disk); they are counted in `stats()` and may still be in memory."""

    durable_blocks: int
    dropped_blocks: int


@dataclass(frozen=True)
class SessionInfo:
    """One row of `KVStore.sessions()`. bytes: raw size of the session's cache. last_use: unix seconds."""

    id: str
    tokens: int
    bytes: int
    last_use: float


@dataclass(frozen=True)
class ClusterInfo:
    """Stored sequences that are alike (see `KVStore.clusters`). centroid: tokens, `[n]` uint32, of the most probable
    one; members: those of all, the most probable first, which is the centroid. radius_bits: the largest distance of a
    member from the centroid. shared_bits: information in what all of them begin with."""

    centroid: Tokens
    members: tuple[Tokens, ...]
    radius_bits: float
    shared_bits: float


class ApproximateLayers(tuple[Any, ...]):
    """The layers of an approximate hit, which `put` knows by this."""

    is_approximate = True


@dataclass(frozen=True)
class Hit:
    """A stored prefix.

    tokens: how many leading tokens matched. tiers: tokens by the tier they came from ("device", "queue" for blocks
    not yet written, "host", "disk"; "donors" for other sequences). seconds: time the get took. layers: per layer
    (K, V), each `[1, heads, tokens, dim]`; the caller owns them and may write into them. On the CPU heads are further
    apart than their tokens take (`get`'s `reserve`): a caller that needs contiguous tensors asks for none.

    Only where an approximate cache was asked for and given: exact_tokens: leading tokens that are exact, the others
    were taken from other sequences; spans: from where, with their estimated errors; recompute: positions to compute
    anew before the cache is used (`integrations.transformers.recompute`), those without any contents among them; kl:
    estimate of what the predictions lose then, nats a token. Such a cache is refused by `put`.
    """

    tokens: int
    tiers: dict[str, int]
    seconds: float
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    exact_tokens: int = -1
    spans: tuple[ReusedSpan, ...] = ()
    recompute: tuple[int, ...] = ()
    kl: float = 0.0
    _room: list[KVLayers] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.exact_tokens < 0:
            object.__setattr__(self, "exact_tokens", self.tokens)

    @property
    def approximate(self) -> bool:
        """Whether some of the cache was computed behind other tokens."""
        return self.exact_tokens < self.tokens

    def cache(self) -> Any:
        """A fresh transformers `DynamicCache` of these tensors, which it never writes into.

        The first one made of a hit appends behind them for as long as there is room (see `KVStore.get`); any other
        copies them when it grows.
        """
        from kvstore.integrations.transformers.cache import cache_from_layers

        # pop and not a look: two threads must not both get it
        room = self._room.pop() if self._room else None
        cache = cache_from_layers(self.layers, room)
        cache.is_approximate = self.approximate
        return cache

    @property
    def nbytes(self) -> int:
        """Raw bytes of the tensors."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)
