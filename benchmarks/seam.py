"""How far does a seam reach? `python -m benchmarks.seam [--quick] [--json FILE]`

The same passage behind two prefixes: what share of the variance of its keys (turned to the new positions) and values
is explained by the other cache, by the distance of the token from where the common tokens begin. Rows
`seam/{near-synonym,other-instruction,retrieval}/FIRST` with `explained_k` and `explained_v`, a mean over layers (but
for the first, which depends on the token alone), of tokens from FIRST to twice that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.workloads.text import Text
from benchmarks.workloads.variants import BASE, NEAR_SYNONYM, OTHER_INSTRUCTION
from kvstore.codecs import KVView
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.integrations.transformers import layout_from_config

PASSAGE, DOCUMENT = 1024, 400
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, PASSAGE)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    rows = Rows("seam", args.json)
    model, tokenizer = load_model(args.model)
    windows = 2 if args.quick else 8
    text = Text(tokenizer, args.text, windows * (PASSAGE + 2 * DOCUMENT) + 1)
    left: dict[str, np.ndarray[Any, Any]] = {}
    for _ in range(windows):
        for case, first, second, passage in pairs(text):
            left[case] = left.get(case, 0) + unexplained(model, first, second, passage)
    for case, sums in left.items():
        for number, first in enumerate(EDGES[:-1]):
            for which, name in enumerate("kv"):
                part = sums[number, :, which]  # [layers, (left, whole)]
                rows.add(f"seam/{case}/{first}", f"explained_{name}", float(1 - (part[:, 0] / part[:, 1]).mean()), "")
    rows.main_exit(True)


def pairs(text: Text) -> Iterator[tuple[str, list[int], list[int], list[int]]]:
    """(case, two prefixes, the passage behind both) of one window."""
    passage, user = text.take(PASSAGE), text.ids("<|im_start|>user\n")
    base = text.system(BASE) + user
    yield "near-synonym", base, text.system(NEAR_SYNONYM) + user, passage
    yield "other-instruction", base, text.system(OTHER_INSTRUCTION) + user, passage
    yield "retrieval", base + text.take(DOCUMENT), base + text.take(DOCUMENT - 20), passage


def unexplained(model: Any, first: list[int], second: list[int], passage: list[int]) -> Any:
    """Sums of squares by distance, float64 [bins, layers - 1, 2 (K, V), 2 (left by the donor, around the mean)]."""
    donor, own = (prefill(model, [*prefix, *passage], len(prefix)) for prefix in (first, second))
    view = KVView.of_layers(layout_from_config(model.config, model.dtype), donor)
    rotate_keys(view, len(second) - len(first))
    found = np.zeros((len(EDGES) - 1, len(own) - 1, 2, 2))
    for layer, (said, wanted) in enumerate(zip(donor[1:], own[1:], strict=True)):
        for which in range(2):
            x, y = wanted[which].double(), said[which].double()
            left, whole = (x - y).square(), (x - x.mean(1, keepdim=True)).square()
            for number, (begin, end) in enumerate(itertools.pairwise(EDGES)):
                found[number, layer, which] = [left[:, begin:end].sum().item(), whole[:, begin:end].sum().item()]
    return found


@torch.inference_mode()
def prefill(model: Any, ids: list[int], begin: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(K, V) of each layer, [heads, tokens, dim], of the tokens from `begin` on."""
    cache = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
    return [(x.keys[0, :, begin:].clone(), x.values[0, :, begin:].clone()) for x in cache.layers]


if __name__ == "__main__":
    main()
