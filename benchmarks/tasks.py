"""Can the model still do what it could, on a cache coded with loss? `python -m benchmarks.tasks [--lengths N ...]`

Of each text the cache is computed once and coded by every method, all but the first 4 tokens and the last 128, which
all keep exactly; `bits_per_value` is of the coded ones. Then questions are asked behind it.
- `needle/N`: a sentence with a password somewhere in N tokens of held-out conversations; `needles/N`: four of them,
  each asked for; `pairs/N`: N tokens of names and words, twelve of them asked for.
  `choice`: how often the right word is likelier than three others, of the same text where it has so many; `exact`: how
  often it is the likeliest token of all; `logp`: the mean logarithm of its probability.
- `continuation/N`: the exact cache goes on greedily for 32 tokens after N tokens of held-out conversations.
  `agreement`: at how many of them a coded cache would have said the same; `identical`: how many come before the first
  other one, of 32.
`uncompressed` is what the model does on the exact cache: a task that it cannot do there says nothing. The ratio of a
row is to that. Methods, texts to fit to and `--profile` as in `benchmarks.quality`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import Pairs, prefill, test_text
from benchmarks.peers.quality.methods import CASES, Context, Method
from benchmarks.quality import SINKS, make, note, of_all_tokens
from benchmarks.workloads.recall import Case, Recall
from kvstore.integrations.transformers import layout_from_config

RECENT = 128
NEW = 32  # tokens of a continuation
TASKS = ("needle", "needles", "pairs", "continuation")
EXACT = "uncompressed"
DEFAULT = (  # about 0.4 bits a value, 1.1, and two and more
    "predictive/lossy@0.42", "kvtc/0.5bit", "predictive/lossy@1.1", "kvtc/1.5bit", "aqua/2bit", "higgs/2bit",
    "turboquant/2bit", "cachegen/1.0", "nvfp4",
)  # fmt: skip


@dataclass
class Score:
    """Of one method at one task: a number a question, or a text; coded: bytes, values."""

    values: dict[str, list[float]] = field(default_factory=dict)
    coded: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, **found: float) -> None:
        for metric, value in found.items():
            self.values.setdefault(metric, []).append(value)


class Asked:
    """A cache that questions are asked behind; each leaves it as it was."""

    def __init__(self, model: Any, pairs: Pairs) -> None:
        self._model, self._cache = model, DynamicCache()
        for layer, (k, v) in enumerate(pairs):
            self._cache.update(k[None], v[None], layer)

    def logits(self, tokens: Iterable[int]) -> torch.Tensor:
        """After each of `tokens`, float32 `[n, vocabulary]`."""
        ids = torch.tensor([list(tokens)])
        found = self._model(ids, past_key_values=self._cache, use_cache=True).logits[0].float()
        self._cache.crop(-ids.shape[1])
        return found

    def greedy(self, first: int, count: int) -> list[int]:
        """`count` tokens that follow the cache and `first`."""
        found = [first]
        for _ in range(count):
            ids = torch.tensor([found[-1:]])
            logits = self._model(ids, past_key_values=self._cache, use_cache=True).logits[0, -1]
            found.append(int(logits.argmax()))
        self._cache.crop(-count)
        return found[1:]


def main() -> None:
    parser = arguments("Recall and continuation on caches that were coded with loss.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(DEFAULT), help="methods to run")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="(all)")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a text (1024 2048 4096 8000)")
    parser.add_argument("--texts", type=int, help="texts of each task and length (4)")
    parser.add_argument("--calibration-windows", type=int, help="windows of 1,024 tokens to fit to (64)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    args = parser.parse_args()
    lengths = args.lengths or ([1024] if args.quick else [1024, 2048, 4096, 8000])
    texts = args.texts or (1 if args.quick else 4)
    rows = Rows("tasks", args.json)
    model, tokenizer = load_model(args.model)
    layout = of_all_tokens(layout_from_config(model.config, model.dtype))
    windows = args.calibration_windows or (8 if args.quick else 64)
    methods = make(rows, args.only, Context(model, tokenizer, layout, args.text, None, windows, args.profile))
    hay = tokenizer(test_text(args.text, None, texts * max(lengths) // 512), verbose=False).input_ids
    for length in lengths:
        for task in args.tasks:
            scores = {name: Score() for name in (EXACT, *methods)}
            for number, case in enumerate(cases(task, tokenizer, hay, length, texts)):
                run(model, case, methods, scores)
                note(f"{task}/{length}: text {number + 1} of {texts}")
            report(rows, f"{task}/{length}", scores)
    rows.main_exit()


def cases(task: str, tokenizer: Any, hay: list[int], length: int, texts: int) -> Iterable[Case]:
    """Texts of `length` tokens, with questions; without any where the text is to be continued."""
    if task != "continuation":
        return Recall(tokenizer, hay).cases(task, length, texts)
    starts = range(0, len(hay) - length, max(1, (len(hay) - length) // texts))
    return [Case(tuple(hay[at : at + length]), ()) for at in starts[:texts]]


@torch.inference_mode()
def run(model: Any, case: Case, methods: Mapping[str, Method], scores: Mapping[str, Score]) -> None:
    """Asks everything behind the exact cache of a text, and behind those that the methods make of it."""
    ids = torch.tensor(case.text)
    at = slice(SINKS, max(SINKS, len(ids) - 1 - RECENT))
    exact = prefill(model, ids[:-1])  # the last token is said again, so that its prediction is the coded cache's
    asked = Asked(model, exact)
    said = [] if case.questions else [case.text[-1], *asked.greedy(case.text[-1], NEW)]
    answer(asked, case, said, scores[EXACT])
    given = [(k[:, at], v[:, at]) for k, v in exact]
    for name, method in methods.items():
        found, size = method.code(ids[at], given, SINKS)
        scores[name].coded[0] += size
        scores[name].coded[1] += sum(x.numel() for pair in given for x in pair)
        answer(Asked(model, replaced(exact, found, at)), case, said, scores[name])


def replaced(exact: Pairs, found: Pairs, at: slice) -> Pairs:
    """The exact cache with other tokens from `at.start` to `at.stop`."""
    return [
        (torch.cat([k[:, : at.start], fk, k[:, at.stop :]], 1), torch.cat([v[:, : at.start], fv, v[:, at.stop :]], 1))
        for (k, v), (fk, fv) in zip(exact, found, strict=True)
    ]


def answer(asked: Asked, case: Case, said: list[int], score: Score) -> None:
    """Adds what one cache answers. said: the last token of the text, and how the exact cache goes on."""
    for question in case.questions:
        logp = asked.logits((case.text[-1], *question.prompt))[-1].log_softmax(-1)
        right, *wrong = logp[list(question.answers)].tolist()
        score.add(choice=right > max(wrong), exact=int(logp.argmax()) == question.answers[0], logp=right)
    if said:
        same = (asked.logits(said[:-1]).argmax(-1) == torch.tensor(said[1:])).tolist()
        score.add(agreement=float(np.mean(same)), identical=[*same, False].index(False))


UNITS = {"choice": "share", "exact": "share", "logp": "nats", "agreement": "share", "identical": "tokens"}


def report(rows: Rows, case: str, scores: Mapping[str, Score]) -> None:
    """All rows of one task at one length."""
    for name, score in scores.items():
        if score.coded[1]:
            rows.add(f"{case}/{name}", "bits_per_value", 8 * score.coded[0] / score.coded[1], "bits")
        for metric, values in score.values.items():
            value, exact = float(np.mean(values)), float(np.mean(scores[EXACT].values[metric]))
            ratio = value / exact if name != EXACT and exact and metric != "logp" else None
            rows.add(f"{case}/{name}", metric, value, UNITS[metric], EXACT if ratio is not None else None, ratio)
        rows.add(f"{case}/{name}", "answers", len(next(iter(score.values.values()))), "count")


if __name__ == "__main__":
    main()
