"""Reuse beyond the prefix: the first token from a cache assembled of donors, against computing the prompt.

`python -m benchmarks.approximate [--documents 8] [--profile FILE]`. Prompts of 2,048 tokens of real conversations:

- near-synonym, other-instruction: the document was computed behind another system prompt;
- retrieval: passages of 512 tokens, computed before in other order and company;
- rounding: nothing is reused, the same prompt is computed in two parts. What rounding in another order does to a
  bfloat16 model is the floor under all the others.

Reuse: the store is opened and `get` assembles the cache from its disk; then one pass of the model over the positions
to recompute and the last token. KL: of the predictions for the next 256 tokens, nats a token, against those on the
cache of the whole prompt computed at once. The bound is the one that `get` gives; the sharpened one knows what that
pass found at the seams. Without --profile the section "approximate" is fitted first. `benchmarks.max_kl` has other
text and limits.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments, interleave, scratch
from benchmarks.conversations import held_out_text, load_model
from benchmarks.profile import profile_path
from benchmarks.workloads.variants import BASE, NEAR_SYNONYM, OTHER_INSTRUCTION
from kvstore import Approximate, Hit, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration.lossy.quality import divergences
from kvstore.config import GIB
from kvstore.core.layout import KVLayers
from kvstore.integrations.transformers.cache import cache_from_layers
from kvstore.integrations.transformers.recompute import recompute

PROMPT = 2048  # tokens
AFTER = 256
PART = 1000  # no multiple of what matrices are cut into: then two parts may be, bit for bit, one
PASSAGE = 512
KEPT = 4  # caches of whole prompts: the donors and the prompt of one case
FIT_WINDOWS = 36
CODEC = "entropy"  # of the disk tier; needs no profile
SYSTEM = {"": BASE, "near-synonym": NEAR_SYNONYM, "other-instruction": OTHER_INSTRUCTION}
CASES = ("near-synonym", "other-instruction", "retrieval")
# Any reuse at all: what it loses is measured here, not refused.
REQUEST = Approximate(max_kl=1.0)
Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """One prompt, int64 [2048], what comes after it, [256], and the prompts that were computed before."""

    name: str
    prompt: Tensor
    after: Tensor
    before: tuple[Tensor, ...]


class Donors:
    """A store with the prompts that were computed before. Every `get` opens it anew, so that nothing is in memory."""

    def __init__(self, model: Any, folder: Path, profile: Path) -> None:
        self._folder, self._profile = folder / "store", profile
        self._identity = ModelIdentity.from_transformers(model)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self) -> KVStore:
        disk = TierConfig(GIB, CODEC)
        return KVStore(self._folder, self._identity, StoreConfig(host=TierConfig(0), disk=disk, profile=self._profile))

    def put(self, tokens: Tensor, kv: KVLayers) -> None:
        with self.open() as store:
            store.put(tokens.numpy(), kv)

    def get(self, tokens: Tensor) -> Hit:
        with self.open() as store:
            hit = store.get(tokens.numpy(), approximate=REQUEST)
        if hit is None or not hit.approximate:
            raise SystemExit("nothing was reused")
        return hit


def main() -> None:
    parser = arguments("Time to first token and quality of caches assembled from donors.")
    parser.add_argument("--documents", type=int, metavar="N", help="of each case (8; with --quick 1)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help='with the section "approximate"')
    args = parser.parse_args()
    documents = args.documents or (1 if args.quick else 8)
    model, tokenizer = load_model(args.model)
    text = args.text.read_text() if args.text else held_out_text(20 * (PROMPT + AFTER) * documents)
    profile = profile_path(model, tokenizer, args.profile, FIT_WINDOWS, parts=("approximate",))
    prefills = Prefills(model, profile)
    rows = Rows("approximate", args.json)
    found: dict[str, list[Measured]] = {name: [] for name in (*CASES, "rounding")}
    rounds = 2 if args.quick else 5
    with scratch("approximate") as folder:
        for case in cases(tokenizer, text, documents):
            found[case.name].append(measure(prefills, folder, case, not found[case.name], rounds))
            if case.name == CASES[0]:
                found["rounding"].append(rounding(prefills, case))
            note(f"{case.name}: {found[case.name][-1]}")
    report(rows, found)
    rows.main_exit()


def beginnings(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Token ids of what stands before a document, by the name of the system prompt."""
    return {
        name: tokenizer(f"<|im_start|>system\n{x}<|im_end|>\n<|im_start|>user\n", return_tensors="pt").input_ids[0]
        for name, x in SYSTEM.items()
    }


def cases(tokenizer: Any, text: str, documents: int) -> Iterator[Case]:
    """As many of each case, of different text."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    heads = beginnings(tokenizer)
    length = PROMPT + AFTER
    if len(ids) < (documents + 1) * length:
        raise SystemExit(f"--text: {len(ids)} tokens are fewer than {documents + 1} x {length}")
    for number in range(documents):
        body = ids[number * length : (number + 1) * length]
        for name in CASES[:2]:
            whole = torch.cat([heads[name], body])
            before = torch.cat([heads[""], body])[:PROMPT]
            yield Case(name, whole[:PROMPT], whole[PROMPT : PROMPT + AFTER], (before,))
        rng, head = random.Random(number), heads[""]
        places = rng.sample(range(len(ids) // (PASSAGE + AFTER)), 8)
        texts = [ids[x * (PASSAGE + AFTER) : (x + 1) * (PASSAGE + AFTER)] for x in places]
        # The last one is cut: the head makes the prompt longer than four passages. Its own text goes on after it.
        whole = torch.cat([head, *(x[:PASSAGE] for x in texts[:3]), texts[3]])
        before = [torch.cat([head, *(texts[x][:PASSAGE] for x in order)]) for order in ((2, 0, 4, 5), (6, 3, 1, 7))]
        yield Case("retrieval", whole[:PROMPT], whole[PROMPT : PROMPT + AFTER], tuple(before))


# -- one case ----------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """kl, estimate, sharpened (bounds): nats a token. recomputed: positions, without the prompt's last. ttft, full:
    seconds."""

    kl: float
    estimate: float = 0.0
    sharpened: float = 0.0
    recomputed: int = 0
    ttft: float = 0.0
    full: float = 0.0


def measure(prefills: Prefills, folder: Path, case: Case, timed: bool, rounds: int) -> Measured:
    """Quality, and the times if `timed`, of one prompt."""
    model, donors = prefills.model, Donors(prefills.model, folder, prefills.profile)
    for tokens in case.before:
        donors.put(tokens, prefills(tokens))
    reference = predictions(model, case.after, cache_from_layers(prefills(case.prompt)))

    def reuse() -> tuple[Hit, Any]:
        hit = donors.get(case.prompt[:-1])
        return hit, recompute(model, hit.cache(), case.prompt, hit.recompute, hit.spans, hit.estimates)

    hit, (cache, deviation, _) = reuse()
    kl = divergences(reference, predictions(model, case.after, cache)).mean().item()
    found = Measured(kl, hit.kl, deviation.kl, len(hit.recompute))
    if timed:
        times = interleave({"full": lambda: done(prefill(model, case.prompt)), "ttft": lambda: done(reuse())}, rounds)
        found.ttft, found.full = times["ttft"], times["full"]
    return found


def rounding(prefills: Prefills, case: Case) -> Measured:
    """The same prompt computed in two parts."""
    model = prefills.model
    reference = predictions(model, case.after, cache_from_layers(prefills(case.prompt)))
    cache = prefill(model, case.prompt[:PART])
    with torch.inference_mode():
        model(case.prompt[None, PART:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return Measured(divergences(reference, predictions(model, case.after, cache)).mean().item())


class Prefills:
    """Caches of whole prompts, computed at once; the last few are kept, cases have them in common."""

    def __init__(self, model: Any, profile: Path) -> None:
        self.model, self.profile = model, profile
        self.kept: dict[bytes, KVLayers] = {}

    def __call__(self, ids: Tensor) -> KVLayers:
        key = ids.numpy().tobytes()
        if key not in self.kept:
            if len(self.kept) >= KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = tuple((layer.keys, layer.values) for layer in prefill(self.model, ids).layers)
        return self.kept[key]


@torch.inference_mode()
def prefill(model: Any, ids: Tensor) -> Any:
    return model(ids[None], use_cache=True, logits_to_keep=1).past_key_values


@torch.inference_mode()
def predictions(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities after each token, float32 [tokens, vocabulary]. cache: grows."""
    logits: Tensor = model(ids[None], past_key_values=cache, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def report(rows: Rows, found: dict[str, list[Measured]]) -> None:
    """Rows of each case, and of how often the bounds held."""
    for name, all_of in found.items():
        case = f"approximate/{name}"
        rows.add(case, "kl", float(np.mean([x.kl for x in all_of])), "nats")
        rows.add(case, "kl_worst", max(x.kl for x in all_of), "nats")
        if name == "rounding":
            continue
        timed = all_of[0]
        rows.add(case, "ttft_s", timed.ttft, "s", "recompute", timed.ttft / timed.full)
        rows.add(case, "speedup", timed.full / timed.ttft, "x", "recompute", timed.full / timed.ttft)
        rows.add(case, "recomputed", float(np.mean([x.recomputed for x in all_of])), "tokens")
        shares(rows, case, all_of)
    shares(rows, "approximate/all", [x for name in CASES for x in found[name]])


def shares(rows: Rows, case: str, measured: Sequence[Measured]) -> None:
    """The mean bounds, and the share of cases that keep them."""
    for name, bounds in (
        ("kl_bound", [x.estimate for x in measured]),
        ("kl_sharpened", [x.sharpened for x in measured]),
    ):
        kept = [x.kl <= bound for bound, x in zip(bounds, measured, strict=True)]
        rows.add(case, name, float(np.mean(bounds)), "nats")
        rows.add(case, f"{name}_kept", float(np.mean(kept)), "share of cases")


def done(_: object) -> None:
    """A call that is timed returns nothing, so that its time is the whole call's."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
