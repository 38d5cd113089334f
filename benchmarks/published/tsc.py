"""Temporal state compression (TSC): a keyframe every kappa tokens, differences from it in 4 bits.

Published by Solstice EIM in four technical reports, March and April 2026. Report I: 7.98x "lossless" and 63x lossy, of
GPT-2 at 1,024 tokens with kappa 64, against 32-bit floats; top-1 1.0000, KL below 0.0001. Report IV audits that:
against 16-bit floats, with all overheads, 5.7x at acceptable quality, and by other means than TSC. The codec here is
`codecs/tsc`; its page says what the reports leave open.

`counted/*`: the ratio that the scheme has by arithmetic alone, one thing after the other counted: values of 4 bits with
their scales, keyframes, the corrections of residuals, and 16 bits in place of 32 in what it is compared with. The
published 63x is near two of these rows: keyframes alone, nothing of the tokens between (report II says that keyframes
are 95 % of what is stored); and a sequence that was put again whenever it had grown by kappa tokens, each time counted
in whole.

`smollm2/*`, `gpt2-shaped/*`: of caches, all bytes of the payload (keyframes, steps, scales, corrections, headers): the
ratio, and the model's loss when 512 tokens are decoded and the next 512 scored (protocol A of `benchmarks.quality`),
other methods beside it. gpt2-shaped is GPT-2's shape with random weights in float32: its sizes and errors mean
something, its KL and top-1 little, for it has learned nothing. `*/errors/*`: the largest and the root mean square error
of the first tokens of one sequence, by how many they are. `*/grown/*`: a sequence put every 64 tokens up to 1,024, what
was coded before left as it is (`append`), or all coded again (`again`); raw is counted once or at every put.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.peers.quality.data import Pairs, prefill
from benchmarks.peers.quality.methods import BLOCK, TSC, Method, StoreMethod
from benchmarks.published.paper import Paper
from benchmarks.quality import Score, bits, of_all_tokens, prefix
from kvstore import KVLayout
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.tsc.codec import TscCodec
from kvstore.integrations.transformers import layout_from_config

KAPPAS = (8, 16, 32, 64, 128)
KAPPA, TOKENS, PAGE = 64, 1024, 256
LOSSLESS, LOSSY = 7.98, 63.0  # published, of 32-bit floats
TOP1, KL = 1.0, 1e-4
SCALE_BITS, TOP, CORRECTION_BITS = 32, 8, 8 + 16  # of a page; a correction is a place and a value
LENGTHS = (128, 256, 512, 1024)
WINDOWS = 2


def run(paper: Paper) -> None:
    """All rows of the paper."""
    counted(paper)
    model, _ = paper.model
    windows = paper.test_windows(WINDOWS)
    layout = of_all_tokens(layout_from_config(model.config, model.dtype))
    measured(paper, "smollm2", model, layout, windows)
    gpt2 = gpt2_shaped()
    measured(paper, "gpt2-shaped", gpt2, KVLayout.uniform(12, 12, 64, "float32"), windows[:1])


def counted(paper: Paper) -> None:
    """Ratios by arithmetic; see above."""
    plain = 4 + SCALE_BITS / PAGE
    paper.row("counted/4bit/of-32bit", "ratio", 32 / plain, "x", LOSSLESS)
    paper.row("counted/keyframes-alone/of-32bit", "ratio", KAPPA, "x", LOSSY)
    paper.row("counted/put-again-every-kappa/of-32bit", "ratio", 32 / plain * growth(TOKENS, KAPPA), "x", LOSSY)
    for kappa in KAPPAS:
        for raw, keyframe in ((32, 32), (16, 16)):
            stored = all_in(kappa, keyframe, 0)
            paper.row(f"counted/kappa{kappa}/of-{raw}bit", "ratio", raw / stored, "x")
        paper.row(f"counted/kappa{kappa}/top{TOP}/of-16bit", "ratio", 16 / all_in(kappa, 16, TOP), "x")


def all_in(kappa: int, keyframe_bits: int, top: int) -> float:
    """Bits a value: keyframes whole, all others in 4 bits with scales and corrections."""
    others = 4 + (SCALE_BITS + top * CORRECTION_BITS) / PAGE
    return (keyframe_bits + (kappa - 1) * others) / kappa


def growth(tokens: int, step: int) -> float:
    """How many times the values are counted that are put again and again, of all snapshots after `step` tokens more."""
    return sum(range(step, tokens + 1, step)) / tokens


# -- caches ------------------------------------------------------------------------------------------------------------


def gpt2_shaped() -> Any:
    """GPT-2's 124 M parameters, drawn at random, float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval()


def measured(paper: Paper, name: str, model: Any, layout: KVLayout, windows: torch.Tensor) -> None:
    """All rows of one model."""
    methods: dict[str, Method] = {f"kappa{k}/top{t}": StoreMethod(TscCodec(k, t), layout) for k, t in TSC}
    if layout.dtype == "bfloat16":
        methods |= {f"{x}/4bit": StoreMethod(AquaCodec(None, 4, x), layout) for x in ("higgs", "rtn")}
    scores = {method: Score() for method in methods}
    for ids in windows:
        prefix(model, ids, methods, scores)
    quality(paper, name, layout, scores)
    pairs = prefill(model, windows[0])
    errors(paper, name, layout, pairs)
    grown(paper, name, layout, pairs)


def quality(paper: Paper, name: str, layout: KVLayout, scores: Mapping[str, Score]) -> None:
    """Rate and loss of each method. Published figures stand beside those of the published kappa."""
    for method, score in scores.items():
        case, is_published = f"{name}/{method}", method.startswith(f"kappa{KAPPA}/")
        rate = bits(score.coded)
        paper.row(case, "bits_per_value", rate, "bits")
        paper.row(case, "ratio_of_16bit", 16 / rate, "x", LOSSY if is_published else None)
        paper.row(case, "ratio_of_32bit", 32 / rate, "x", LOSSY if is_published else None)
        paper.row(case, "kl", float(np.mean(score.kl)), "nats", KL if is_published else None)
        paper.row(case, "nll_delta", float(np.mean(score.nll)), "nats")
        paper.row(case, "top1", float(np.mean(score.top)), "share", TOP1 if is_published else None)
    paper.row(f"{name}/quality", "cache_bits", 8 * layout.item_bytes, "bits")


def errors(paper: Paper, name: str, layout: KVLayout, pairs: Pairs) -> None:
    """Errors of one sequence by its length, of whole sequences, not of blocks: keyframes alone end them."""
    for length in LENGTHS:
        given = [(k[:, :length], v[:, :length]) for k, v in pairs]
        decoded, _ = StoreMethod(TscCodec(KAPPA, TOP), layout, length).code(torch.arange(length), given, 0)
        apart = [
            (a.float() - b.float()) for x, y in zip(decoded, given, strict=True) for a, b in zip(x, y, strict=True)
        ]
        case = f"{name}/errors/{length}"
        paper.row(case, "largest_error", max(float(x.abs().max()) for x in apart), "value")
        squares = sum(float(x.double().square().sum()) for x in apart)
        paper.row(case, "rms_error", (squares / sum(x.numel() for x in apart)) ** 0.5, "value")
        late = torch.cat([x[:, length - 64 :].reshape(-1) for x in apart])
        paper.row(case, "rms_error_of_last_64", float(late.double().square().mean().sqrt()), "value")


def grown(paper: Paper, name: str, layout: KVLayout, pairs: Pairs) -> None:
    """A sequence that is put after every 64 tokens."""
    method, sizes = StoreMethod(TscCodec(KAPPA, TOP), layout), []
    for begin in range(0, TOKENS, BLOCK):
        given = [(k[:, begin : begin + BLOCK], v[:, begin : begin + BLOCK]) for k, v in pairs]
        sizes.append(method.code(torch.arange(BLOCK), given, begin)[1])
    raw = TOKENS * layout.bytes_per_token * 32 // (8 * layout.item_bytes)  # in 32-bit floats, as the reports count
    stored = {"append": sum(sizes), "again": int(np.cumsum(sizes).sum())}
    for way, nbytes in stored.items():
        paper.row(f"{name}/grown/{way}", "bytes_written", nbytes, "bytes")
        paper.row(f"{name}/grown/{way}", "ratio_of_32bit_once", raw / nbytes, "x")
        paper.row(f"{name}/grown/{way}", "ratio_of_32bit_every_put", raw * growth(TOKENS, BLOCK) / nbytes, "x", LOSSY)
