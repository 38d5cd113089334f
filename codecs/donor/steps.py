"""The donor codec's step mode: rows as those of their donors and numbers of steps. Lossy.

Codes the rows that spans cover, as the exact core does: donor_steps_reference.py says how, the codec around it what is
done with the other rows. Nothing need be fitted: the tables are part of the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

import kvstore.codecs.donor._donor_steps as _donor_steps
from kvstore.codecs.donor.reference import GROUP
from kvstore.codecs.donor.spans import SpanTable
from kvstore.codecs.donor.steps_reference import HEADER, header, quarters_of
from kvstore.codecs.donor.steps_tables import BOUNDS, EXPECTED, costs, frequencies, limits
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError

DEFAULT_STEP = 0.5
"""Of how large the donor's values are; see `encode`."""
DONOR_ALONE = math.inf
"""As a step: every value is the donor's, but for what is not finite."""


@lru_cache(maxsize=1)
def _coder() -> _donor_steps.Coder:
    return _donor_steps.Coder(freqs=frequencies(), costs=costs(), limits=limits(), expected=EXPECTED, bounds=BOUNDS)


def bound(layout: KVLayout, count: int) -> int:
    """The most bytes of the layers of `count` covered rows."""
    widths = [(x.heads, dim) for x in layout.layers for dim in (x.key_dim, x.value_dim)]
    groups = sum(heads * -(-dim // GROUP) for heads, dim in widths)
    values = count * sum(heads * dim for heads, dim in widths)
    # A value takes a symbol, two bytes at most, and may be an escape of two; a group takes a class.
    return HEADER.size + 5 * len(layout.layers) + 128 + 4 * values + 2 * groups


def encode(
    block: KVView,
    table: SpanTable,
    donors: Sequence[KVView],
    step: float,
    out: memoryview,
    *,
    level: str | None = None,
) -> tuple[int, ...] | None:
    """Writes the layers of the covered rows of `block` into the beginning of `out`, which it mutates.

    donors: of each span its rows. block, donors: bf16 on the CPU, any strides. step: how far apart the values are that
    can be told from each other, relative to how large the donor's are in a group of channels: 2**-50 to 2**50, rounded
    to a quarter octave, or DONOR_ALONE. A value is off by up to 13/16 of its step; what is not finite, or too far from
    the donor's, is kept as it is.

    Returns the bytes of each layer, None where `out` is too short. The same input gives the same bytes on every
    machine. Thread-safe; releases the GIL. Raises `ValueError` for spans that do not fit.
    """
    quarters = quarters_of(step)
    spans, rows = _checked(block, table, donors)
    return _donor_steps.encode(
        _coder(), _shapes(block.layout), block.tokens, block.rows, spans, rows, table.angles, quarters, out, level
    )


def decode(
    table: SpanTable,
    payload: memoryview,
    layer_sizes: Sequence[int],
    donors: Sequence[KVView],
    out: KVView,
    *,
    level: str | None = None,
) -> None:
    """The inverse: writes the covered rows below `out.tokens` into `out`, on the CPU, any strides.

    donors: of each span its rows, as decoded by whoever encoded; of other donors other values are made, or, where
    these have other sizes, a CodecError. Raises `CodecError` for a payload that `encode` did not write. Thread-safe;
    releases the GIL.
    """
    spans, rows = _checked(out, table, donors)
    if len(layer_sizes) != len(out.layout.layers):
        raise CodecError(f"donor: expected {len(out.layout.layers)} layers, found {len(layer_sizes)}")
    count = table.spans[-1].end
    wrong = _donor_steps.decode(
        _coder(),
        _shapes(out.layout),
        count,
        out.rows,
        spans,
        rows,
        table.angles,
        payload,
        list(layer_sizes),
        out.tokens,
        level,
    )
    if wrong is not None:
        raise CodecError(wrong)


def errors(payload: memoryview) -> tuple[float, float]:
    """The largest error of a covered value, absolute, and the mean of their squares, as the encoder measured them.
    payload: the layers that `encode` wrote, of which the first 12 bytes are read. Raises `CodecError`."""
    return header(payload[: HEADER.size])[2:]


def _checked(
    block: KVView, table: SpanTable, donors: Sequence[KVView]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    if block.layout.dtype != "bfloat16":
        raise ValueError(f"donor: codes bfloat16, not {block.layout.dtype}")
    if len(donors) != len(table.spans):
        raise ValueError(f"donor: expected rows of {len(table.spans)} donors, one for each span, found {len(donors)}")
    for span, view in zip(table.spans, donors, strict=True):
        if view.layout != block.layout or view.tokens != span.count:
            raise ValueError("donor: a donor must have as many rows as its span, and the block's layout")
    runs = [(span.start, span.count, which) for span, which in zip(table.spans, table.which, strict=True)]
    return np.array(runs, np.int64).reshape(-1, 3), [np.ascontiguousarray(view.rows) for view in donors]


@lru_cache(maxsize=64)
def _shapes(layout: KVLayout) -> npt.NDArray[np.int64]:
    return np.array([(x.heads, x.key_dim, x.value_dim) for x in layout.layers], np.int64)
