"""The same passages behind two beginnings: what differs between them is what a donor lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump
from kvstore.calibration.targets import target, unrotated
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.core.layout import SINKS, KVLayout
from kvstore.core.rope import can_rotate, check_length
from kvstore.errors import UnsupportedModel

Tensor = torch.Tensor
CONTEXTS = (16, 384)  # tokens before the passage: another prompt, another document


@dataclass(frozen=True)
class PassagePair:
    """The same tokens behind two beginnings. window: of the dump, where the passage begins at `start`; layers: of the
    other run, per layer (K, V), bfloat16 [heads, tokens, dim], which begins at `position` there."""

    window: int
    start: int
    position: int
    layers: list[tuple[Tensor, Tensor]]

    def numbers(self, dump: KVDump, layer: int, which: int) -> tuple[Tensor, Tensor]:
        """(the donor's, the other run's) values of a part before the rotary embedding, float32 [tokens, C]."""
        rows = slice(self.start, dump.length)
        own = self.layers[layer][which].transpose(0, 1).flatten(1).float().numpy()
        if which == 0 and rotates(dump.layout):
            positions = np.arange(self.position, self.position + len(own))
            own = unrotated(own, dump.layout, dump.layout.layers[layer].key_dim, positions)
        return torch.from_numpy(target(dump, layer, which, self.window, rows)), torch.from_numpy(own)


def check_passages(layout: KVLayout, length: int) -> None:
    """Check that passages can be taken from windows of `length` tokens.

    Raises:
        UnsupportedModel: keys cannot be moved from one beginning to another.
        UnsupportedLength: keys depend on the length, and passages are too short to have those of the layout.
    """
    if not can_rotate(layout):
        raise UnsupportedModel(f"donor: keys with the rotary embedding {layout.rope} cannot be moved; leave donor out")
    start = length // 2
    check_length(layout, length - start + min(*CONTEXTS, start - SINKS))


def passages(model: Any, dump: KVDump, windows: Sequence[int]) -> Iterator[PassagePair]:
    """The second half of each of these windows behind some of the next one: a few tokens or many, by turns."""
    start = dump.length // 2
    for number, window in enumerate(windows):
        context = min(CONTEXTS[number % len(CONTEXTS)], start - SINKS)
        other = dump.tokens(windows[(number + 1) % len(windows)])
        ids = torch.from_numpy(np.concatenate([other[:context], dump.tokens(window)[start:]]))
        with torch.inference_mode():
            cache = model(ids[None].to(model.device), use_cache=True, logits_to_keep=1).past_key_values
        layers = [(x.keys[0, :, context:].cpu().clone(), x.values[0, :, context:].cpu().clone()) for x in cache.layers]
        yield PassagePair(window, start, context, layers)
