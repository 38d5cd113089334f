"""A layer of a transformers cache whose keys and values are still being decoded: whoever looks at them waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from kvstore.integrations.transformers.growing_layer import GrowingLayer, Reserve


class LazyLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """A `GrowingLayer` to be. The first look at `keys` or `values` waits for them, and makes it one.

    Its length is known before. Not thread-safe, like every cache.

    Example:
        >>> keys, values = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
        >>> layer = LazyLayer.of_pending(keys, values, None, lambda: print("wait"))
        >>> layer.get_seq_length(), type(layer).__name__
        (3, 'LazyLayer')
        >>> list(layer.keys.shape), type(layer).__name__
        wait
        ([1, 2, 3, 8], 'GrowingLayer')
    """

    _pending: tuple[torch.Tensor, torch.Tensor, Callable[[], None]] | None = None

    @classmethod
    def of_pending(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor,
        reserve: tuple[torch.Tensor, torch.Tensor] | None,
        wait: Callable[[], None],
    ) -> LazyLayer:
        """Make a layer of tensors that hold nothing yet.

        Args:
            keys, values, reserve: as for `GrowingLayer.of`.
            wait: returns when they are filled; what it raises, whoever looked at them gets.
        """
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer._reserve = None if reserve is None else Reserve(*reserve, used=keys.shape[-2])
        layer._pending = keys, values, wait
        return layer

    def settle(self) -> None:
        """Wait for the tensors; from then on this is a `GrowingLayer`."""
        if self._pending is not None:
            keys, values, wait = self._pending
            wait()
            self.keys, self.values = keys, values
        self.__class__ = GrowingLayer  # type: ignore[assignment]
        self._pending = None

    @property
    def keys(self) -> Any:
        """`[batch, heads, tokens, dim]`; waits."""
        return self._settled("keys")

    @keys.setter
    def keys(self, value: Any) -> None:
        self.__dict__["keys"] = value

    @property
    def values(self) -> Any:
        """As `keys`."""
        return self._settled("values")

    @values.setter
    def values(self, value: Any) -> None:
        self.__dict__["values"] = value

    def _settled(self, name: str) -> Any:
        self.settle()
        return self.__dict__[name]

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._pending is None else int(self._pending[0].shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.settle()
        return self.update(key_states, value_states, *args, **kwargs)  # that of the class it is now

    def reset(self) -> None:
        self._pending = None
        self.settle()
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.settle()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return self.__reduce_ex__(protocol)
