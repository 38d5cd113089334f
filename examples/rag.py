"""Retrieval: the same passages in other company, reused although their prefix was never computed.

    python examples/rag.py [--model DIR] [--max-kl 0.2]

A prompt of retrieved passages rarely begins as an earlier one: the passages come in another order, with others. Their
keys and values depend on what stands before them, but little. So the store (1) keeps them exactly, coded as
differences from each other, and (2) on request gives caches that were computed in other company, names the few
positions that are worth computing anew, and says at most how much the predictions lose (docs/semantic.md).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from smollm2 import load, passages

from kvstore import Approximate, Hit, KVStore, ModelIdentity, StoreConfig
from kvstore.integrations.transformers import get_or_prefill
from kvstore.integrations.transformers.recompute import recompute

# What reuse costs on SmolLM2, 1.5 kB: `kvstore calibrate --model DIR --text FILE --out FILE --parts approximate`.
PROFILE = Path(__file__).with_name("smollm2-approximate.kvprofile")
EARLIER = ((0, 1, 2), (3, 4, 5))  # passages of the prompts that were answered before
NOW = (4, 1, 3)  # the same passages, another order and company
INSTRUCTION = "Answer the question from these passages of a licence.\n"
QUESTION = "\n\nQuestion: May I sell copies of the work?\nAnswer:"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint; default: the installed SmolLM2")
    parser.add_argument("--max-kl", type=float, default=0.2, help="what predictions may lose, nats a token")
    parser.add_argument("--quick", action="store_true", help="shorter passages")
    given = parser.parse_args(arguments)
    model, tokenizer = load(given.model)
    # Without a profile the loss is estimated from a few positions that are computed anew (`probe`).
    approximate = Approximate(max_kl=given.max_kl, probe=given.model is not None)
    config = StoreConfig(profile=PROFILE if given.model is None else None)
    texts = passages(6, 300 if given.quick else 1500, ["LICENSE"])  # a text that stays as it is

    def prompt(order: Sequence[int]) -> list[int]:
        parts = [INSTRUCTION, *(f"\n\nPassage:\n{texts[number]}" for number in order), QUESTION]
        return [token for part in parts for token in tokenizer(part).input_ids]

    with tempfile.TemporaryDirectory() as folder:
        with KVStore(folder, ModelIdentity.from_transformers(model, tokenizer), config) as store:
            for order in EARLIER:
                get_or_prefill(store, prompt(order), model)
            store.flush()
            ids = prompt(NOW)
            print(f"Stored: prompts of the passages {EARLIER}. Now: {NOW}, {len(ids)} tokens.\n")
            print("how                        computed tokens  first token  KL of it   at most")
            begin = time.perf_counter()
            exact = next_token(model, ids, None)
            print(f"without the store          {len(ids):15}  {time.perf_counter() - begin:9.2f} s")

            begin = time.perf_counter()
            hit = store.get(ids[:-1])
            next_token(model, ids, hit)
            held = hit.tokens if hit is not None else 0
            print(f"the exact prefix           {len(ids) - held:15}  {time.perf_counter() - begin:9.2f} s")

            begin = time.perf_counter()
            hit = store.get(ids[:-1], approximate=approximate)
            refused = "nothing can be reused within this limit"
            if hit is not None and hit.approximate:
                mended = recompute(model, hit.cache(), ids, hit.recompute, hit.spans, hit.estimates)
                bound = mended.deviation.kl  # corrected by what was found at the positions that were computed anew
                seconds, computed = time.perf_counter() - begin, len(ids) - hit.tokens + len(hit.recompute)
                lost = f"{divergence(exact, mended.logits):9.4f}  {bound:7.4f}" if bound is not None else "not known"
                print(f"passages in other company  {computed:15}  {seconds:9.2f} s  {lost}")
                refused = "" if bound is not None and bound <= given.max_kl else "it may lose more than was asked for"
            if refused:  # `generate(..., approximate=)` does so by itself
                print(f"So the prompt is computed: {refused}; allow more with --max-kl.")

            get_or_prefill(store, ids, model)  # exact this time
            store.flush()
            print("\nThe exact cache of this prompt, stored beside the others:")
            counters = store.stats()["counters"]
            coded, raw = counters.get("member_bytes", 0), counters.get("member_raw_bytes", 0)
            if coded:
                print(f"{raw / 2**20:.1f} MiB in {coded / 2**20:.1f} MiB, {raw / coded:.2f} to 1, bit for bit.")
                print("Prefix hashing would store all of it again.")
            else:
                print("no whole block was like a stored one: these passages are too short.")


def next_token(model: Any, ids: list[int], hit: Hit | None) -> torch.Tensor:
    """Logits of the token after `ids`, from a stored prefix, where there is one."""
    cache, held = (None, 0) if hit is None else (hit.cache(), hit.tokens)
    with torch.inference_mode():
        output = model(torch.tensor([ids[held:]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def divergence(exact: torch.Tensor, other: torch.Tensor | None) -> float:
    """KL divergence of two predictions, nats."""
    assert other is not None
    p, q = (torch.log_softmax(logits.flatten().double(), -1) for logits in (exact, other))
    return float((p.exp() * (p - q)).sum())


if __name__ == "__main__":
    main()
