"""A view of the keys and values of consecutive tokens, all layers: what caches, codecs and tiers hand each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvstore.codecs._native as _native
from kvstore.codecs.tensor_copies import copy_tensors
from kvstore.codecs.tensor_memory import PackedMemory, RowTable, TensorMemory, packing, row_shapes
from kvstore.core.alike_layers import AlikeLayers
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.states import State
from kvstore.core.tensors import resolved, why_unreadable
from kvstore.errors import LayoutMismatch

if TYPE_CHECKING:
    import torch

# Views of this size and more are written past the caches: what was written first has left these when it is read.
_LARGE_BYTES = 16 << 20


class Packed(NamedTuple):
    """A piece of packed memory, see `KVView.packed`, and where it goes in a view.

    Attributes:
        memory: the tensors, one after the other.
        tokens: how many it holds.
        at: the token of the view where its first goes.
        wanted: how many of its tokens go there.

    Example:
        >>> Packed(memoryview(bytes(64)), tokens=4, at=8, wanted=3).wanted
        3
    """

    memory: memoryview
    tokens: int
    at: int
    wanted: int


class KVView:
    """Keys and values of `tokens` consecutive tokens, in the order K of layer 0, V of layer 0, K of layer 1, ...

    A table of rows describes memory on the CPU, so that one call copies a block of all layers without the GIL; the same
    table of memory on a GPU is a kernel's (`places`). Views are immutable; what they point to is not. Thread-safe.

    Attributes:
        layout: shapes and dtype of the layers.
        tokens: how many tokens the view has.
        owner: what keeps the memory alive as long as the view.

    Example:
        >>> import torch
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=16)
        >>> k = v = torch.zeros(2, 8, 16).bfloat16()
        >>> view = KVView.of_layers(layout, [(k, v)])
        >>> view.tokens, view.nbytes, view.on_cpu
        (8, 1024, True)
        >>> view.narrow(2, 3).tokens
        3
    """

    __slots__ = ("_detached", "_large", "_memory", "_rows", "_start", "layout", "owner", "tokens")

    def __init__(
        self,
        layout: KVLayout,
        tokens: int,
        rows: RowTable | None,
        tensors: Sequence[torch.Tensor] | TensorMemory | None,
        owner: Any = None,
        start: int = 0,
        detached: bool = False,
        large: bool | None = None,
    ) -> None:
        self.layout = layout
        self.tokens = tokens
        self.owner = owner
        self._rows = rows
        self._memory = TensorMemory(tensors) if isinstance(tensors, Sequence) else tensors
        self._start = start
        self._detached = detached  # a copy, not the tensors it was made of: to be read only
        self._large = tokens * layout.bytes_per_token >= _LARGE_BYTES if large is None else large

    @classmethod
    def of_layers(cls, layout: KVLayout, layers: KVLayers, *, checked: bool = False) -> KVView:
        """Return a view of tensors.

        Args:
            layout: of the tensors; they must have its shapes and dtype, which is not checked.
            layers: K and V of each layer, `[heads, tokens, dim]`, any strides. Tensors on the CPU whose last dimension
                is not contiguous are copied, as those are on which torch has only marked a negation; the view can then
                only be read (`writable`).
            checked: `KVLayout.layers_of` returned them, or they were made for this: their memory is not looked at. Nor
                is it that of `AlikeLayers`.

        Raises:
            LayoutMismatch: a tensor has no memory of its own: it is on the meta device, say, or its storage was
                resized.
        """
        if isinstance(layers, AlikeLayers):
            return cls(layout, layers.tokens, layers.rows, None, layers.memory)
        given = [tensor for pair in layers for tensor in pair]
        tensors, rows = given if checked else _readable(given), None
        if all(t.is_cpu for t in given):
            # A last dimension that is not contiguous has no rows to copy.
            tensors = [t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in tensors]
            heads, places, _ = zip(*(t.stride() for t in tensors), strict=True)
            rows = np.array([[t.data_ptr() for t in tensors], heads, places], dtype=np.int64)
            rows[1:] *= layout.item_bytes
        detached = any(t is not g for t, g in zip(tensors, given, strict=True))
        return cls(layout, tensors[0].shape[1], rows, tensors, tensors, detached=detached)

    @classmethod
    def packed(cls, layout: KVLayout, tokens: int, address: int, owner: Any) -> KVView:
        """Return a view of packed memory, which holds the tensors one after the other, each `[heads, tokens, dim]`.

        Args:
            layout: of the tensors.
            tokens: how many tokens the memory holds.
            address: where it begins, in bytes.
            owner: what keeps the memory alive.
        """
        return cls.of_places(layout, tokens, address + packing(layout)[0] * tokens, owner)

    @classmethod
    def of_places(
        cls, layout: KVLayout, tokens: int, addresses: Sequence[int] | npt.NDArray[np.int64], owner: Any
    ) -> KVView:
        """Return a view of contiguous tensors, each `[heads, tokens, dim]` somewhere in memory.

        Args:
            layout: of the tensors.
            tokens: how many tokens they hold.
            addresses: where each begins, in bytes.
            owner: what keeps the memory alive.
        """
        widths = packing(layout)[1]
        rows = np.empty((3, len(widths)), dtype=np.int64)
        rows[0] = addresses
        rows[1] = widths * tokens
        rows[2] = widths
        return cls(layout, tokens, rows, None, owner)

    @classmethod
    def of_bytes(cls, layout: KVLayout, tokens: int, memory: torch.Tensor, on_cpu: bool | None = None) -> KVView:
        """Return a view of packed memory that is a tensor; see `packed`.

        Args:
            layout: of the tensors.
            tokens: how many tokens the memory holds.
            memory: uint8, on any device, of as many bytes as they take.
            on_cpu: whether the view is on the CPU; None: as the memory is. Kernels that are interpreted take memory of
                the CPU for a device's.
        """
        tensors = PackedMemory(layout, tokens, memory)
        rows = tensors.places if (memory.is_cpu if on_cpu is None else on_cpu) else None
        return cls(layout, tokens, rows, tensors, memory)

    @staticmethod
    def of_nothing(layout: KVLayout, tokens: int) -> KVView:
        """Return a view that has no memory behind it, only sizes: what reads it or writes to it raises ValueError."""
        return _SizesOnly(layout, tokens, None, None)

    @property
    def has_memory(self) -> bool:
        """Whether there is anything behind the view; see `of_nothing`."""
        return True

    @property
    def on_cpu(self) -> bool:
        """Whether the memory is on the CPU, so that the view has `rows`."""
        return self._rows is not None

    @property
    def nbytes(self) -> int:
        """Raw bytes of the keys and values."""
        return self.tokens * self.layout.bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of the states at the end of its last token; 0 if there are none."""
        return 0

    @property
    def states(self) -> tuple[State, ...]:
        """The states that were decoded with it; () if there are none."""
        return ()

    @property
    def devices(self) -> frozenset[torch.device]:
        """What holds the tensors of a view that is not on the CPU; nothing for one that is."""
        return frozenset() if self._rows is not None or self._memory is None else self._memory.devices

    @property
    def device(self) -> torch.device:
        """What holds the tensors of a view that is not on the CPU; the first, if a model is spread over several."""
        return self._at_hand().device

    @property
    def places(self) -> RowTable | None:
        """Where the rows are on the device, as `rows` says it of memory on the CPU: for kernels. None for a view on the
        CPU or on several devices, and if the last dimension of a tensor is not contiguous."""
        return None if self._rows is not None or self._memory is None else self._memory.places_from(self._start)

    @property
    def rows(self) -> RowTable:
        """Where the rows are in memory. Not to be written to.

        Raises:
            ValueError: the tensors are on a device.
        """
        if self._rows is None:
            raise ValueError("rows: only a view on the CPU has rows; copy the tensors to the CPU first")
        return self._rows

    @property
    def writable(self) -> bool:
        """Whether what is written to the rows arrives in the tensors that the view was made of."""
        return not self._detached

    @property
    def large(self) -> bool:
        """Whether this is a part of a view of more than the caches hold: it is then written past them."""
        return self._large

    def narrow(self, start: int, tokens: int) -> KVView:
        """Return the view of `tokens` tokens from `start` on.

        Raises:
            ValueError: this view has no such tokens.
        """
        if start < 0 or tokens < 0 or start + tokens > self.tokens:
            raise ValueError(
                f"narrow: tokens {start} to {start + tokens} lie outside of a view of {self.tokens} tokens"
            )
        rows = None
        if self._rows is not None:
            rows = self._rows.copy()
            rows[0] += rows[2] * start
        return KVView(
            self.layout, tokens, rows, self._memory, self.owner, self._start + start, self._detached, self._large
        )

    def layer(self, number: int) -> KVView:
        """Return the view of layer `number`; its layout has that layer alone."""
        return self.layers(range(number, number + 1))

    def layers(self, layers: range) -> KVView:
        """Return the view of consecutive layers; its layout has those alone."""
        part, halves = _part(self.layout, layers.start, layers.stop), slice(2 * layers.start, 2 * layers.stop)
        rows = None if self._rows is None else np.ascontiguousarray(self._rows[:, halves])
        memory = None if self._memory is None else self._memory.part(halves)
        return KVView(part, self.tokens, rows, memory, self.owner, self._start, self._detached, self._large)

    def tensors(self) -> list[torch.Tensor]:
        """Return the `[heads, tokens, dim]` tensors behind the view, K and V of each layer in turn.

        Raises:
            ValueError: the view was made of packed memory, of `AlikeLayers` or of nothing.
        """
        return self._at_hand().cut(self._start, self.tokens)

    def host_buffer(self) -> KVView:
        """Return new packed memory on the CPU for what the view holds. Its contents are undefined."""
        import torch

        return self.of_bytes(self.layout, self.tokens, torch.empty(self.nbytes, dtype=torch.uint8))

    def copy_to(self, target: KVView, unlock: bool = False) -> None:
        """Copy all rows into `target`, and mutate what it points to.

        Between two views on the CPU a copy of more than 1 MiB releases the GIL. A copy to a device may still be under
        way on return; see `device.move`.

        Args:
            target: of the same layout and number of tokens.
            unlock: release the GIL for smaller copies too: a program does not wait then for one in the background.

        Raises:
            ValueError: `target` has another layout or number of tokens, or cannot be written to.
        """
        if target.layout != self.layout or target.tokens != self.tokens:
            raise ValueError("copy_to: expected a target of the same layout and number of tokens")
        target._check_writable("copy_to")
        if self._rows is not None and target._rows is not None:
            heads, row_bytes = row_shapes(self.layout)
            _native.copy_rows(target._rows, self._rows, heads, row_bytes, self.tokens, target._large, unlock)
            return
        if self._rows is not None:
            self._packed_on(target.devices).copy_to(target)
        elif target._rows is not None:
            self.of_bytes(self.layout, self.tokens, self._gathered().cpu()).copy_to(target)
        else:
            source, to = self._at_hand(), target._at_hand()
            copy_tensors(self.layout, self.tokens, source, self._start, to, target._start)

    def _packed_on(self, devices: frozenset[torch.device]) -> KVView:
        """A packed copy of rows on the CPU, sent to the device if it is one: all at once, from memory that a GPU reads
        by itself."""
        import torch

        memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=any(d.type == "cuda" for d in devices))
        self.copy_to(self.of_bytes(self.layout, self.tokens, memory))
        if len(devices) == 1:
            memory = memory.to(next(iter(devices)), non_blocking=True)
        return self.of_bytes(self.layout, self.tokens, memory, on_cpu=False)

    def _gathered(self) -> torch.Tensor:
        """A packed copy, on the device that holds the tensors (or the first, if a model is spread over several)."""
        import torch

        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        packed = PackedMemory(self.layout, self.tokens, memory)
        copy_tensors(self.layout, self.tokens, self._at_hand(), self._start, packed, 0)
        return memory

    def _at_hand(self) -> TensorMemory:
        if self._memory is None:
            what = (
                "a view of memory has no tensors; use its rows" if self._rows is not None else "the view has no memory"
            )
            raise ValueError(f"tensors: {what}")
        return self._memory

    def pack(self, memory: memoryview, unlock: bool = False) -> None:
        """Copy all rows into packed memory, which is mutated; see `packed`, and `copy_to` for `unlock`.

        Raises:
            ValueError: the memory is too small or read-only.
        """
        if self._rows is not None:
            _native.pack(memory, self._rows, *row_shapes(self.layout), self.tokens, unlock)
        else:
            import torch

            if memory.readonly:
                raise ValueError("pack: the memory is read-only")
            torch.from_numpy(np.frombuffer(memory, np.uint8, self.nbytes)).copy_(self._gathered())

    @staticmethod
    def pack_all(views: Sequence[KVView], memories: Sequence[memoryview]) -> list[bytes | None]:
        """Copy the rows of each view into packed memory, which is mutated, all in one call without the GIL.

        Args:
            views: on the CPU, of the same layout; at least one.
            memories: for each; see `packed`.

        Returns:
            The checksum of what each memory holds then, xxh3-128; None where that is 240 bytes or less.

        Raises:
            ValueError: a memory is too small or read-only; nothing was copied.
        """
        rows, tokens = [view.rows for view in views], [view.tokens for view in views]
        return _native.pack_all(memories, rows, *row_shapes(views[0].layout), tokens)

    def unpack(self, memory: memoryview, tokens: int) -> None:
        """Copy into the rows what packed memory with `tokens` tokens holds of the first of them; see `packed`.

        Mutates what the view points to. More than 1 MiB is copied without the GIL.

        Raises:
            ValueError: the memory is too small or has fewer tokens than the view, or the view cannot be written to.
        """
        self._check_writable("unpack")
        if self._rows is not None:
            _native.unpack(self._rows, memory, *row_shapes(self.layout), tokens, self.tokens, self._large)
        else:
            _packed(self.layout, tokens, memory).narrow(0, self.tokens).copy_to(self)

    def unpack_all(self, pieces: Sequence[Packed]) -> None:
        """Copy several pieces of packed memory into the rows, all in one call: without the GIL if they are more than
        1 MiB together. Mutates what the view points to, which must be on the CPU.

        Raises:
            ValueError: a piece is too small, has fewer tokens than are wanted of it, or lies outside of the view; or
                the view cannot be written to. Nothing was copied.
        """
        self._check_writable("unpack_all")
        memories, tokens, places, wanted = zip(*pieces, strict=True) if pieces else ((), (), (), ())
        shapes = row_shapes(self.layout)
        _native.unpack_all(self.rows, self.tokens, memories, *shapes, tokens, places, wanted, self._large)

    def _check_writable(self, call: str) -> None:
        if self._detached:
            raise ValueError(
                f"{call}: the last dimension of every tensor of the target must be contiguous; copy into contiguous "
                "tensors"
            )


class _SizesOnly(KVView):
    """A view of nothing."""

    __slots__ = ()

    @property
    def has_memory(self) -> bool:
        return False

    @property
    def on_cpu(self) -> bool:
        return True  # it is on no device

    @property
    def rows(self) -> RowTable:
        raise ValueError("rows: the view has no memory")

    def tensors(self) -> list[torch.Tensor]:
        raise ValueError("tensors: the view has no memory")


def _packed(layout: KVLayout, tokens: int, memory: memoryview) -> KVView:
    array = np.frombuffer(memory, dtype=np.uint8)
    return KVView.packed(layout, tokens, array.ctypes.data, array)


def _readable(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for number, tensor in enumerate(given):
        if problem := why_unreadable(tensor):
            raise LayoutMismatch(f"{'KV'[number % 2]} of layer {number // 2}: {problem}")
    return [resolved(tensor) for tensor in given]


@lru_cache(maxsize=4096)
def _part(layout: KVLayout, start: int, stop: int) -> KVLayout:
    return KVLayout(layout.layers[start:stop], layout.dtype, layout.rope)
