"""A layer of a transformers cache that appends to the tensors it was restored into, instead of copying them every step.

A `DynamicLayer` concatenates: its first step after a restore copies the whole cache into fresh memory, and so does
every later one. A `GrowingLayer` has a reserve behind its tensors. What was written once is never overwritten, so its
tensors may be referred to like a DynamicLayer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicLayer

_GROWTH = 8  # a layer that is full is copied once, with space for an eighth more...
_LEAST_RESERVE = 64  # ...or for so many tokens


@dataclass
class Reserve:
    """Keys and values with free space behind them.

    Attributes:
        keys, values: `[batch, heads, capacity, dim]`.
        used: tokens that were ever written. Of the layers that share a reserve, the first one to append takes the
            space; the others copy.
    """

    keys: torch.Tensor
    values: torch.Tensor
    used: int


class GrowingLayer(DynamicLayer):
    """One layer of a cache, `[batch, heads, tokens, dim]`; `keys` and `values` are views of the tokens so far.

    After a crop, a beam reorder or anything else that replaces the tensors, the next update copies once. While
    gradients are recorded every update copies, as a DynamicLayer's does. Not thread-safe, like every cache.

    Example:
        >>> layer = GrowingLayer.of(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
        >>> with torch.no_grad():
        ...     keys, values = layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        >>> list(keys.shape)
        [1, 2, 4, 8]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._reserve: Reserve | None = None

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, reserve: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> GrowingLayer:
        """Make a layer that starts as `keys` and `values`, without copying them.

        Args:
            keys, values: `[batch, heads, tokens, dim]`.
            reserve: the larger tensors that begin with `keys` and `values`. This layer alone may write into the rest.
        """
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if reserve is not None:
            layer._reserve = Reserve(*reserve, used=keys.shape[-2])
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.get_seq_length()
        # What attention saved for a backward pass must not change, and slices of a reserve change with it.
        # torch.compile cannot trace where tensors lie.
        if begin == 0 or torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._reserve = None
            return super().update(key_states, value_states, *args, **kwargs)
        end = begin + key_states.shape[-2]
        if not self._has_space(begin, end, key_states, value_states):
            self._reserve = self._larger(begin, end, key_states, value_states)
        reserve = cast(Reserve, self._reserve)
        reserve.keys[..., begin:end, :] = key_states
        reserve.values[..., begin:end, :] = value_states
        reserve.used = end
        self.keys, self.values = reserve.keys[..., :end, :], reserve.values[..., :end, :]
        return self.keys, self.values

    def reset(self) -> None:
        # Dropped, never zeroed: others may refer to them.
        self._reserve = self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def _has_space(self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        reserve = self._reserve
        return (
            reserve is not None
            and reserve.used == begin
            and reserve.keys.shape[-2] >= end
            and _begins(cast(torch.Tensor, self.keys), reserve.keys, key_states)
            and _begins(cast(torch.Tensor, self.values), reserve.values, value_states)
        )

    def _larger(self, begin: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor) -> Reserve:
        capacity = end + max(_LEAST_RESERVE, end // _GROWTH)
        keys = _copied(cast(torch.Tensor, self.keys), key_states, capacity)
        return Reserve(keys, _copied(cast(torch.Tensor, self.values), value_states, capacity), begin)


def _begins(part: torch.Tensor, reserve: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `part` is the first tokens of `reserve`, into which `states` may be written as they are. Outside of
    inference mode nothing may be written into an inference tensor."""
    return (
        part.data_ptr() == reserve.data_ptr()
        and part.shape[:-2] == reserve.shape[:-2]
        and part.stride() == reserve.stride()
        and states.dtype == reserve.dtype
        and states.device == reserve.device
        and (torch.is_inference_mode_enabled() or not reserve.is_inference())
    )


def _copied(part: torch.Tensor, states: torch.Tensor, capacity: int) -> torch.Tensor:
    """`part` with space for `capacity` tokens, in the dtype that concatenating both would have."""
    if part.device != states.device:
        raise RuntimeError(f"the cache is on {part.device}, but the new keys and values are on {states.device}")
    dtype = part.dtype if part.dtype == states.dtype else torch.promote_types(part.dtype, states.dtype)
    larger = torch.empty((*part.shape[:-2], capacity, part.shape[-1]), dtype=dtype, device=part.device)
    larger[..., : part.shape[-2], :] = part
    return larger
