"""Temporal state compression (TSC): a keyframe every kappa tokens, differences from it in 4 bits.

Published by Solstice EIM in four technical reports, March and April 2026. Report I: 7.98x "lossless" and 63x lossy, of
GPT-2 at 1,024 tokens with kappa 64, against 32-bit floats. Report IV audits that: against 16-bit floats, with all
overheads, 5.7x at acceptable quality, and by other means than TSC.

`counted/*`: the ratio that the scheme has by arithmetic alone, one thing after the other counted: values of 4 bits with
their scales, keyframes, the corrections of residuals, 16 bits in place of 32 in what it is compared with, and a
sequence that was put again whenever it had grown by kappa tokens, which is what the published 63x comes to.
"""

from __future__ import annotations

from benchmarks.published.paper import Paper

KAPPAS = (8, 16, 32, 64, 128)
KAPPA, TOKENS, PAGE = 64, 1024, 256
LOSSLESS, LOSSY = 7.98, 63.0  # published, of 32-bit floats
SCALE_BITS, TOP, CORRECTION_BITS = 32, 8, 8 + 16  # of a page; a correction is a place and a value


def run(paper: Paper) -> None:
    """All rows of the paper."""
    counted(paper)


def counted(paper: Paper) -> None:
    """Ratios by arithmetic; see above."""
    bits = 4 + SCALE_BITS / PAGE
    paper.row("counted/4bit/of-32bit", "ratio", 32 / bits, "x", LOSSLESS)
    paper.row("counted/keyframes-alone/of-32bit", "ratio", KAPPA, "x", LOSSY)
    paper.row("counted/put-again-every-kappa/of-32bit", "ratio", 32 / bits * growth(TOKENS, KAPPA), "x", LOSSY)
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
