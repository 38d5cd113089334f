"""Reuse beyond the prefix: the first token from a cache assembled of donors, against computing the prompt.

`python -m benchmarks.approximate [--documents 8] [--fit]`. Prompts of 2,048 tokens of real conversations:

- near-synonym, other-instruction: the document was computed behind another system prompt;
- retrieval: passages of 512 tokens, computed before in other order and company;
- rounding: nothing is reused, the same prompt is computed in two parts. What rounding in another order does to a
  bfloat16 model is the floor under all the others.

Reuse: the store is opened and `get` assembles the cache from its disk; then one pass of the model over the positions to
recompute and the last token. KL: of the predictions for the next 256 tokens, nats a token, against those on the cache
of the whole prompt computed at once. The estimate is the one that `get` gives; the sharpened one knows what that pass
found at the seams. `--fit` prints the constants of `kvstore/approximate/plan.py` from other documents.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments, interleave, scratch
from benchmarks.conversations import calibration_text, held_out_text, load_model
from kvstore import Approximate, Hit, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.approximate.plan import FLOOR
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
CODEC = "entropy"  # of the disk tier; needs no profile
SYSTEM = {
    "": "You are a helpful assistant.",
    "near-synonym": "You are an AI assistant.",
    "other-instruction": (
        "You are an AI assistant that answers questions about the following document concisely and politely."
    ),
}
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

    def __init__(self, model: Any, folder: Path) -> None:
        self._folder = folder / "store"
        self._identity = ModelIdentity.from_transformers(model)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self) -> KVStore:
        return KVStore(self._folder, self._identity, StoreConfig(host=TierConfig(0), disk=TierConfig(GIB, CODEC)))

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
    parser.add_argument("--fit", action="store_true", help="print the estimator's constants, from other documents")
    args = parser.parse_args()
    documents = args.documents or (1 if args.quick else 8)
    model, tokenizer = load_model(args.model)
    take = calibration_text if args.fit else held_out_text
    text = args.text.read_text() if args.text else take(20 * (PROMPT + AFTER) * documents)
    prefills = Prefills(model)
    if args.fit:
        with scratch("approximate") as folder:
            fit(prefills, folder, list(cases(tokenizer, text, documents)))
        return
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


def cases(tokenizer: Any, text: str, documents: int) -> Iterator[Case]:
    """As many of each case, of different text."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    heads = {
        name: tokenizer(f"<|im_start|>system\n{x}<|im_end|>\n<|im_start|>user\n", return_tensors="pt").input_ids[0]
        for name, x in SYSTEM.items()
    }
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
    """kl, estimate, sharpened: nats a token. recomputed: positions, without the prompt's last. ttft, full: seconds."""

    kl: float
    estimate: float = FLOOR
    sharpened: float = FLOOR
    recomputed: int = 0
    ttft: float = 0.0
    full: float = 0.0


def measure(prefills: Prefills, folder: Path, case: Case, timed: bool, rounds: int) -> Measured:
    """Quality, and the times if `timed`, of one prompt."""
    model, donors = prefills.model, Donors(prefills.model, folder)
    for tokens in case.before:
        donors.put(tokens, prefills(tokens))
    reference = predictions(model, case.after, cache_from_layers(prefills(case.prompt)))

    def reuse() -> tuple[Hit, Any]:
        hit = donors.get(case.prompt[:-1])
        return hit, recompute(model, hit.cache(), case.prompt, hit.recompute, hit.spans)

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

    def __init__(self, model: Any) -> None:
        self.model = model
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
    """Rows of each case, and of how often the estimates were right."""
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
    """The mean estimates, and the share of cases in which they are within a factor of two."""
    for name, estimates in (
        ("kl_estimate", [x.estimate for x in measured]),
        ("kl_sharpened", [x.sharpened for x in measured]),
    ):
        good = [0.5 <= estimate / x.kl <= 2 for estimate, x in zip(estimates, measured, strict=True)]
        rows.add(case, name, float(np.mean(estimates)), "nats")
        rows.add(case, f"{name}_within_2x", float(np.mean(good)), "share of cases")


# -- the estimator -----------------------------------------------------------------------------------------------------


Seen = tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]  # tokens changed before a seam; distances; errors there
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ROUNDING = 1e-3  # errors below are mostly rounding


def fit(prefills: Prefills, folder: Path, found: Sequence[Case]) -> None:
    """Prints the constants: of the errors first, then of the KL that they explain."""
    seen: list[Seen] = []
    losses: list[tuple[Hit, float]] = []
    floors: list[float] = []
    for case in found:
        donors = Donors(prefills.model, folder)
        for tokens in case.before:
            donors.put(tokens, prefills(tokens))
        hit = donors.get(case.prompt[:-1])
        exact = prefills(case.prompt)
        pairs = zip(hit.layers, exact, strict=True)
        errors = np.mean([relative(v, x[:, :, : hit.tokens]) for (_, v), (_, x) in pairs], axis=0)
        seen += [(x.changed, x.run + np.arange(x.count), errors[x.start : x.end]) for x in hit.spans]
        reference = predictions(prefills.model, case.after, cache_from_layers(exact))
        cache = recompute(prefills.model, hit.cache(), case.prompt, hit.recompute).cache
        kl = divergences(reference, predictions(prefills.model, case.after, cache)).mean().item()
        losses.append((replace(hit, layers=(), _room=[]), kl))
        if case.name == CASES[0]:
            floors.append(rounding(prefills, case).kl)
        note(f"{case.name}: KL {kl:.5f}, {len(hit.recompute)} recomputed, mean error {np.nanmean(errors):.4f}")
    print("SEAM_ERROR, REACH, FALL =", constants := fit_errors(seen))
    print("FLOOR, SLOPE =", fit_kl([(left(x, constants), kl) for x, kl in losses]))
    print("rounding alone:", float(np.mean(floors)))


def relative(found: Tensor, want: Tensor) -> np.ndarray[Any, Any]:
    """|change|^2 / |value|^2 of each position, [tokens] of [1, heads, tokens, dim]."""
    change, value = ((x.float().square().sum((0, 1, 3))) for x in (found - want.float(), want))
    return (change / value.clamp_min(1e-30)).double().numpy()


def curve(distance: Any, changed: Any, constants: Sequence[float]) -> Any:
    """The errors of `kvstore.approximate.plan` with other constants."""
    level, most, fall = constants
    reach = most * changed / (most + changed)
    return level * (reach / (reach + distance)) ** fall


def left(found: Hit, constants: Sequence[float]) -> float:
    """The errors left in a plan's cache, mean over its tokens."""
    errors = np.zeros(found.tokens)
    for x in found.spans:
        errors[x.start : x.end] = curve(x.run + np.arange(x.count), x.changed, constants)
    errors[list(found.recompute)] = 0
    return float(errors.mean())


def fit_errors(seen: Sequence[Seen]) -> tuple[float, float, float]:
    """SEAM_ERROR, REACH and FALL, of least squares of the logarithms of mean errors: by changed tokens, in bins of the
    distance. A grid is fine enough: one case differs from another by far more."""
    bins = []
    for changed in sorted({x[0] for x in seen}):
        group = [x for x in seen if x[0] == changed]
        for begin, end in pairwise(EDGES):
            part = np.concatenate([e[(d >= begin) & (d < end)] for _, d, e in group])
            where = np.concatenate([d[(d >= begin) & (d < end)] for _, d, _ in group])
            if len(part) and part.mean() > ROUNDING:
                bins.append((where.mean(), changed, part.mean(), len(group)))
    distance, changed_, error, weight = np.array(bins).T

    def loss(constants: tuple[float, float, float]) -> float:
        return float((weight * np.log(curve(distance, changed_, constants) / error) ** 2).sum())

    levels, reaches, falls = np.arange(0.2, 1.05, 0.05), np.geomspace(8, 512, 37), np.arange(0.6, 2.6, 0.1)
    level, reach, fall = min(product(levels, reaches, falls), key=loss)
    return round(float(level), 3), round(float(reach), 1), round(float(fall), 2)


def fit_kl(losses: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """FLOOR and SLOPE, of least squares of the logarithms of the KL. losses: (error left, KL)."""
    error, kl = np.array(losses).T

    def loss(constants: tuple[float, float]) -> float:
        return float((np.log((constants[0] + constants[1] * error) / kl) ** 2).sum())

    floor, slope = min(product(np.geomspace(1e-4, 1e-2, 81), np.geomspace(0.02, 2, 81)), key=loss)
    return round(float(floor), 5), round(float(slope), 3)


def done(_: object) -> None:
    """A call that is timed returns nothing, so that its time is the whole call's."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
