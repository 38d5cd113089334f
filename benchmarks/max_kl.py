"""Does reuse beyond the prefix keep what was asked of it? `python -m benchmarks.max_kl [--documents 7]`

`Approximate(max_kl=)` is a promise: what a cache that was put together from donors loses must not be more, in 95 of
100 cases. Cases: text of three kinds (conversations, prose, code; none of it is fitted to), each in three contexts:
behind a near synonym of the system prompt, behind another instruction, and passages in other order and company. Each
is asked for at every limit. KL: of the predictions for the next tokens, nats a token, against those on the cache of
the whole prompt computed at once. What is refused, by the plan or after what the recomputed rows showed, loses nothing
and reuses nothing.

Rows, of each kind and of all: `kept`, the share of cases with KL <= max_kl; `kl_worst`; `reused`, tokens that donors
gave over all tokens of the prompts; `answered`, the share of cases in which anything was reused.

Without --profile the section "approximate" is fitted first, to calibration text, in minutes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.approximate import CASES, Case, Prefills, beginnings, note, predictions
from benchmarks.common import Rows, arguments, scratch
from benchmarks.conversations import held_out_text, load_model
from benchmarks.other_text import prose, python_sources
from benchmarks.profile import profile_path
from kvstore import Approximate, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration.lossy.quality import divergences
from kvstore.config import GIB
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.cache import cache_from_layers
from kvstore.integrations.transformers.recompute import recompute

LIMITS = (0.005, 0.01, 0.02)
PROMPT, AFTER, PASSAGE = 640, 96, 256  # tokens
CHARACTERS = 8  # more than a token has, on average
FIT_WINDOWS = 36
KINDS = {"conversation": held_out_text, "prose": prose, "code": python_sources}


@dataclass(frozen=True)
class Found:
    """kl: 0 where nothing was reused; reused: share of the prompt's tokens."""

    kl: float
    reused: float


def main() -> None:
    parser = arguments("How often reuse beyond the prefix keeps the KL that was asked for.")
    parser.add_argument("--documents", type=int, metavar="N", help="of each kind and context (7; with --quick 1)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help='with the section "approximate"')
    args = parser.parse_args()
    documents = args.documents or (1 if args.quick else 7)
    model, tokenizer = load_model(args.model)
    try:
        profile = profile_path(model, tokenizer, args.profile, FIT_WINDOWS, parts=("approximate",), length=PROMPT)
    except UnsupportedModel as error:
        raise SystemExit(f"skipped, for nothing is reused on this model: {error}") from error
    rows, prefills = Rows("max_kl", args.json), Prefills(model, profile)
    found: dict[tuple[str, float], list[Found]] = {}
    with scratch("max_kl") as folder:
        for kind, take in KINDS.items():
            text = take((documents + 4) * (PROMPT + AFTER) * CHARACTERS)
            for case in cases(tokenizer, text, documents):
                for limit, one in zip(LIMITS, measure(prefills, folder, case), strict=True):
                    found.setdefault((kind, limit), []).append(one)
                    note(f"{kind} {case.name} {limit}: KL {one.kl:.4f}, {one.reused:.2f} reused")
    for limit in LIMITS:
        for kind in KINDS:
            add(rows, f"max_kl/{limit}/{kind}", limit, found[kind, limit])
        add(rows, f"max_kl/{limit}/all", limit, [x for kind in KINDS for x in found[kind, limit]])
    rows.main_exit()


def add(rows: Rows, case: str, limit: float, of: list[Found]) -> None:
    rows.add(case, "kept", float(np.mean([x.kl <= limit for x in of])), "share of cases")
    rows.add(case, "kl_worst", max(x.kl for x in of), "nats")
    rows.add(case, "reused", float(np.mean([x.reused for x in of])), "share of tokens")
    rows.add(case, "answered", float(np.mean([x.reused > 0 for x in of])), "share of cases")


def cases(tokenizer: Any, text: str, documents: int) -> Iterator[Case]:
    """As many of each context, of different text."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    heads = beginnings(tokenizer)
    length = PROMPT + AFTER
    for number in range(documents):
        body = ids[number * length : (number + 1) * length]
        before = torch.cat([heads[""], body])[:PROMPT]
        for name in CASES[:2]:
            whole = torch.cat([heads[name], body])
            yield Case(name, whole[:PROMPT], whole[PROMPT : PROMPT + AFTER], (before,))
        rng, count = random.Random(number), len(ids) // (PASSAGE + AFTER)
        a, b, c, d, e = (ids[x * (PASSAGE + AFTER) : (x + 1) * (PASSAGE + AFTER)] for x in rng.sample(range(count), 5))
        whole = torch.cat([heads[""], a[:PASSAGE], b[:PASSAGE], c])
        others = [torch.cat([heads[""], *(x[:PASSAGE] for x in order)]) for order in ((b, d, c), (e, a, d))]
        yield Case("retrieval", whole[:PROMPT], whole[PROMPT : PROMPT + AFTER], tuple(others))


def measure(prefills: Prefills, folder: Path, case: Case) -> list[Found]:
    """At every limit."""
    model, place = prefills.model, folder / "store"
    shutil.rmtree(place, ignore_errors=True)
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(GIB, "entropy"), profile=prefills.profile)
    with KVStore(place, ModelIdentity.from_transformers(model), config) as store:
        for tokens in case.before:
            store.put(tokens.numpy(), prefills(tokens))
        store.flush()
        hits = [store.get(case.prompt[:-1].numpy(), approximate=Approximate(max_kl=limit)) for limit in LIMITS]
    reference = predictions(model, case.after, cache_from_layers(prefills(case.prompt)))
    known: dict[tuple[int, ...], tuple[float, float]] = {}  # the same list of positions is the same cache
    found = []
    for limit, hit in zip(LIMITS, hits, strict=True):
        if hit is None or not hit.approximate:
            found.append(Found(0.0, 0.0))
            continue
        key = (hit.tokens, *hit.recompute)
        if key not in known:
            mended = recompute(model, hit.cache(), case.prompt, hit.recompute, hit.spans, hit.estimates)
            bound = mended.deviation.kl
            assert bound is not None
            after = predictions(model, case.after, mended.cache)
            known[key] = divergences(reference, after).mean().item(), bound
        kl, bound = known[key]
        reused = (hit.tokens - hit.exact_tokens - len(hit.recompute)) / len(case.prompt)
        found.append(Found(kl, reused) if bound <= limit else Found(0.0, 0.0))
    return found


if __name__ == "__main__":
    main()
