"""Which causal models of transformers a store takes, and whether what it gives back is exact: a table of all types.

`python -m benchmarks.families [--quick] [--only NAME ...] [--json FILE]`. Of every config class that
`AutoModelForCausalLM` knows, a tiny model with chance weights is made (the tests' own, `tests/helpers/
causal_models.py`; windows and chunks of 16 tokens). For prompts below, at and above the window: prefill, put, close,
open, get, then 20 more tokens at once and 6 greedy steps from what came back. Every logit must equal, bit for bit, that
of the cache which stayed in memory. A type is *exact* if all prompts are, *refused* if the store says by name that it
cannot take it, *wrong* if anything differs, *not built* if no tiny model of it can be made or run here.

`--quick` tries a dozen types. Status 1 if any type is wrong, or raises what is no error of the store.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.common import Rows, arguments, use_helpers_of_tests

WINDOW = 16
PROMPTS = (9, WINDOW, 45)
MORE, STEPS = 20, 6
QUICK = ("Cohere2", "DeepseekV3", "Gemma2", "Gemma3Text", "GPT2", "GptOss", "Llama", "Llama4Text", "Mistral", "Phi3")
MOST_PARAMETERS = 30_000_000
_SMALLER: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 12,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
"""Sizes beside those that the tests make small: fields that a class does not have are left out."""


class Outcome(NamedTuple):
    """What became of one type: `verdict` is "exact", "refused", "wrong", "crashed" or "not built"."""

    name: str
    verdict: str
    detail: str
    layers: str


def main() -> None:
    use_helpers_of_tests()
    import causal_models

    causal_models.MOST_PARAMETERS = MOST_PARAMETERS
    parser = arguments("Which causal models of transformers a store takes, and whether they are exact.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="config classes, without the word Config")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds = causal_models.config_classes()
    chosen = args.only or (QUICK if args.quick else None)
    if chosen is not None:
        kinds = [kind for kind in kinds if kind.__name__.removesuffix("Config") in chosen]
    rows, outcomes = Rows("families", args.json), []
    for kind in kinds:
        outcomes.append(tried(kind))
        print(f"  {outcomes[-1].name:32} {outcomes[-1].verdict:10} {outcomes[-1].layers:40} {outcomes[-1].detail}")
        sys.stdout.flush()
    counts = Counter(outcome.verdict for outcome in outcomes)
    for verdict in ("exact", "refused", "wrong", "crashed", "not built"):
        rows.add(f"causal-lm/{verdict.replace(' ', '-')}", "types", counts[verdict], "types")
    rows.main_exit(not (counts["wrong"] or counts["crashed"]))


def tried(kind: Any) -> Outcome:
    """What becomes of a tiny model of a config class."""
    import causal_models

    from kvstore.errors import KVStoreError

    name, layers = kind.__name__.removesuffix("Config"), ""
    with causal_models.quiet():
        config = model = None
        try:
            config = causal_models.tiny_config(kind, _SMALLER)
            model = small(kind)
            layers = kinds_of(model)
        except Exception as error:
            why = refusal(config if model is None else model.config)
            return Outcome(name, "refused" if why else "not built", why or brief(error), layers)
        details = []
        for prompt in PROMPTS:
            try:
                details.append(difference(model, prompt))
            except KVStoreError as error:
                return Outcome(name, "refused", brief(error), layers)
            except Exception as error:
                return Outcome(name, "crashed", f"{type(error).__name__}: {brief(error)}", layers)
    wrong = [f"prompt of {prompt}: {detail}" for prompt, detail in zip(PROMPTS, details, strict=True) if detail]
    return Outcome(name, "wrong" if wrong else "exact", "; ".join(wrong), layers)


def small(kind: Any) -> Any:
    """A tiny model of a config class, with small windows where it has any."""
    import causal_models

    return causal_models.build(causal_models.tiny_config(kind, _SMALLER))


def refusal(config: Any) -> str:
    """Why the store takes no model with this config; "" if it takes them."""
    from kvstore.errors import UnsupportedModel
    from kvstore.integrations.transformers import layout_from_config

    if config is None:
        return ""
    try:
        layout_from_config(config, "float32")
    except UnsupportedModel as error:
        return brief(error)
    return ""


def kinds_of(model: Any) -> str:
    """The classes of the layers of the model's cache, each once."""
    cache = prefilled(model, tokens(4))
    return ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))


def difference(model: Any, prompt: int) -> str:
    """How what a store gives back of a prompt's cache differs from that cache; "" if it does not."""
    from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig

    ids = tokens(prompt + MORE)
    identity = ModelIdentity.from_transformers(model)
    memory = prefilled(model, ids[:, :prompt])
    config = StoreConfig(
        host=TierConfig(0), disk=TierConfig(4 << 30, "splitzip"), segment_bytes=32 << 20, block_tokens=8
    )
    with tempfile.TemporaryDirectory() as folder:
        with KVStore(folder, identity, config) as store:
            store.put(ids[0, :prompt].tolist(), memory)
        with KVStore(folder, identity, config) as store:
            hit = store.get(ids[0].tolist())
    if hit is None or hit.tokens != prompt:
        return f"{0 if hit is None else hit.tokens} tokens came back"
    want, got = continued(model, memory, ids[:, prompt:]), continued(model, hit.cache(), ids[:, prompt:])
    for step, (one, other) in enumerate(zip(want, got, strict=True)):
        if not torch.equal(one, other):
            return f"step {step} differs by {float((one - other).abs().max()):.2g}"
    return ""


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    """The cache of a prompt, of the class that `generate` would use."""
    from transformers import DynamicCache

    from kvstore.core.cache_argument import cache_name

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{cache_name(model): cache}, use_cache=True)
    return cache


def continued(model: Any, cache: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits of more tokens at once, and of greedy steps behind them. Mutates the cache."""
    from kvstore.core.cache_argument import cache_name

    for _ in range(1 + STEPS):
        with torch.no_grad():  # not over the yield: two of these take turns
            logits = model(ids, **{cache_name(model): cache}, use_cache=True).logits
        yield logits.clone()
        ids = logits[:, -1:].argmax(-1)


def tokens(count: int) -> torch.Tensor:
    """`[1, count]` token ids, always the same."""
    import causal_sizes

    return torch.randint(4, causal_sizes.TEXT, (1, count), generator=torch.Generator().manual_seed(11))


def brief(error: BaseException) -> str:
    """The first line of an error, in no more than 120 characters."""
    return str(error).partition("\n")[0][:120]


if __name__ == "__main__":
    main()
