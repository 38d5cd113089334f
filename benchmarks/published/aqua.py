"""AQUA-KV (arXiv 2501.19392): its backbones and its ablations.

Published, of Llama-3.2-3B on WikiText-2 in windows of 8,192 tokens, perplexity: uncompressed 6.98; AQUA-KV with HIGGS
7.03, 6.98, 6.98 at 2.09, 3.06, 4.02 bits; HIGGS alone 7.47, 7.05, 7.01; at 2 bits without predicted keys 7.50, without
predicted values 7.06, without sinks 7.15, with keys predicted after their rotation 7.05, with predictors of reduced
rank 7.22. Here they are ratios to the uncompressed perplexity: the model (SmolLM2-135M), the text (conversations) and
the windows (1,024 tokens) differ. Rows without a peer have no published figure at hand.

Of a test window the first 512 tokens are coded and the next 512 are scored on what was decoded: `perplexity_ratio` to
the exact cache, and `kl`. `recent-128`: the last 128 of the coded tokens are exact, as the paper's buffer keeps them.
Everything is fitted to the same windows of calibration text (8 of 1,024 tokens), in closed loop.

`h2o/...`: every head keeps half of the tokens of each layer, as H2O does: the last ones, and of the others those that
got most attention. Tokens are dropped after coding, for a prediction needs the token in the layer before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.peers.quality.data import MemoryDump, Pairs, calibration_text, cut, prefill
from benchmarks.published.aqua_forms import EXACT_BITS, Fitted, Form, heavy
from benchmarks.published.paper import Paper
from kvstore.calibration.lossy.quality import divergences
from kvstore.integrations.transformers import layout_from_config

PREFIX, RECENT, SHARE = 512, 128, 0.5
FIT_WINDOWS, TEST_WINDOWS = 8, 4
EXACT = 6.98  # published perplexity of the uncompressed cache
# By name: the form, and its published perplexity where there is one.
FORMS: dict[str, tuple[Form, float | None]] = {
    **{f"higgs/{bits}bit": (Form(bits=bits), ppl) for bits, ppl in ((2, 7.03), (3, 6.98), (4, 6.98))},
    **{f"quanto/{bits}bit": (Form("quanto", bits), None) for bits in (2, 3, 4)},
    **{f"higgs-alone/{bits}bit": (Form(bits=bits, kind="none"), x) for bits, x in ((2, 7.47), (3, 7.05), (4, 7.01))},
    **{f"quanto-alone/{bits}bit": (Form("quanto", bits, kind="none"), None) for bits in (2, 3, 4)},
    **{f"higgs/2bit/first-{bits}": (Form(first=bits), None) for bits in (2, 3, EXACT_BITS)},
    "higgs/2bit/no-sinks": (Form(sinks=0), 7.15),
    "higgs/2bit/no-keys": (Form(keys=False), 7.50),
    "higgs/2bit/no-values": (Form(values=False), 7.06),
    "higgs/2bit/after-rotation": (Form(rotated=True), 7.05),
    "higgs/2bit/reduced-rank": (Form(kind="rank"), 7.22),
    "higgs/2bit/mlp": (Form(kind="mlp"), None),
}
WITH_RECENT = ("higgs/2bit", "quanto/2bit")
WITH_H2O = ("higgs/2bit", "higgs/3bit", "higgs-alone/2bit")
TOKENS = "h2o/exact"


def run(paper: Paper) -> None:
    """All rows of the paper; `--parts` names some of the forms, or "h2o/exact"."""
    model, tokenizer = paper.model
    wanted = paper.args.parts or [*FORMS, TOKENS]
    count = 2 if paper.args.quick else FIT_WINDOWS
    text = calibration_text(paper.args.text, None, count)
    dump = MemoryDump(model, layout_from_config(model.config, model.dtype), cut(tokenizer, text, count))
    tests = Tests(paper, model, paper.test_windows(TEST_WINDOWS))
    if TOKENS in wanted:
        tests.rows(TOKENS, list, EXACT_BITS * SHARE, dropped=True)
    for name in [x for x in FORMS if x in wanted]:
        form, published = FORMS[name]
        fitted = Fitted(form, dump)
        bits = fitted.bits(PREFIX)
        tests.rows(name, fitted.code, bits, published)
        if name in WITH_RECENT:
            part = bits + (EXACT_BITS - bits) * RECENT / PREFIX
            tests.rows(f"{name}/recent-{RECENT}", lambda pairs, fitted=fitted: with_recent(fitted, pairs), part)
        if name in WITH_H2O:
            tests.rows(f"h2o/{name}", fitted.code, bits * SHARE, dropped=True)


def with_recent(fitted: Fitted, pairs: Pairs) -> Pairs:
    """The last tokens exact."""
    old = fitted.code([(k[:, :-RECENT], v[:, :-RECENT]) for k, v in pairs])
    return [
        (torch.cat([a, k[:, -RECENT:]], dim=1), torch.cat([b, v[:, -RECENT:]], dim=1))
        for (a, b), (k, v) in zip(old, pairs, strict=True)
    ]


class Tests:
    """Test windows with their caches, and what the model makes of the exact ones."""

    def __init__(self, paper: Paper, model: Any, windows: torch.Tensor) -> None:
        self._paper, self._model, self._windows = paper, model, windows
        self._caches = [prefill(model, ids[:PREFIX]) for ids in windows]
        self._exact = [self._scored(ids, pairs) for ids, pairs in zip(windows, self._caches, strict=True)]
        self._kept: list[list[torch.Tensor]] = []
        losses = [-self._right(ids, found) for ids, found in zip(windows, self._exact, strict=True)]
        paper.row("uncompressed", "perplexity", math.exp(sum(losses) / len(losses)), "tokens")

    def rows(
        self,
        name: str,
        code: Callable[[Pairs], Pairs],
        bits: float,
        published: float | None = None,
        dropped: bool = False,
    ) -> None:
        """Rows of a method. bits: a value, of all tokens. published: perplexity. dropped: of every layer only the heavy
        tokens are left, after coding."""
        kl, loss = [], []
        for number, (ids, pairs, exact) in enumerate(zip(self._windows, self._caches, self._exact, strict=True)):
            decoded = code(pairs)
            if dropped:
                decoded = [taken(pair, keep) for pair, keep in zip(decoded, self._heavy(number), strict=True)]
            found = self._scored(ids, decoded)
            kl.append(divergences(exact, found).mean().item())
            loss.append(self._right(ids, exact) - self._right(ids, found))
        self._paper.row(name, "bits_per_value", bits, "bits")
        theirs = None if published is None else published / EXACT
        self._paper.row(name, "perplexity_ratio", math.exp(sum(loss) / len(loss)), "x", theirs)
        self._paper.row(name, "kl", sum(kl) / len(kl), "nats")

    @torch.inference_mode()
    def _scored(self, ids: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """Log-probabilities after each token that follows the prefix."""
        cache = DynamicCache()
        for layer, (k, v) in enumerate(pairs):
            cache.update(k[None], v[None], layer)
        positions = torch.arange(PREFIX, len(ids))[None]
        logits: torch.Tensor = self._model(ids[None, PREFIX:], past_key_values=cache, position_ids=positions).logits[0]
        return logits.float().log_softmax(-1)

    def _right(self, ids: torch.Tensor, found: torch.Tensor) -> float:
        """Mean log-probability of the tokens that came."""
        return found[:-1].gather(1, ids[PREFIX + 1 :, None]).mean().item()

    @torch.inference_mode()
    def _heavy(self, number: int) -> list[torch.Tensor]:
        """Of each layer the tokens that are kept of a window, `[heads, kept]`."""
        if not self._kept:
            self._model.set_attn_implementation("eager")
            for ids, pairs in zip(self._windows, self._caches, strict=True):
                found = self._model(ids[None, :PREFIX], output_attentions=True).attentions
                of_layers = zip(found, pairs, strict=True)
                got = [x[0].float().sum(1).unflatten(0, (len(k), -1)).sum(1) for x, (k, _) in of_layers]
                self._kept.append([heavy(x, SHARE) for x in got])
            self._model.set_attn_implementation("sdpa")
        return self._kept[number]


def taken(pair: tuple[torch.Tensor, torch.Tensor], keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and V `[heads, tokens, dim]` the tokens `keep`, `[heads, kept]`."""
    k, v = (x.gather(1, keep[..., None].expand(-1, -1, x.shape[2])) for x in pair)
    return k, v
