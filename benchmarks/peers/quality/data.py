"""What quality is measured on: windows of held-out text, and caches of other windows to calibrate with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common import arguments, scratch
from benchmarks.conversations import calibration_text as conversations_to_fit_to
from benchmarks.conversations import held_out_text, load_model
from kvstore.calibration.dump import KVDump
from kvstore.core.layout import KVLayout

LENGTH = 1024  # tokens of a window
CHARACTERS = 8  # more than a token has, on average

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of every layer, `[heads, tokens, dim]`."""


def test_text(text: Path | None, calibration_text: Path | None, windows: int) -> str:
    """Text to measure on: test conversations, or the second half of `text`; all of it where there is another text to
    calibrate with."""
    if text is None:
        return held_out_text(windows * LENGTH * CHARACTERS)
    found = text.read_text(errors="replace")
    return found if calibration_text else found[len(found) // 2 :]


def calibration_text(text: Path | None, other: Path | None, windows: int) -> str:
    """Text to fit to: that of `other`, or the first half of `text`, or calibration conversations."""
    if other is not None:
        return other.read_text(errors="replace")
    if text is not None:
        found = text.read_text(errors="replace")
        return found[: len(found) // 2]
    return conversations_to_fit_to(windows * LENGTH * CHARACTERS)


def cut(tokenizer: Any, text: str, windows: int) -> torch.Tensor:
    """The first `windows` windows of a text, or as many as it has: int64 `[windows, 1024]`."""
    ids = tokenizer(text[: windows * LENGTH * CHARACTERS], return_tensors="pt", verbose=False).input_ids[0]
    count = min(windows, len(ids) // LENGTH)
    if not count:
        raise SystemExit(f"the text has fewer than {LENGTH} tokens")
    return ids[: count * LENGTH].view(count, LENGTH)


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor) -> Pairs:
    """The cache of `ids` `[tokens]`, after the rotary embedding, all tokens in all layers."""
    cache = DynamicCache()  # with a config, layers with windows would keep their last tokens alone
    model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]


class MemoryDump:
    """Caches of windows, held in memory (1.5 GiB for 64 windows of the default model)."""

    def __init__(self, model: Any, layout: KVLayout, ids: torch.Tensor) -> None:
        self.layout = layout
        self.windows, self.length = ids.shape
        self._ids = ids
        self._caches: Sequence[Pairs] = [prefill(model, window) for window in ids]

    def tokens(self, window: int) -> torch.Tensor:
        """int64 `[length]`."""
        return self._ids[window]

    def layer(self, layer: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer of a window, float32 `[length, heads * dim]`."""
        k, v = self._caches[window][layer]
        return k.float().transpose(0, 1).flatten(1), v.float().transpose(0, 1).flatten(1)


def dump_arguments(description: str) -> argparse.Namespace:
    """Arguments of a benchmark that fits something to a dump. windows: 32 where none are named, or 8 with --quick."""
    parser = arguments(description)
    parser.add_argument("--windows", type=int, help="of 1,024 tokens, an eighth of them held out (32)")
    parser.add_argument("--dir", type=Path, help="where raw caches are kept meanwhile (default: build/scratch)")
    args = parser.parse_args()
    args.windows = args.windows or (8 if args.quick else 32)
    return args


@contextmanager
def dumped(args: argparse.Namespace, name: str) -> Iterator[tuple[Any, KVDump]]:
    """The model, and a dump of the text for calibration that is there until the end of the block."""
    model, tokenizer = load_model(args.model)
    with scratch(name, args.dir) as folder:
        text = calibration_text(args.text, None, args.windows)
        yield model, KVDump.make(model, tokenizer, text, folder / "dump", windows=args.windows)
