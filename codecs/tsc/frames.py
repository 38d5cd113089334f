"""A layer as frames, one a token: every kappa-th is a keyframe, whole; the others are differences from the one before.

Differences are from the keyframe, not from the frame before, so that no frame inherits the error of another: an error
does not depend on how many tokens there are. A frame does not depend on later ones either: more tokens are more bytes
behind the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.tsc.pages import Bytes, Floats, Pages
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Frames:
    """How the frames of a layer lie in bytes: K of a token, then V. Immutable.

    count: tokens. kappa: tokens from keyframe to keyframe. widths: values of a token in K and in V. item: bytes of a
    value. top: as in `Pages`.
    """

    count: int
    kappa: int
    widths: tuple[int, int]
    item: int
    top: int

    @property
    def keyframes(self) -> int:
        return -(-self.count // self.kappa)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self.keyframes * self._whole + (self.count - self.keyframes) * self._coded

    @property
    def pages(self) -> tuple[Pages, Pages]:
        """Of K and of V."""
        key, value = (Pages(width, self.item, self.top) for width in self.widths)
        return key, value

    def encode(self, parts: tuple[torch.Tensor, torch.Tensor]) -> Bytes | None:
        """Code K and V, `[tokens, width]` each, all of whose values are finite; None if a difference is not."""
        keys, others = [], []
        for pages, part in zip(self.pages, parts, strict=True):
            values, raw = floats_of(part), bytes_of(part)
            with np.errstate(over="ignore", invalid="ignore"):
                differences = values[self._others] - values[self._before]
            if not np.isfinite(differences).all():
                return None
            coded = pages.encode(differences, raw[self._others])
            if coded is None:
                return None
            keys.append(raw[:: self.kappa].reshape(self.keyframes, -1))
            others.append(coded)
        return self._joined(np.concatenate(keys, axis=1), np.concatenate(others, axis=1))

    def decode(self, data: Bytes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse: K and V of `dtype`. Raises `CodecError` for bytes that no encoder writes."""
        keys, others = self._split(data)
        found, key_at, other_at = [], 0, 0
        for pages in self.pages:
            key_bytes, other_bytes = pages.width * self.item, pages.row_bytes
            whole = keys[:, key_at : key_at + key_bytes].reshape(self.keyframes, pages.width, self.item)
            found.append(self._decode_part(pages, whole, others[:, other_at : other_at + other_bytes], dtype))
            key_at, other_at = key_at + key_bytes, other_at + other_bytes
        return found[0], found[1]

    def _decode_part(self, pages: Pages, whole: Bytes, others: Bytes, dtype: torch.dtype) -> torch.Tensor:
        import torch

        base = floats_of(torch.from_numpy(whole.copy()).view(dtype).view(self.keyframes, pages.width))
        if not np.isfinite(base).all():
            raise CodecError("tsc: a keyframe has a value that is not finite")
        largest = float(torch.finfo(dtype).max)
        # Bytes that no encoder wrote may add up to more than the type holds.
        with np.errstate(over="ignore"):
            near = (base[self._before // self.kappa] + pages.decode(others)).clip(-largest, largest)
        raw = np.empty((self.count, pages.width, self.item), np.uint8)
        raw[:: self.kappa] = whole
        decoded = bytes_of(torch.from_numpy(near).to(dtype))
        pages.correct(others, decoded)
        raw[self._others] = decoded
        return torch.from_numpy(raw).view(dtype).view(self.count, pages.width)

    # -- where frames lie ----------------------------------------------------------------------------------------------

    @property
    def _whole(self) -> int:
        return sum(self.widths) * self.item

    @property
    def _coded(self) -> int:
        return sum(pages.row_bytes for pages in self.pages)

    @property
    def _others(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens that are no keyframes."""
        return np.flatnonzero(np.arange(self.count) % self.kappa)

    @property
    def _before(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The keyframe before each of them."""
        found = self._others
        return found - found % self.kappa

    def _joined(self, keys: Bytes, others: Bytes) -> Bytes:
        """In the order of tokens: keyframes with the frames that follow them are rows of equal length, the last cut."""
        table = np.zeros((self.keyframes, self._whole + (self.kappa - 1) * self._coded), np.uint8)
        rest = np.zeros((self.keyframes * (self.kappa - 1), self._coded), np.uint8)
        rest[: len(others)] = others
        table[:, : self._whole] = keys
        table[:, self._whole :] = rest.reshape(self.keyframes, -1)
        return table.reshape(-1)[: self.nbytes]

    def _split(self, data: Bytes) -> tuple[Bytes, Bytes]:
        """Keyframes and other frames, `[frames, bytes]` each. data: `nbytes` bytes."""
        table = np.zeros((self.keyframes, self._whole + (self.kappa - 1) * self._coded), np.uint8)
        table.reshape(-1)[: self.nbytes] = data
        others = table[:, self._whole :].reshape(self.keyframes * (self.kappa - 1), self._coded)
        return table[:, : self._whole], others[: self.count - self.keyframes]


def floats_of(tensor: torch.Tensor) -> Floats:
    """The same numbers in float32."""
    found: Floats = tensor.float().numpy()
    return found


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """`[rows, width]` -> uint8 `[rows, width, item]`, which shares memory with a contiguous tensor."""
    import torch

    shape = (*tensor.shape, tensor.element_size())
    if not tensor.numel():
        return np.empty(shape, np.uint8)
    found: Bytes = tensor.contiguous().view(torch.uint8).numpy().reshape(shape)
    return found
