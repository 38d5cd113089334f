"""Blocks of layouts with windows or states: a view and a codec for each group of layers that keep the same tokens.

A layer with a window keeps the last tokens of a cache. So a block may hold all of its tokens in some layers, and the
last of them, or none, in others. Codecs know nothing of that: each group is coded as a block of its own, which begins
where its layers do (docs/layouts.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.state_chunk import coded, decoded
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.states import State, unpack
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

_MADE: dict[tuple[int, KVLayout], Codec] = {}  # by the number of the codec inside


class Snapshot:
    """The states at one position: of a block, or the place where decoding puts them.

    Attributes:
        data: their bytes (`core.states.pack`).
        states: the same as tensors, once they were decoded.

    Example:
        >>> Snapshot(b"").states
        ()
    """

    __slots__ = ("data", "states")

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.states: tuple[State, ...] = ()

    def fill(self, data: memoryview) -> None:
        """Take states that were stored.

        Raises:
            ValueError: the bytes are no states.
        """
        self.states = unpack(data)


class GroupedView(KVView):
    """Keys and values of `tokens` consecutive tokens, of which some layers hold only the last; and states at its end.

    What `KVView` says holds of each of its parts. Immutable; what it points to is not. Thread-safe.

    Attributes:
        parts: for each group of the layout, how many of the first tokens it lacks, and the view of the others; None
            where it lacks all.
        snapshot: the states at its end, or where they are wanted; None for none.

    Example:
        >>> import torch
        >>> from kvstore.core.layout import LayerLayout
        >>> layout = KVLayout((LayerLayout(1, 8, 8), LayerLayout(1, 8, 8, "sliding", 16)), "bfloat16")
        >>> full, last = torch.zeros(1, 40, 8).bfloat16(), torch.zeros(1, 15, 8).bfloat16()
        >>> view = GroupedView.of_cache(layout, [(full, full), (last, last)], length=40)
        >>> [part[0] for part in view.parts], [part[0] for part in view.narrow(16, 16).parts]
        ([0, 25], [0, 9])
    """

    __slots__ = ("parts", "snapshot")

    def __init__(
        self,
        layout: KVLayout,
        tokens: int,
        parts: Sequence[tuple[int, KVView | None]],
        snapshot: Snapshot | None = None,
    ) -> None:
        super().__init__(layout, tokens, None, None)
        self.parts = tuple(parts)
        self.snapshot = snapshot

    @classmethod
    def of_cache(
        cls,
        layout: KVLayout,
        layers: KVLayers,
        length: int,
        start: int = 0,
        cut: int = 0,
        snapshot: Snapshot | None = None,
    ) -> GroupedView:
        """Return the view of a cache from one position on.

        Args:
            layout: has windows or states.
            layers: K and V of each layer, `[heads, tokens, dim]`, the last tokens of `length`.
            start: position of the view's first token.
            cut: take no more tokens than such a cache has (`LayerGroup.missing`); 0: all that are there.
            snapshot: see `GroupedView`.
        """
        parts: list[tuple[int, KVView | None]] = []
        for group in layout.groups:
            pairs = [layers[number] for number in group.layers]
            begins = max(length - k.shape[1] for k, _ in pairs)
            begins = max(begins, start, group.missing(cut, 0, length))
            rows = [(k[:, begins - length :], v[:, begins - length :]) for k, v in pairs] if begins < length else None
            parts.append((begins - start, KVView.of_layers(group.layout, rows, checked=True) if rows else None))
        return cls(layout, length - start, parts, snapshot)

    @property
    def on_cpu(self) -> bool:
        return all(view.on_cpu for _, view in self.parts if view is not None)

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    @property
    def devices(self) -> frozenset[torch.device]:
        return frozenset(device for _, view in self.parts if view is not None for device in view.devices)

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for _, view in self.parts if view is not None) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return 0 if self.snapshot is None else len(self.snapshot.data)

    @property
    def writable(self) -> bool:
        return all(view.writable for _, view in self.parts if view is not None)

    @property
    def states(self) -> tuple[State, ...]:
        return () if self.snapshot is None else self.snapshot.states

    def narrow(self, start: int, tokens: int) -> GroupedView:
        if start < 0 or tokens < 0 or start + tokens > self.tokens:
            raise ValueError(
                f"narrow: tokens {start} to {start + tokens} lie outside of a view of {self.tokens} tokens"
            )
        parts: list[tuple[int, KVView | None]] = []
        for lacks, view in self.parts:
            begins = min(max(lacks, start), start + tokens)
            inner = None
            if view is not None and begins < start + tokens:
                inner = view.narrow(begins - lacks, start + tokens - begins)
            parts.append((begins - start, inner))
        return GroupedView(self.layout, tokens, parts, self.snapshot if start + tokens == self.tokens else None)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, view in self.parts if view is not None for tensor in view.tensors()]

    def host_buffer(self) -> GroupedView:
        buffers = [(lacks, None if view is None else view.host_buffer()) for lacks, view in self.parts]
        return GroupedView(self.layout, self.tokens, buffers, self.snapshot)

    def copied(self, address: int, owner: object) -> GroupedView:
        """Return a copy in packed memory of `nbytes` bytes on the CPU, part after part.

        Args:
            address: where it begins.
            owner: what keeps the memory alive.
        """
        parts: list[tuple[int, KVView | None]] = []
        for lacks, view in self.parts:
            copy = None
            if view is not None:
                copy = KVView.packed(view.layout, view.tokens, address, owner)
                view.copy_to(copy)
                address += view.nbytes
            parts.append((lacks, copy))
        return GroupedView(self.layout, self.tokens, parts, self.snapshot)

    def copy_to(self, target: KVView, unlock: bool = False) -> None:
        """Copy the tokens that `target` has, layer by layer, into it.

        unlock: see `KVView.copy_to`.

        Raises:
            ValueError: `target` has another layout or number of tokens, or cannot be written to.
            CodecError: this view lacks tokens that the target has.
        """
        if target.layout != self.layout or target.tokens != self.tokens or not isinstance(target, GroupedView):
            raise ValueError("copy_to: expected a target of the same layout and number of tokens")
        for (lacks, view), (begins, wanted) in zip(self.parts, target.parts, strict=True):
            if wanted is None:
                continue
            if view is None or lacks > begins:
                raise CodecError("the block lacks tokens of a window that it should have")
            view.narrow(begins - lacks, wanted.tokens).copy_to(wanted, unlock)
        if target.snapshot is not None:
            if self.snapshot is None:
                raise CodecError("the block lacks states that it should have")
            target.snapshot.fill(memoryview(self.snapshot.data))


class GroupedCodec(Codec):
    """Codes the groups of a block one after the other, each as a block of its own.

    The sizes of the layers stand in the order of the groups; a layer that has none of the tokens takes no bytes. Behind
    them stand the states, as they are or as a chunk (state_chunk.py). It has the number of the codecs inside, for
    records say by themselves what they hold. Stateless and thread-safe.

    Args:
        layout: has windows or states.
        inner: the codec of each of its groups, all of one number and profile; one where there is no group.

    Example:
        >>> from kvstore.codecs import codec_by_name
        >>> from kvstore.core.layout import LayerLayout
        >>> layout = KVLayout((LayerLayout(2, 8, 8), LayerLayout(2, 8, 8, "sliding", 16)), "bfloat16")
        >>> GroupedCodec(layout, [codec_by_name("splitzip")] * 2).name
        'splitzip'
    """

    def __init__(self, layout: KVLayout, inner: Sequence[Codec]) -> None:
        self._inner = tuple(inner)
        self._layers = [len(group.layers) for group in layout.groups]
        first = self._inner[0]
        self.id, self.name, self.exact, self.profile = first.id, first.name, first.exact, first.profile
        self._codes_states = first.codes_states

    def bound(self, info: BlockInfo) -> int:
        return sum(codec.bound(part) for codec, part in self._parts(info) if part is not None) + info.state_bytes

    def usual(self, info: BlockInfo) -> int:
        return sum(codec.usual(part) for codec, part in self._parts(info) if part is not None) + info.state_bytes

    def _parts(self, info: BlockInfo) -> Iterator[tuple[Codec, BlockInfo | None]]:
        return zip(self._inner, _infos(info), strict=False)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        assert isinstance(block, GroupedView)
        written, sizes = 0, list[int]()
        for layers, (codec, part), (_, view) in zip(self._layers, self._parts(info), block.parts, strict=True):
            if part is None:
                sizes += [0] * layers
                continue
            assert view is not None
            assert view.tokens == part.count
            of_part = codec.encode(part, view, out[written:])
            if of_part is None:
                return None
            sizes += of_part
            written += sum(of_part)
        if info.layout.states:
            states = b"" if block.snapshot is None else block.snapshot.data
            if states and self._codes_states:
                states = coded(states)
            sizes.append(len(states))
            if len(out) < written + len(states):
                return None
            out[written : written + len(states)] = states
        return tuple(sizes)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        found = begin = first = 0
        for codec, layers in zip(self._inner, self._layers, strict=False):
            sizes = layer_sizes[first : first + layers]
            first, end = first + layers, begin + sum(sizes)
            if end > begin:
                found += codec.fallbacks(payload[begin:end], sizes)
            begin = end
        return found

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(self.name, info, payload, layer_sizes, out)
        assert isinstance(out, GroupedView)
        begin = first = 0
        for layers, (codec, part), (lacks, view) in zip(self._layers, self._parts(info), out.parts, strict=True):
            sizes = layer_sizes[first : first + layers]
            data = payload[begin : begin + sum(sizes)]
            first, begin = first + layers, begin + sum(sizes)
            if part is None and data:
                raise CodecError(f"{self.name}: layers that have no tokens take {len(data)} bytes, expected 0")
            if view is not None:
                missing = info.count - (part.count if part is not None else 0)
                self._decode(codec, part, missing, data, sizes, lacks, view)

        if out.snapshot is not None:
            try:
                out.snapshot.fill(decoded(payload[begin:]))
            except ValueError as error:
                raise CodecError(f"{self.name}: {error}") from error

    def _decode(
        self,
        codec: Codec,
        part: BlockInfo | None,
        missing: int,
        payload: memoryview,
        sizes: Sequence[int],
        lacks: int,
        out: KVView,
    ) -> None:
        """Decodes a group, of which the block lacks the first `missing` tokens and the target the first `lacks`."""
        if part is None or missing > lacks:
            raise CodecError(
                f"{self.name}: the block lacks {missing} tokens of a window, at most {lacks} were expected"
            )
        if missing == lacks:
            codec.decode(part, payload, sizes, out)
            return
        import torch

        dtype: torch.dtype = getattr(torch, part.layout.dtype)
        count = lacks - missing + out.tokens
        shapes = [(layer.heads, count, dim) for layer in part.layout.layers for dim in (layer.key_dim, layer.value_dim)]
        memory = [torch.empty(shape, dtype=dtype) for shape in shapes]
        whole = KVView.of_layers(part.layout, list(zip(memory[::2], memory[1::2], strict=True)), checked=True)
        codec.decode(part, payload, sizes, whole)
        whole.narrow(lacks - missing, out.tokens).copy_to(out)


def by_groups(codec: Codec, layout: KVLayout) -> Codec:
    """Return the codec that codes blocks of a layout with windows or states by `codec`, which needs no profile. The
    same codec and layout give the same object."""
    key = codec.id, layout
    return _MADE.setdefault(key, GroupedCodec(layout, [codec] * max(1, len(layout.groups))))


def _infos(info: BlockInfo) -> Iterator[BlockInfo | None]:
    """What is known of each group of a block; None of one that has no tokens."""
    for group in info.layout.groups:
        missing = group.missing(info.cut, info.start, info.count)
        left = info.tokens[missing:]
        yield BlockInfo(group.layout, left, info.start + missing) if len(left) else None
