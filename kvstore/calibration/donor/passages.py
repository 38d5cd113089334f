"""The same passages behind two beginnings: what differs between them is what a donor lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.dump import KVDump
from kvstore.calibration.targets import target, unrotated
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.core.cache_argument import cache_of
from kvstore.core.layout import SINKS, KVLayout
from kvstore.core.rope import can_code_moved, check_length
from kvstore.errors import UnsupportedModel

Tensor = torch.Tensor
Tokens = npt.NDArray[Any]
CONTEXTS = (16, 384)  # tokens before the passage: another prompt, another document
EDIT = 16  # tokens at the beginning of everything before the passage, in place of as many: a prompt in other words


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
        UnsupportedModel: the donor codec cannot rotate keys from one beginning to another.
        UnsupportedLength: keys depend on the length, and passages are too short to have those of the layout.
    """
    if not can_code_moved(layout):
        raise UnsupportedModel(
            f"donor: the codec cannot rotate keys with the rotary embedding {layout.rope}; leave donor out"
        )
    start = length // 2
    check_length(layout, length - start + min(*CONTEXTS, start - SINKS))


def passages(model: Any, dump: KVDump, windows: Sequence[int]) -> Iterator[PassagePair]:
    """The second half of each of these windows behind something else, by turns: its first half with another beginning,
    a few tokens of the next window, many of them."""
    start = dump.length // 2
    for number, window in enumerate(windows):
        tokens, other = dump.tokens(window), dump.tokens(windows[(number + 1) % len(windows)])
        before = _before(number, tokens[:start], other)
        ids = torch.from_numpy(np.concatenate([before, tokens[start:]]))
        with torch.inference_mode():
            cache = cache_of(model(ids[None].to(model.device), use_cache=True, logits_to_keep=1))
        position = len(before)
        layers = [
            (x.keys[0, :, position:].cpu().clone(), x.values[0, :, position:].cpu().clone()) for x in cache.layers
        ]
        yield PassagePair(window, start, position, layers)


def _before(number: int, own: Tokens, other: Tokens) -> Tokens:
    """What passage `number` stands behind. own: what it stands behind in the dump. other: another window."""
    turn = number % (1 + len(CONTEXTS))
    if turn == 0:
        edit = min(EDIT, len(own) // 2)
        return np.concatenate([other[:edit], own[edit:]])
    return other[: min(CONTEXTS[turn - 1], len(own) - SINKS)]
