"""What the histograms of reading are told apart by: the tier that blocks came from, and their codec."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from kvstore.codecs.registry import codec_label
from kvstore.gate.load import TENSORS
from kvstore.tiers.base import Source
from kvstore.timing import NOWHERE, Where

_NEAREST = ("device", "queue", "host", "disk", "remote")  # whatever has another name is farther


def place_of(sources: Iterable[Source]) -> Where:
    """Return the farthest tier of some sources, and the codec of all of them, "mixed" if they have several."""
    return _together(frozenset([(source.tier, source.codec_id) for source in sources]))


@cache
def place_in(tier: str, codec: int | None) -> Where:
    """As `place_of`, of one source."""
    return _together(frozenset([(tier, codec)]))


def codec_of(number: int | None) -> str:
    """Return the name of a codec by its number; `TENSORS` where there is none to decode with."""
    return TENSORS if number is None else codec_label(number)


@cache  # a handful of tiers and codecs
def _together(found: frozenset[tuple[str, int | None]]) -> Where:
    if not found:
        return NOWHERE
    tier = max((tier for tier, _ in found), key=lambda name: _NEAREST.index(name) if name in _NEAREST else 99)
    codecs = {codec_of(number) for _, number in found}
    return Where(tier, codecs.pop() if len(codecs) == 1 else "mixed")
