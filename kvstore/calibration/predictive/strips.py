"""Work on the rows of a sample in steps of a millisecond or two, between which whoever waits for the processor is let
go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvstore.codecs.predictive.reference import Coded

Tensor = torch.Tensor
_VALUES = 1 << 14  # of a step; torch takes one thread for so few


def in_strips(made: Callable[[slice], Tensor], like: Tensor, pause: Callable[[], None]) -> Tensor:
    """Return what `made` gives of as many rows as `like`, `[n, C]`, has, a few at a time; `pause` is called before each
    step."""
    found = []
    for strip in _strips(like):
        pause()
        found.append(made(strip))
    return torch.cat(found)


def coded_in_strips(
    residuals: Callable[[Tensor, Tensor, Tensor], Coded],
    bits: Tensor,
    mu: Tensor,
    offset: Tensor,
    pause: Callable[[], None],
) -> Coded:
    """Return what `residuals(bits, mu, offset)` does, which works on each row by itself: of a few rows at a time.

    Args:
        bits, mu: int64 `[n, C]`.
        offset: int64 `[n]`.
        pause: called before every step.
    """
    found = []
    for strip in _strips(bits):
        pause()
        found.append(residuals(bits[strip], mu[strip], offset[strip]))
    return Coded(
        torch.cat([strip.symbols for strip in found]),
        torch.cat([strip.classes for strip in found]),
        torch.cat([strip.fits for strip in found]),
    )


def _strips(like: Tensor) -> Iterator[slice]:
    rows = max(1, _VALUES // max(1, like.shape[1]))
    for begin in range(0, len(like), rows):
        yield slice(begin, min(begin + rows, len(like)))
