"""The donor codec's step mode: rows as those of their donors and numbers of steps. Lossy.

Codes the rows that spans cover, as the exact core does: steps_reference.py says how, the codec around it what is
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
    """Write the layers of the rows in spans into the beginning of `out`. Thread-safe; releases the GIL.

    The same input gives the same bytes on every machine. A value is off by up to 13/16 of its step. Values that are not
    finite, or too far from the donor's, are kept as they are.

    Args:
        block: bf16 on the CPU, any strides.
        table: its spans.
        donors: the rows of each span, bf16 on the CPU, any strides.
        step: distance between the values that can be told apart, relative to how large the donor's values are in a
            group of channels: 2**-50 to 2**50, rounded to a quarter octave, or DONOR_ALONE.
        out: writable memory, which is mutated; `bound` bytes are enough.
        level: "scalar", "avx2", "avx512", "amx" or "neon"; default is the best that the machine has.

    Returns:
        The bytes of each layer. None if `out` is too small.

    Raises:
        ValueError: the step is out of range, or spans or donors do not fit the block.
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
    """Decode the rows in spans below `out.tokens` into `out`. Thread-safe; releases the GIL.

    Args:
        table: the spans of the block.
        payload, layer_sizes: what `encode` wrote.
        donors: the rows of each span, with the values that the encoder had. Other donors give other values.
        out: bf16 on the CPU, any strides of heads and tokens; mutated.
        level: as for `encode`.

    Raises:
        CodecError: `encode` did not write the payload. `out` then holds undefined values.
        ValueError: spans or donors do not fit `out`.
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
    """Return the largest absolute error of a value in spans, and the mean square, as the encoder measured them.

    Args:
        payload: the layers that `encode` wrote, of which the first 12 bytes are read.

    Raises:
        CodecError: `encode` did not write the payload.
    """
    return header(payload[: HEADER.size])[2:]


def _checked(
    block: KVView, table: SpanTable, donors: Sequence[KVView]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    if block.layout.dtype != "bfloat16":
        raise ValueError(f"donor: expected a block of bfloat16, found {block.layout.dtype}; use another codec")
    if len(donors) != len(table.spans):
        raise ValueError(f"donor: expected rows of {len(table.spans)} donors, one for each span, found {len(donors)}")
    for span, view in zip(table.spans, donors, strict=True):
        if view.layout != block.layout or view.tokens != span.count:
            raise ValueError("donor: a donor must have the block's layout and the rows of its span")
    runs = [(span.start, span.count, which) for span, which in zip(table.spans, table.which, strict=True)]
    return np.array(runs, np.int64).reshape(-1, 3), [np.ascontiguousarray(view.rows) for view in donors]


@lru_cache(maxsize=64)
def _shapes(layout: KVLayout) -> npt.NDArray[np.int64]:
    return np.array([(x.heads, x.key_dim, x.value_dim) for x in layout.layers], np.int64)
