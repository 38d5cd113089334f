"""Quantised tables: exact sums, the same for ever, and a code as short as that of a coder with finer tables."""

from __future__ import annotations

import constriction
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.codecs.rans.coder import PROB_BITS, RansTables, quantise


@settings(max_examples=part(100), deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2**31), min_size=256, max_size=256), min_size=1, max_size=2),
    symbols=st.integers(1, 256),
    bits=st.sampled_from(PROB_BITS),
    floor=st.booleans(),
)
def test_quantised_tables_sum_up_and_keep_what_was_counted(
    rows: list[list[int]], symbols: int, bits: int, floor: bool
) -> None:
    counts = np.array(rows)[:, :symbols]
    freqs = quantise(counts, bits, floor=floor)
    assert freqs.dtype == np.uint16
    assert freqs.shape == counts.shape
    assert (freqs.sum(axis=1) == 1 << bits).all()
    counted = (counts > 0) | floor | ~counts.any(axis=1, keepdims=True)
    assert ((freqs > 0) == counted).all()
    assert np.array_equal(quantise(counts[0], bits, floor=floor), freqs[0])
    RansTables(freqs, bits)


def test_quantisation_is_pinned() -> None:
    """Tables may be made anew from stored counts, so the same counts give the same tables for ever."""
    assert quantise([1, 1, 1], 11).tolist() == [683, 683, 682]
    assert quantise([0, 10**9, 1, 5], 11).tolist() == [0, 2046, 1, 1]
    assert quantise([0, 10**9, 1, 5], 12, floor=True).tolist() == [1, 4093, 1, 1]
    assert quantise([0, 0], 12).tolist() == [2048, 2048]
    assert quantise(np.arange(10) ** 3, 11).tolist() == [0, 1, 8, 27, 65, 126, 219, 347, 518, 737]


def test_quantisation_loses_little() -> None:
    rng = np.random.default_rng(2)
    counts = rng.multinomial(100_000, rng.dirichlet(np.full(40, 0.4)), size=20)
    share = counts / counts.sum(axis=1, keepdims=True)
    for bits, most in ((11, 0.01), (12, 0.005)):
        model = quantise(counts, bits) / (1 << bits)
        used = counts > 0
        loss = (share[used] * np.log2(share[used] / model[used])).sum() / len(counts)
        assert 0 <= loss < most


@pytest.mark.parametrize("counts", [[1.0], [[-1]], [1 << 40], [[1 << 39] * 3], np.ones((2, 257), int), 3])
def test_counts_that_are_none_are_refused(counts: npt.ArrayLike) -> None:
    with pytest.raises(ValueError, match="counts"):
        quantise(counts, 11)


@pytest.mark.parametrize("bits", PROB_BITS)
def test_the_code_is_as_short_as_another_coder_s(bits: int) -> None:
    """The oracle codes the same symbols with the unquantised tables (24 bits), a class at a time."""
    rng = np.random.default_rng(4)
    n, width = 200_000, 16
    scale = rng.uniform(1, 6, width)
    symbols = np.clip(np.rint(rng.laplace(128, np.resize(scale, n))), 0, 255).astype(np.uint8)
    classes = np.arange(width, dtype=np.uint8)
    counts = np.stack([np.bincount(symbols[c::width], minlength=256) for c in range(width)])
    coder = constriction.stream.stack.AnsCoder()
    for c in range(width):
        model = constriction.stream.model.Categorical(counts[c] / counts[c].sum(), perfect=False)
        coder.encode_reverse(symbols[c::width].astype(np.int32), model)
    tables = RansTables(quantise(counts, bits), bits)
    stream = tables.encode(symbols, classes)
    oracle = 4 * coder.num_words()
    assert oracle * 0.99 < len(stream) < oracle * 1.005 + 64 * 4
    assert np.array_equal(tables.decode(stream, n, classes), symbols)
