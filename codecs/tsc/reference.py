"""Codec 6 as a plain program, a value after the other: what FORMAT.md says. The codec gives the same bytes and numbers.

A layer here is without its header. `parts` are K and V, each the rows of its tokens: float32 `[tokens, width]`, and the
same values as the cache has them, uint8 `[tokens, width, item]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.tsc.pages import PAGE, STEPS, Bytes, Floats

if TYPE_CHECKING:
    import torch

Part = tuple[Floats, Bytes]


def encode(parts: Sequence[Part], kappa: int, top: int) -> bytes:
    """The frames of a layer; all values are finite."""
    out = b""
    for token in range(len(parts[0][0])):
        key = token - token % kappa
        for values, raw in parts:
            if token == key:
                out += raw[token].tobytes()
                continue
            difference = values[token] - values[key]
            for begin in range(0, values.shape[1], PAGE):
                out += _page(difference[begin : begin + PAGE], raw[token, begin : begin + PAGE], top)
    return out


def _page(difference: Floats, raw: Bytes, top: int) -> bytes:
    width = len(difference)
    largest = sorted(range(width), key=lambda i: (-abs(difference[i]), i))[: top * width // PAGE]
    others = [abs(difference[i]) for i in range(width) if i not in largest]
    bits = int(np.float32(max(others, default=np.float32(0)) / np.float32(STEPS)).view(np.uint32))
    scale = (bits + 0xFFFF) >> 16
    step = np.uint32(scale << 16).view(np.float32)
    numbers = []
    for i in range(width):
        steps = 0 if i in largest or step == 0 else int(np.clip(np.rint(difference[i] / step), -STEPS, STEPS))
        numbers.append(steps + STEPS)
    numbers += [0] * (width % 2)
    packed = bytes(a | b << 4 for a, b in zip(numbers[0::2], numbers[1::2], strict=True))
    places = sorted(largest)
    return scale.to_bytes(2, "little") + packed + bytes(places) + b"".join(raw[i].tobytes() for i in places)


def decode(data: bytes, tokens: int, widths: Sequence[int], kappa: int, top: int, dtype: torch.dtype) -> list[Part]:
    """The parts of a layer. data: what `encode` wrote."""
    import torch

    item, largest, at = dtype.itemsize, torch.finfo(dtype).max, 0
    parts = [(np.zeros((tokens, w), np.float32), np.zeros((tokens, w, item), np.uint8)) for w in widths]
    for token in range(tokens):
        key = token - token % kappa
        for values, raw in parts:
            width = values.shape[1]
            if token == key:
                raw[token] = np.frombuffer(data, np.uint8, width * item, at).reshape(width, item)
                values[token] = torch.from_numpy(raw[token].copy()).view(dtype)[:, 0].float().numpy()
                at += width * item
                continue
            for begin in range(0, width, PAGE):
                end = min(begin + PAGE, width)
                corrected = top * (end - begin) // PAGE
                step = np.uint32(int.from_bytes(data[at : at + 2], "little") << 16).view(np.float32)
                at += 2
                for i in range(begin, end):
                    steps = (data[at + (i - begin) // 2] >> 4 * ((i - begin) % 2) & 15) - STEPS
                    near = torch.tensor(float(values[key, i] + np.float32(steps) * step)).clamp(-largest, largest)
                    raw[token, i] = near.to(dtype).reshape(1).view(torch.uint8).numpy()
                at += (end - begin + 1) // 2
                places, at = data[at : at + corrected], at + corrected
                for place in places:
                    raw[token, begin + place] = np.frombuffer(data, np.uint8, item, at)
                    at += item
            values[token] = torch.from_numpy(raw[token].copy()).view(dtype)[:, 0].float().numpy()
    assert at == len(data)
    return parts
