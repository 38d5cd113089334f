"""Archives of sequences: `python -m benchmarks.archives [--model DIR|NAME] [--windows 2] [--tokens 512]`

Each window of held-out text is computed in the passes of a conversation (a prompt at once, an answer token by token,
another message), archived and restored. Rows, per token and over all windows:

- `tokens/model`: bits of the text, coded by the model's probabilities; the peer is the model's own surprisal, from one
  pass over the window (its first token counts as log2 of the vocabulary). `all_in_bits_per_token`: the whole archive.
- `tokens/even`: the same without the model; the peer is log2 of the vocabulary.
- `entropy`: the bits that the exact cache takes in that codec, whose peer is the archive.
- `bit_identical`: the share of windows that came back bit for bit. `archive_s` and `restore_s`: seconds a token.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import LENGTH, cut, test_text
from kvstore.codecs import codec_by_name
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.tokens.archive import Archive
from kvstore.codecs.view import KVView
from kvstore.integrations.transformers import Passes, archive, layout_from_config, restore

ANSWER = 24  # tokens that are computed one by one
BLOCK = 64


def main() -> None:
    parser = arguments("Archives: bits a token, and whether the cache comes back bit for bit.")
    parser.add_argument("--windows", type=int, help="of held-out text (2)")
    parser.add_argument("--tokens", type=int, default=512, help="of each window (512)")
    args = parser.parse_args()
    windows = args.windows or (1 if args.quick else 2)
    count = min(args.tokens, LENGTH, 128 if args.quick else LENGTH)
    rows = Rows("archives", args.json)
    model, tokenizer = load_model(args.model)
    ids = cut(tokenizer, test_text(args.text, None, windows), windows)[:, :count]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    surprisal = sum(surprisal_of(model, window) + math.log2(vocabulary) for window in ids) / ids.numel()
    entropy = 0.0
    for by_model in (True, False):
        case = "tokens/model" if by_model else "tokens/even"
        text = whole = spent = taken = 0.0
        same = 0
        for window in ids:
            cache, passes = computed(model, window)
            entropy += entropy_bits(model, window, cache) if by_model else 0
            begin = time.perf_counter()
            data = archive(model, window, cache, passes, by_model=by_model)
            middle = time.perf_counter()
            found = restore(model, data)
            spent, taken = spent + middle - begin, taken + time.perf_counter() - middle
            same += found.tokens.tolist() == window.tolist() and equal(found.cache, cache)
            text, whole = text + 8 * len(Archive.parse(data).text), whole + 8 * len(data)
        peer, least = ("surprisal", surprisal) if by_model else ("log2(vocabulary)", math.log2(vocabulary))
        each, all_in = text / ids.numel(), whole / ids.numel()
        rows.add(case, "bits_per_token", each, "bits", peer, each / least)
        rows.add(case, "all_in_bits_per_token", all_in, "bits", peer, all_in / least)
        rows.add(case, "bit_identical", same / len(ids), "share of windows")
        rows.add(case, "archive_s", spent / ids.numel(), "s a token")
        rows.add(case, "restore_s", taken / ids.numel(), "s a token")
        if by_model:
            rows.add("surprisal", "bits_per_token", surprisal, "bits")
            exact = entropy / ids.numel()
            rows.add("entropy", "bits_per_token", exact, "bits", case, exact / all_in)
    rows.main_exit()


@torch.no_grad()
def computed(model: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """(the cache of a window, its passes), computed as a conversation is."""
    cache, half = DynamicCache(config=model.config), len(ids) // 2
    ends = [half, *range(half + 1, half + ANSWER + 1), len(ids)]
    with Passes(model) as passes:
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            model(ids[None, begin:end], past_key_values=cache, logits_to_keep=1)
    return cache, passes.found


@torch.no_grad()
def surprisal_of(model: Any, ids: torch.Tensor) -> float:
    """Bits of the tokens behind the first one, by one pass over all."""
    logits = model(ids[None]).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")) / math.log(2)


def entropy_bits(model: Any, ids: torch.Tensor, cache: Any) -> float:
    """Bits of the cache, in blocks of 64 tokens, in the exact codec that needs no profile."""
    layout, codec, spent = layout_from_config(model.config, model.dtype), codec_by_name("entropy"), 0
    view = KVView.of_layers(layout, layout.layers_of(cache, len(ids))[0])
    for begin in range(0, len(ids), BLOCK):
        part = ids[begin : begin + BLOCK]
        info = BlockInfo(layout, part.numpy().astype(np.uint32), begin)
        sizes = codec.encode(info, view.narrow(begin, len(part)), memoryview(bytearray(codec.bound(info))))
        assert sizes is not None  # it fits by the meaning of bound
        spent += 8 * sum(sizes)
    return float(spent)


def equal(left: Any, right: Any) -> bool:
    pairs = zip(left.layers, right.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


if __name__ == "__main__":
    main()
