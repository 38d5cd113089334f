"""The layers of a hit that are still being decoded: a sequence of (K, V) of which each item waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from kvstore.errors import LayerLost

if TYPE_CHECKING:
    import torch

    from kvstore.core.layout import KVLayers

    Pair = tuple[torch.Tensor, torch.Tensor]


class LazyLayers(Sequence[Any]):
    """Per layer (K, V). To take one waits for it and for those before it. Thread-safe.

    Attributes:
        tensors: the same tensors, filled or not.
        repair: is called if a layer is lost, with the number of the first one; it may fill the tensors from there on
            in another way and return True, and nothing was lost then. None: `LayerLost` is raised.

    Args:
        tensors: to be filled.
        ready: returns when the layer of this number is filled. Raises `LayerLost` if it cannot be.

    Example:
        >>> layers = LazyLayers((("k", "v"),), ready=lambda number: print("wait for", number))
        >>> layers[0]
        wait for 0
        ('k', 'v')
    """

    def __init__(self, tensors: KVLayers, ready: Callable[[int], None]) -> None:
        self.tensors = tensors
        self.repair: Callable[[int], bool] | None = None
        self._ready = ready
        self._filled = False  # in another way

    def wait(self, number: int) -> None:
        """Return when layer `number` is filled.

        Raises:
            LayerLost: it cannot be decoded, and there is no repair.
        """
        if self._filled:
            return
        try:
            self._ready(number)
        except LayerLost:
            repair, self.repair = self.repair, None
            if repair is None or not repair(number):
                raise
            self._filled = True

    @property
    def nbytes(self) -> int:
        """Raw bytes of the tensors; waits for nothing."""
        return sum(tensor.numel() * tensor.element_size() for pair in self.tensors for tensor in pair)

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled and copied: the layers, which it waits for."""
        return tuple, (list(self),)

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, number: int) -> Pair: ...

    @overload
    def __getitem__(self, number: slice) -> KVLayers: ...

    def __getitem__(self, number: int | slice) -> Pair | KVLayers:
        wanted = range(len(self.tensors))[number]
        if isinstance(wanted, int):
            self.wait(wanted)
        elif len(wanted):
            self.wait(max(wanted))
        return self.tensors[number]

    def __iter__(self) -> Iterator[Pair]:
        for number, pair in enumerate(self.tensors):
            self.wait(number)
            yield pair
