"""What a put still has to store of a sequence, as blocks. Changes nothing; copies tensors where it must."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codecs.device import publish
from kvstore.codecs.groups import GroupedView, Snapshot
from kvstore.codecs.view import KVView
from kvstore.core.arguments import as_numbers, check_integer, end_of_life
from kvstore.core.keys import chain_keys
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.media import check_text
from kvstore.core.rope import check_length
from kvstore.core.states import State, pack
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.core.windows import block_cut, cut_of
from kvstore.errors import UnsupportedCache
from kvstore.residency.block import Block
from kvstore.tiers.buffers import BufferPool
from kvstore.trie import UNIFORM_BITS_PER_TOKEN, Match, bits_from_logprobs


@dataclass(frozen=True)
class MissingBlocks:
    """The blocks of a sequence that are not stored.

    Attributes:
        blocks: their indexes, rising.
        first_token: position of the first token among them; the length of the sequence if there are none.

    Example:
        >>> MissingBlocks(blocks=[1, 2], first_token=64).blocks
        [1, 2]
    """

    blocks: list[int]
    first_token: int

    def first(self, count: int) -> tuple[MissingBlocks, int]:
        """Return the first `count` of them, and how many are left out."""
        left_out = max(0, len(self.blocks) - count)
        return (replace(self, blocks=self.blocks[:count]) if left_out else self), left_out


def missing_blocks(match: Match, tokens: int, block_tokens: int, again: Collection[int] = ()) -> MissingBlocks:
    """Return the blocks of a sequence that no record covers, or only one that is to be stored `again`.

    Args:
        match: what the index knows of the sequence.
        tokens: length of the sequence.
        block_tokens: tokens of a block.
        again: numbers of records that do not count as stored.
    """
    count = -(-tokens // block_tokens)
    want = np.minimum((np.arange(count) + 1) * block_tokens, tokens)
    known = len(match.records)
    have = np.zeros(count, dtype=bool)
    # A record deeper than the match belongs to tokens that differ, so the match itself must reach the end too.
    have[:known] = (match.records != 0) & (match.ends >= want[:known]) & (match.depth >= want[:known])
    if again:
        have[:known] &= np.array([record not in again for record in match.records.tolist()], dtype=bool)
    blocks = np.flatnonzero(~have).tolist()
    return MissingBlocks(blocks, blocks[0] * block_tokens if blocks else tokens)


def view_from(request: PutRequest, layers: KVLayers, first_token: int, pool: BufferPool | None) -> KVView:
    """Return the keys and values of a sequence from `first_token` on.

    Args:
        layers: `[heads, n, dim]` views of all tokens from `request.start` on; of layers with windows, of the last.
        pool: copy them into memory of this pool, because the caller may still write into them; None: reference them.
    """
    layout = request.layout
    if layout.is_grouped:
        return _windowed_view(request, layers, first_token, pool)
    view = KVView.of_layers(layout, layers, checked=True)
    if skip := first_token - request.start:
        view = view.narrow(skip, view.tokens - skip)
    if pool is None:
        return view
    if not view.on_cpu:
        clones = [tensor.clone() for tensor in view.tensors()]
        publish(tensor.device for tensor in clones)
        return KVView.of_layers(layout, list(zip(clones[::2], clones[1::2], strict=True)), checked=True)
    # Not torch's clone: its threads wait for each other at every tensor, which takes long on a busy machine.
    buffer = pool.take(view.nbytes)
    copy = KVView.packed(layout, view.tokens, buffer.address, buffer)
    view.copy_to(copy)
    return copy


def _windowed_view(request: PutRequest, layers: KVLayers, first_token: int, pool: BufferPool | None) -> KVView:
    """What `view_from` returns for a layout with windows: no more tokens than the request's cut says."""
    count = len(request.tokens)
    snapshot = Snapshot(request.states) if request.states else None
    view = GroupedView.of_cache(request.layout, layers, count, first_token, request.cut, snapshot)
    if pool is None:
        return view
    if not view.on_cpu:
        clones = tuple((k.clone(), v.clone()) for k, v in layers)
        publish(tensor.device for pair in clones for tensor in pair)
        return GroupedView.of_cache(request.layout, clones, count, first_token, request.cut, snapshot)
    buffer = pool.take(view.nbytes)
    return view.copied(buffer.address, buffer)


@dataclass(frozen=True)
class PutRequest:
    """What a caller of `KVStore.put` asked for; checked.

    Attributes:
        root: the key before the first block of the namespace.
        namespace: its digest.
        tokens: token ids of the whole sequence, `[n]`.
        bits: information of each token, `[n]`, or of every token.
        expiry: unix seconds; 0 for never.
        pin: never evict the sequence.
        cut: length of the cache whose windows were applied; 0 if every layer has all tokens.
        states: the states at the end (`core.states.pack`); b"" if the layout has none.
        start: the given keys and values are those of the tokens from here on.
    """

    layout: KVLayout
    root: bytes
    namespace: bytes
    tokens: Tokens
    bits: npt.NDArray[np.float32] | float
    expiry: float
    pin: bool
    cut: int = 0
    states: bytes = field(default=b"", repr=False)
    start: int = 0

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        root: bytes,
        namespace: bytes,
        tokens: Any,
        logprobs: Any,
        ttl: float | None,
        pin: bool,
        start: int = 0,
    ) -> PutRequest:
        """Check the arguments of `KVStore.put`.

        Raises:
            ValueError: an argument is malformed.
            UnsupportedLength: sequences of this length have other keys than those of the layout.
            UnsupportedTokens: some tokens stand for images or sound.
        """
        ids = as_tokens(tokens)
        check_length(layout, len(ids))
        check_text(layout, ids)
        bits: npt.NDArray[np.float32] | float = UNIFORM_BITS_PER_TOKEN
        if logprobs is not None:
            bits = bits_from_logprobs(as_numbers("logprobs", logprobs), len(ids))
        check_integer("start", start, 0, len(ids) - 1)
        if start and (pin or layout.is_grouped):
            why = "a pin" if pin else "a layout with windows or states"
            raise ValueError(f"start: {why} needs the cache of all tokens; leave out start and give all of it")
        return cls(layout, root, namespace, ids, bits, end_of_life(ttl), bool(pin), start=start)

    def of_cache(self, layers: KVLayers, states: tuple[State, ...]) -> PutRequest:
        """Return the same for the keys and values that were given, of which layers with windows may lack the first
        tokens, and for the states at their end, which are copied.

        Raises:
            UnsupportedCache: a state has a dtype that is not stored.
        """
        if not self.layout.is_grouped:
            return self
        try:
            packed = pack(states) if states else b""
        except ValueError as error:
            raise UnsupportedCache(f"kv: {error}") from error
        return replace(self, cut=cut_of(self.layout, layers, len(self.tokens)), states=packed)

    def bits_between(self, start: int, end: int) -> float:
        """Return the information in tokens [start, end)."""
        if isinstance(self.bits, float):
            return self.bits * (end - start)
        return float(self.bits[start:end].sum(dtype=np.float64))


def make_blocks(
    request: PutRequest,
    match: Match,
    missing: MissingBlocks,
    view: KVView,
    first_record: int,
    block_tokens: int,
    pinned: Collection[int] = (),
    lives: Mapping[int, float] | None = None,
) -> Iterator[Block]:
    """Make the missing blocks, numbered from `first_record`, the first of the sequence first.

    Args:
        view: keys and values from `missing.first_token` on.
        pinned: indexes of blocks that were pinned and are stored again.
        lives: when the lives of blocks end that are stored again, by index; 0 for never. What continues them may need
            them as long.
    """
    keys = [request.root, *chain_keys(request.root, request.tokens, block_tokens)]
    records = dict(enumerate(match.records.tolist()))
    last = len(keys) - 2
    for number, index in enumerate(missing.blocks, first_record):
        start = index * block_tokens
        tokens = request.tokens[start : start + block_tokens]
        yield Block(
            record=number,
            parent=records.get(index - 1, 0),
            key=keys[index + 1],
            parent_key=keys[index],
            namespace=request.namespace,
            start=start,
            tokens=tokens.copy(),  # the caller may reuse its array
            view=view.narrow(start - missing.first_token, len(tokens)),
            bits=request.bits_between(start, start + len(tokens)),
            expiry=_later(request.expiry, lives.get(index, request.expiry)) if lives else request.expiry,
            pinned=index in pinned or (request.pin and index == last),
            alone=request.pin or bool(pinned),
            cut=block_cut(request.layout, request.cut, start, len(tokens)),
        )
        records[index] = number


def _later(a: float, b: float) -> float:
    """The later of two ends of lives; 0 is never."""
    return max(a, b) if a and b else 0.0
