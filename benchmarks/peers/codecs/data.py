"""What the codecs are measured on: keys and values of real text, and normal numbers with ever more that are not."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from benchmarks.conversations import measured_text
from kvstore import KVLayout, LayerLayout
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.groups import GroupedView
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import layout_from_config

WINDOW = 2048  # tokens of one prefill
BLOCK = 64  # tokens of a block, as the store cuts them
PREFILL_S = 60.0  # after that the windows are repeated

Values = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
"""Bits of floating point numbers, `[n]`."""


Window = tuple[npt.NDArray[np.uint32], list[tuple[torch.Tensor, torch.Tensor]]]
"""Its tokens, and per layer K and V, `[heads, tokens, dim]`."""
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@dataclass
class RealKV:
    """Keys (after the rotary embedding) and values of windows of text, in the layout's dtype.

    values: `[n]`, their bits; window after window, in it K of layer 0, V of layer 0, K of layer 1, ..., each
    `[heads, tokens, dim]`. ids: the tokens of each window. tiled: whether windows are repeated.
    """

    layout: KVLayout
    ids: list[npt.NDArray[np.uint32]]
    values: Values
    tiled: bool

    def units(self, values: Values) -> list[Values]:
        """`values` (as `self.values`) cut in tensors: K and V of each layer of each window, views."""
        widths = [x.heads * dim for x in self.layout.layers for dim in (x.key_dim, x.value_dim)]
        sizes = [width * len(ids) for ids in self.ids for width in widths]
        ends = np.cumsum(sizes).tolist()
        return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def part(self, values: Values, number: int) -> Values:
        """All keys (0) or all values (1), one after the other; a copy."""
        part: Values = np.concatenate(self.units(values)[number::2])
        return part

    def blocks(self, values: Values, layout: KVLayout | None = None) -> list[tuple[BlockInfo, KVView]]:
        """`values` cut in blocks of 64 tokens, all layers; views. layout: that codecs are told, by default that of
        layers which keep all tokens; one with windows is of blocks that lack nothing."""
        layout = layout or self.layout
        dims = [dim for x in self.layout.layers for dim in (x.key_dim, x.value_dim)]
        units, found, dtype = iter(self.units(values)), [], getattr(torch, self.layout.dtype)
        for ids in self.ids:
            tensors = [torch.from_numpy(next(units)).view(dtype).view(-1, len(ids), dim) for dim in dims]
            pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
            window = (
                GroupedView.of_cache(layout, tuple(pairs), len(ids))
                if layout.is_grouped
                else KVView.of_layers(layout, pairs)
            )
            for start in range(0, len(ids), BLOCK):
                tokens = ids[start : start + BLOCK]
                info = BlockInfo(layout, tokens, start)
                found.append((info, window.narrow(start, len(tokens))))
        return found

    def cast(self, dtype: torch.dtype, largest: float | None = None) -> Values:
        """The numbers as another type, as its bits. largest: every tensor is scaled so that its largest number is
        this."""
        found = torch.empty(len(self.values), dtype=dtype)
        at = 0
        for unit in self.units(self.values):
            numbers = torch.from_numpy(unit).view(getattr(torch, self.layout.dtype)).float()
            if largest is not None:
                numbers *= largest / float(numbers.abs().max())
            found[at : at + len(unit)] = numbers.to(dtype)
            at += len(unit)
        bits: Values = found.view(_BITS[found.itemsize]).numpy()
        return bits

    def to(self, dtype: str, largest: float | None = None) -> RealKV:
        """The same as another dtype; see `cast`."""
        values = self.cast(getattr(torch, dtype), largest)
        return RealKV(replace(self.layout, dtype=dtype), self.ids, values, self.tiled)


def real_kv(nbytes: int, model: Any, tokenizer: Any, text: Path | None, window: int = WINDOW) -> RealKV:
    """At least `nbytes` of them, in whole blocks, from consecutive windows of text. Prefills for seconds.

    window: tokens of one. text: a file; by default conversations that nothing is calibrated on. After a minute of
    prefill, or at the end of the text, the windows are repeated.
    """
    characters = max(1 << 16, nbytes // 1024)
    words = measured_text(text, characters)
    stream = tokenizer(words, verbose=False).input_ids
    stream = stream[: len(stream) // BLOCK * BLOCK]
    if not stream:
        raise SystemExit(f"the text has fewer than {BLOCK} tokens")
    begin, have, windows = time.perf_counter(), 0, []
    while have < nbytes and stream and time.perf_counter() - begin < PREFILL_S:
        ids, stream = stream[:window], stream[window:]
        with torch.inference_mode():
            # Without a config every layer of it keeps all tokens: what the blocks of a growing sequence hold.
            cache = DynamicCache()
            model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        windows.append((np.array(ids, np.uint32), layers))
        have += sum(t.nbytes for pair in layers for t in pair)
    return assemble(windows, nbytes, whole_layout(model, windows[0][1]))


def whole_layout(model: Any, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> KVLayout:
    """The layout of these keys and values, all tokens in every layer; K and V of a model with latents are its latent
    and its rotated key."""
    shapes = tuple(LayerLayout(k.shape[0], k.shape[-1], v.shape[-1]) for k, v in layers)
    try:
        rope = layout_from_config(model.config, model.dtype).rope
    except UnsupportedModel as error:
        print(f"coded without the store, which refuses this model: {error}", file=sys.stderr)
        rope = "none"
    return KVLayout(shapes, str(model.dtype).removeprefix("torch."), rope)


def assemble(windows: Sequence[Window], nbytes: int, layout: KVLayout) -> RealKV:
    """At least `nbytes` in whole blocks, from whole windows and a part of the last; from the first again if need be."""
    wanted = -(-nbytes // (BLOCK * layout.bytes_per_token)) * BLOCK
    ids: list[npt.NDArray[np.uint32]] = []
    tensors: list[Values] = []
    while wanted > 0:
        tokens, layers = windows[len(ids) % len(windows)]
        tokens = tokens[:wanted]
        for tensor in (t[:, : len(tokens)] for pair in layers for t in pair):
            tensors.append(tensor.contiguous().view(_BITS[tensor.itemsize]).numpy().reshape(-1))
        ids.append(tokens)
        wanted -= len(tokens)
    return RealKV(layout, ids, np.concatenate(tensors), len(ids) > len(windows))


def normal(count: int, zeros: Sequence[int], escapes: Sequence[int]) -> dict[str, npt.NDArray[np.uint16]]:
    """bfloat16 standard normal numbers, `[count]` uint16, of which so many per cent are exact zeros, and so many
    others have an exponent drawn from 0 to 254. By name, "zerosZ/escapesE". The same numbers under all names, and
    what is replaced for a smaller share is replaced for a larger too. Seeded."""
    rng = np.random.default_rng(0)
    clean = torch.from_numpy(rng.standard_normal(count, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
    draw = rng.random(count, np.float32) * 100
    strange = clean & 0x807F | rng.integers(0, 255, count, np.uint16) << 7
    found = {}
    for zero in zeros:
        for escape in escapes:
            values = np.where(draw >= 100 - escape, strange, clean)
            found[f"zeros{zero}/escapes{escape}"] = np.where(draw < zero, np.uint16(0), values)
    return found
