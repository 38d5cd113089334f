"""SmolLM2's tokenizer with its first ids alone: a small model cannot afford 49,152 rows of embedding.

Its ids are the special tokens, the 256 bytes, then one a merge in the order of the merges. So a shorter list of merges
is a tokenizer of its own: it splits every text, by way of single bytes if need be, and its ids mean what they mean in
SmolLM2.
"""

from __future__ import annotations

import json
from typing import Any

LEAST = 273  # special tokens and bytes


def cut(document: dict[str, Any], size: int) -> dict[str, Any]:
    """`document` (a tokenizer.json with byte-level BPE) with the ids below `size`; the argument is left as it is.

    Raises:
        ValueError: the special tokens and the bytes alone are more than `size`, or ids are not in the order of merges.
    """
    model = document["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < size}
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    results = [model["vocab"]["".join(pair)] for pair in merges]
    first = min(results, default=0)
    if size < first:
        raise ValueError(f"vocabulary: expected at least {first} ids, found {size}")
    if results != sorted(results) or any(added["id"] >= size for added in document["added_tokens"]):
        raise ValueError("vocabulary: expected special tokens first, and the others in the order of their merges")
    count = sum(number < size for number in results)
    return document | {"model": model | {"vocab": kept, "merges": merges[:count]}}


def small_tokenizer(tokenizer: Any, size: int) -> Any:
    """A fast tokenizer with the first `size` ids of `tokenizer`, its special tokens and its chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    document = cut(json.loads(tokenizer.backend_tokenizer.to_str()), size)
    special = {name: tokenizer.special_tokens_map[name] for name in ("bos_token", "eos_token", "pad_token")}
    small = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(document)), **special)
    small.chat_template = tokenizer.chat_template
    return small
