"""The layers of a cache on the CPU that are all alike, as nearly every cache is: where their rows are in memory.

A put looks at every tensor of a cache. To make views of them by torch takes longer than all else that it does with
them, and a copy needs none: it needs addresses. So the views are made for those who ask for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from kvstore.core.tensors import Alike

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Memory = tuple[list[torch.UntypedStorage], list[int]]
    Pair = tuple[torch.Tensor, torch.Tensor]


class AlikeLayers(Sequence["Pair"]):
    """(K, V) of each layer, `[heads, tokens, dim]` views without gradients, made when they are asked for.

    Immutable, and keeps the memory as it was given, whatever becomes of the tensors. Thread-safe.

    Attributes:
        tokens: of every layer.
        rows: of the tensors, in the order K of layer 0, V of layer 0, K of layer 1, ..., `[3, 2 * layers]` int64: the
            address of the first row, bytes from head to head, bytes from token to token. Not to be written to.
        memory: what keeps it alive, of all K and of all V.

    Example:
        >>> import torch
        >>> k = v = torch.ones(2, 8, 16)
        >>> layers = AlikeLayers.of([(k, v), (v, k)], Alike(k), Alike(v))
        >>> len(layers), layers.tokens, layers[1][0].shape
        (2, 8, torch.Size([2, 8, 16]))
    """

    __slots__ = ("_kinds", "memory", "rows", "tokens")

    def __init__(self, keys: Alike, values: Alike, of_keys: Memory, of_values: Memory) -> None:
        self._kinds = keys, values
        self.tokens = keys.shape[-2]
        self.memory = of_keys[0], of_values[0]
        self.rows: npt.NDArray[np.int64] = np.empty((3, 2 * len(of_keys[0])), np.int64)
        for half, kind, (_, addresses) in ((0, keys, of_keys), (1, values, of_values)):
            self.rows[0, half::2] = addresses
            self.rows[1, half::2] = kind.strides[-3] * kind.item_bytes
            self.rows[2, half::2] = kind.strides[-2] * kind.item_bytes

    @classmethod
    def of(cls, pairs: Iterable[Any], keys: Alike, values: Alike) -> AlikeLayers | None:
        """Return the layers; None unless all are pairs on the CPU that are like these, with rows that can be copied.

        Args:
            pairs: (K, V) of each layer, anything.
            keys, values: what all K, and all V, must be like.
        """
        if not (keys.strides[-1] == values.strides[-1] == 1 and keys.is_cpu and values.is_cpu):
            return None
        try:
            given_keys, given_values = zip(*((k, v) for k, v in pairs), strict=True)
        except (TypeError, ValueError):  # a layer that is no pair
            return None
        of_keys, of_values = keys.memory(given_keys), values.memory(given_values)
        return None if of_keys is None or of_values is None else cls(keys, values, of_keys, of_values)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self.memory[0][0].device

    def __len__(self) -> int:
        """How many layers there are."""
        return len(self.memory[0])

    @overload
    def __getitem__(self, number: int) -> Pair: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Pair]: ...
    def __getitem__(self, number: int | slice) -> Pair | Sequence[Pair]:
        """(K, V) of a layer, or of several."""
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        keys, values = (kind.of(memory[number]) for kind, memory in zip(self._kinds, self.memory, strict=True))
        return keys, values
