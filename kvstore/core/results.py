"""What `put` and `get` return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.core.explanation import Reason
from kvstore.core.keys import NamespaceDigest, namespace_digest
from kvstore.core.lazy_layers import LazyLayers
from kvstore.timing import NOWHERE, Where

if TYPE_CHECKING:
    from kvstore.core.approximate import Estimates, ReusedSpan
    from kvstore.core.layout import KVLayers, KVLayout
    from kvstore.core.states import State
    from kvstore.core.tokens import Tokens


_NO_NAME = NamespaceDigest(namespace_digest(b""))


@dataclass(frozen=True)
class PutResult:
    """What `KVStore.put` did.

    Attributes:
        tokens: length of the sequence.
        new_tokens: tokens that were not stored before.
        new_blocks: blocks queued for writing.
        dropped_blocks: blocks not taken because the write queue stayed full, or the store cannot hold them beside what
            is pinned; with durability "put" also blocks that could not be made durable. `stats()` counts them.
        waited_s: seconds that `put` waited for space in the queue.
        pinned: whether the sequence is pinned as was asked for. False if no pin was asked for, and if the pin was
            refused because pinned sequences take all of their share (`StoreConfig.pinned_share`); the sequence is
            stored without it then.
        missing_from: None, or the position of the first token before the `start` of the put that is not stored (any
            more), or not so that the next block can follow it. Nothing was stored then; put again with the cache from
            there on.

    Example:
        >>> done = PutResult(tokens=100, new_tokens=36, new_blocks=1, dropped_blocks=0, waited_s=0.0)
        >>> done.tokens - done.new_tokens  # were stored before
        64
    """

    tokens: int
    new_tokens: int
    new_blocks: int
    dropped_blocks: int
    waited_s: float
    pinned: bool = False
    missing_from: int | None = None


@dataclass(frozen=True)
class FlushResult:
    """What became durable.

    Attributes:
        durable_blocks: blocks written to disk since the last flush.
        dropped_blocks: blocks that could not be written (full or failing disk). They may still be in memory;
            `stats()` counts them.
        remote_due: with remote=True, prefixes that are to be written to the remote tier and are not all there yet.

    Example:
        >>> FlushResult(durable_blocks=8, dropped_blocks=0).dropped_blocks
        0
    """

    durable_blocks: int
    dropped_blocks: int
    remote_due: int = field(default=0, repr=False)


@dataclass(frozen=True)
class RequestReport:
    """What a call of an attached model or of `generate` reused, `KVStore.last_request`; sums over the rows of a batch.

    Attributes:
        prompt_tokens: of the prompt.
        reused_tokens: among them those that came from the store.
        computed_tokens: the others.
        new_tokens: tokens of prompt and answer that were not stored before, and are now; not how many were generated. A
            last block that grows is written anew, and counts whole.
        tiers: reused tokens by where they came from.
        get_seconds: what getting them took.
        seconds: what the whole call took, the model included.
        served: whether the store served the call. A store that failed whenever it was asked, as a closed one does, did
            not.
        why: why no more was reused, or why the store did not serve the call; "" if nothing was missing.

    Example:
        >>> report = RequestReport(100, 64, 36, 40, {"disk": 64}, 0.01, 1.5, served=True)
        >>> report.reused_tokens / report.prompt_tokens
        0.64
    """

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    new_tokens: int
    tiers: dict[str, int]
    get_seconds: float
    seconds: float
    served: bool
    why: str = ""


@dataclass(frozen=True)
class EraseResult:
    """What an erase did: `KVStore.delete`, `KVStore.delete_namespace` and `Session.delete` with erase=True.

    Attributes:
        removed_blocks: blocks that are gone from every file of the store.
        kept_tokens: leading tokens of the sequence that are still stored with their cache, because other sequences
            begin with them, or pins keep them.
        kept_blocks: blocks that hold those tokens.
        sessions: names of other sessions that have more of its tokens than those; erase them, too, if they are to go.
        remote_blocks: values that were removed from the remote tier.
        remote_left: values that may still be there, for a server did not answer.

    Example:
        >>> EraseResult(removed_blocks=3).kept_tokens
        0
    """

    removed_blocks: int
    kept_tokens: int = 0
    kept_blocks: int = 0
    sessions: tuple[str, ...] = ()
    remote_blocks: int = field(default=0, repr=False)
    remote_left: int = field(default=0, repr=False)


@dataclass(frozen=True)
class CompactResult:
    """What `KVStore.compact` did.

    Attributes:
        freed_bytes: of files that were deleted.
        moved_records: records that lie elsewhere now.
        expired_records: records whose time to live was over.

    Example:
        >>> CompactResult(freed_bytes=1 << 26, moved_records=3, expired_records=0).freed_bytes
        67108864
    """

    freed_bytes: int
    moved_records: int
    expired_records: int


@dataclass(frozen=True)
class SessionInfo:
    """One row of `KVStore.sessions()`.

    Attributes:
        id: the session's name.
        tokens: length of its sequence.
        bytes: raw size of its cache.
        last_use: unix seconds.
        namespace: digest of its namespace; `KVStore.session` takes it as `namespace`.
        created: unix seconds.
        hits: how often it was resumed.
        expires: end of its time to live in unix seconds, 0 for never.
        pinned: whether it is forgotten only after all that are not.
        metadata: what `Session.save` was given.
        stored_tokens, stored_bytes: leading tokens whose cache is stored, and what the blocks that hold them take;
            None if `sessions` was not asked for them. Blocks that sessions share count for each.

    Example:
        >>> SessionInfo("alice", tokens=100, bytes=51200, last_use=1.7e9).id
        'alice'
    """

    id: str
    tokens: int
    bytes: int
    last_use: float
    namespace: NamespaceDigest = _NO_NAME
    created: float = 0.0
    hits: int = 0
    expires: float = 0.0
    pinned: bool = False
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    stored_tokens: int | None = None
    stored_bytes: int | None = None


@dataclass(frozen=True)
class ClusterInfo:
    """Stored sequences that are alike; see `KVStore.clusters`.

    Attributes:
        centroid: tokens of the most probable sequence, `[n]` uint32.
        members: tokens of all sequences, the most probable first, which is the centroid.
        radius_bits: the largest distance of a member from the centroid.
        shared_bits: information in the prefix that all of them share.

    Example:
        >>> from kvstore.core.tokens import as_tokens
        >>> centroid = as_tokens([1, 2, 3])
        >>> ClusterInfo(centroid, (centroid, as_tokens([1, 2, 4])), radius_bits=16.0, shared_bits=32.0).radius_bits
        16.0
    """

    centroid: Tokens
    members: tuple[Tokens, ...]
    radius_bits: float
    shared_bits: float


class ApproximateLayers(tuple[Any, ...]):
    """The layers of an approximate hit: a tuple by whose class `put` knows them, and refuses them.

    Example:
        >>> ApproximateLayers(()).is_approximate
        True
    """

    is_approximate = True


@dataclass(frozen=True, repr=False)
class Hit:
    """A stored prefix and its cache.

    Attributes:
        tokens: how many leading tokens matched.
        tiers: tokens by where they came from: "device", "queue" (not yet written), "host", "disk", and "donors" for
            tokens of other sequences.
        seconds: time that the get took.
        layers: per layer (K, V), each `[1, heads, tokens, dim]`; a layer with a window has the last tokens, as the
            model would have kept them. The caller owns them and may write into them. They are
            not contiguous if `get` reserved room behind them; `reserve=0` gives contiguous tensors. Of a get with
            lazy=True a `LazyLayers`, a sequence that waits for the layer that is taken from it.
        exact_tokens: leading tokens that are exact. Fewer than `tokens` only if an approximate cache was asked for
            and given; `put` refuses such a cache.
        spans: where the other tokens were taken from, with their estimated errors.
        recompute: positions to compute anew before the cache is used, see `integrations.transformers.recompute`. The
            cache holds nothing at some of them.
        kl: what the predictions lose after that at most, nats a token; infinite if it is not known (see
            `Approximate.probe`).
        estimates: what `kl` was estimated with, for `integrations.transformers.recompute`.
        states: of layers that keep states, at the end of the tokens. The caller owns them.
        reason: why no more tokens came back; STORED if all did that were asked for. NO_STATE and NO_WINDOW: more are
            stored, but layers with states or windows cannot go on from there. NOT_WORTH: see `withheld`.
        withheld: tokens that are stored behind these, and are expected to be computed sooner than loaded.

    Example:
        >>> import torch
        >>> layers = ((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),)
        >>> hit = Hit(tokens=3, tiers={"disk": 3}, seconds=0.001, layers=layers)
        >>> hit.nbytes, hit.approximate
        (384, False)
        >>> hit
        Hit(tokens=3, tiers={disk 3}, seconds=0.0010, 0.0 MiB in 1 layers)
        >>> hit.cache().get_seq_length()
        3
    """

    tokens: int
    tiers: dict[str, int]
    seconds: float
    layers: KVLayers
    exact_tokens: int = -1
    spans: tuple[ReusedSpan, ...] = ()
    recompute: tuple[int, ...] = ()
    kl: float = 0.0
    estimates: Estimates | None = None
    states: tuple[State, ...] = ()
    reason: Reason = Reason.STORED
    withheld: int = 0
    _room: list[Callable[[], KVLayers]] = field(default_factory=list, repr=False, compare=False)
    _layout: KVLayout | None = field(default=None, repr=False, compare=False)
    _where: Where = field(default=NOWHERE, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.exact_tokens < 0:
            object.__setattr__(self, "exact_tokens", self.tokens)

    def __repr__(self) -> str:
        """Everything but the tensors: a hit may stand in a log."""
        tiers = ", ".join(f"{name} {count}" for name, count in self.tiers.items())
        more = f", exact_tokens={self.exact_tokens}, kl={self.kl:.2g}" if self.approximate else ""
        size = f"{self.nbytes / (1 << 20):.1f} MiB in {len(self.layers)} layers"
        return f"Hit(tokens={self.tokens}, tiers={{{tiers}}}, seconds={self.seconds:.4f}, {size}{more})"

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: no room behind its tensors."""
        return {**self.__dict__, "_room": []}

    @property
    def approximate(self) -> bool:
        """Whether some of the cache was computed behind other tokens."""
        return self.exact_tokens < self.tokens

    def cache(self) -> Any:
        """Make a transformers `DynamicCache` of these tensors, without copying them.

        The cache never writes into `layers`. The first cache made of a hit appends behind them while the reserved room
        lasts (see `KVStore.get`); any other cache copies them when it grows. Thread-safe: each room goes to one cache.

        Returns:
            A new cache, marked `is_approximate` if the hit is.
        """
        from kvstore.integrations.transformers.cache import cache_from_layers

        # pop and not a look: two threads must not both get it
        room = self._room.pop()() if self._room else None
        cache = cache_from_layers(self.layers, room, self._layout, self.tokens, self.states)
        cache.is_approximate = self.approximate
        return cache

    @property
    def nbytes(self) -> int:
        """Raw bytes of the tensors."""
        layers: object = self.layers
        if isinstance(layers, LazyLayers):
            return layers.nbytes
        states = [x for state in self.states for x in (state.conv, state.recurrent) if x is not None]
        return sum(t.numel() * t.element_size() for t in (*(t for pair in self.layers for t in pair), *states))
