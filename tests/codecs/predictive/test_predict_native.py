"""The predictive codec's C++ against its reference: every twin, byte for byte, and what damage does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from codertwins import needs_exactly, subnormals_flushed, threads_agree
from cpulevels import cpu_levels
from damaged_layers import damage_found, damage_is_named
from exactcases import twins_agree
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from predictcases import (
    SHAPES,
    VOCABULARY,
    Shapes,
    block_of,
    decoded,
    encoded,
    longs,
    model_of,
    native,
    same,
    view_of,
)

from kvstore.codecs.predictive import _predict
from kvstore.codecs.predictive import reference as predictive_reference

pytestmark = pytest.mark.native
LEVELS = cpu_levels()
KINDS = ("predicted", "alike", "random", "special", "zeros")


@settings(max_examples=part(60), deadline=None)
@given(
    st.sampled_from(SHAPES), st.booleans(), st.sampled_from(KINDS), st.sampled_from([1, 5, 64, 123]),
    st.sampled_from([0, 5000]), st.sampled_from([0.3, 1.0, 8.0]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    shapes: Shapes, rope: bool, kind: str, n: int, start: int, reach: float, seed: int
) -> None:
    model = model_of(shapes, rope, seed, reach)
    tokens = np.random.default_rng(seed).integers(-5, VOCABULARY + 20, n).astype(np.int32)
    block = block_of(model, kind, tokens, start, seed)
    ids = torch.from_numpy(tokens.astype(np.int64))
    want = predictive_reference.encode(model, ids, start, longs(block))
    coded = predictive_reference.parts_of(model, ids, start, longs(block))
    coder, view = native(model), view_of(model, block)
    for level in LEVELS:
        found = _predict.residuals(coder, tokens, start, view.rows, level)
        assert found is not None
        for (symbols, classes, _), layer in zip(found, coded, strict=True):
            assert np.array_equal(symbols, layer.symbols.numpy())
            assert np.array_equal(classes, layer.classes.numpy())
    twins_agree(model, tokens, start, block, want, 1 + seed % n)


def test_offsets_are_those_of_the_reference() -> None:
    model, tokens = model_of(SHAPES[0], True, 1), np.arange(64)
    block = block_of(model, "predicted", tokens, 3, 1)
    fits = [c.fits for c in predictive_reference.parts_of(model, torch.from_numpy(tokens), 3, longs(block))]
    view = view_of(model, block)
    found = _predict.residuals(native(model, freqs=None), tokens, 3, view.rows)
    assert found is not None
    seen = set()
    for i, (_, _, offsets) in enumerate(found):
        part = model.parts[i // 2][i % 2]
        want = predictive_reference.offsets(part, fits[max(0, i - 2) : i], 64)
        assert np.array_equal(offsets, want.numpy())
        seen |= set(offsets.tolist())
    assert len(seen) > 5


def test_unknown_tokens_are_all_predicted_alike() -> None:
    model = model_of(SHAPES[0], True, 1)
    part, table = model.parts[0][0], model.token_kv[:, : model.parts[0][0].width]
    ids = torch.tensor([-(1 << 62), -VOCABULARY, -1, VOCABULARY, 1 << 62, 0])
    found = predictive_reference.first_sums(part, table, ids)
    assert (found[:5] == torch.from_numpy(part.bias)).all()
    assert not (found[5] == torch.from_numpy(part.bias)).all()


def test_blocks_that_cannot_be_predicted_fall_back() -> None:
    model, tokens = model_of(SHAPES[0], True, 1), np.arange(64)
    coder, view = native(model), view_of(model, block_of(model, "alike", tokens, 0, 1))
    last = model.positions - 64
    assert coder.positions == model.positions
    out = bytearray(1 << 20)
    assert isinstance(_predict.encode(coder, tokens, last, view.rows, out), tuple)
    for start in (-1, last + 1, 1 << 62, -(1 << 62)):
        assert _predict.encode(coder, tokens, start, view.rows, out) == _predict.FALL_BACK
        assert _predict.residuals(coder, tokens, start, view.rows) is None
        assert "positions" in str(_predict.decode(coder, tokens, start, 64, b"", [0, 0, 0], view.rows, 64))
    assert _predict.encode(coder, tokens[:0], 0, view.rows, out) == _predict.FALL_BACK


def test_room_and_limit() -> None:
    model, tokens = model_of(SHAPES[0], True, 1), np.arange(64)
    coder, view = native(model), view_of(model, block_of(model, "alike", tokens, 0, 1))
    size = sum(map(len, encoded(coder, tokens, 0, view, LEVELS[-1])))
    needs_exactly(size, partial(_predict.encode, coder, tokens, 0, view.rows), _predict.FALL_BACK)


@pytest.mark.parametrize("shapes", [SHAPES[0], [(1, 64, 64), (1, 64, 40)]])  # the latter: rows of whole steps
@pytest.mark.parametrize("kind", ["predicted", "random", "special"])
def test_damage_is_found_and_harms_nothing(kind: str, shapes: Shapes) -> None:
    model, rng = model_of(shapes, True, 2), np.random.default_rng(3)
    tokens = rng.integers(0, VOCABULARY, 20)
    block = block_of(model, kind, tokens, 7, 5)
    coder = native(model)
    layers = encoded(coder, tokens, 7, view_of(model, block), LEVELS[-1])
    assert same(decoded(model, coder, tokens, 7, layers, LEVELS[-1]), block)
    decode = partial(decoded, model, coder, tokens, 7)
    assert damage_found(layers, 750, rng, 7, LEVELS, decode, partial(same, b=block)) > 600


def test_every_kind_of_damage_is_named() -> None:
    model, tokens = model_of(SHAPES[0], True, 2), np.arange(20)
    block = block_of(model, "special", tokens, 7, 5)
    coder = native(model)
    layers = encoded(coder, tokens, 7, view_of(model, block), LEVELS[-1])

    damage_is_named(layers, lambda bad: decoded(model, coder, tokens, 7, bad, LEVELS[-1]))
    view = view_of(model, block)
    for sizes in ([1, 1, 1 << 40], [len(layers[0]), 0, 0], [1 << 63, 0, 0]):
        assert _predict.decode(coder, tokens, 7, 20, b"".join(layers), sizes, view.rows, 20) is not None


def test_models_that_are_not_in_order_are_refused() -> None:
    model = model_of(SHAPES[0], True, 1)
    parts = [part for pair in model.parts for part in pair]
    native(model)

    def with_one(name: str, number: int, value: Any) -> dict[str, Any]:
        return {name: [value if i == number else getattr(part, name) for i, part in enumerate(parts)]}

    one, wide = parts[2], parts[2].width
    odd = one.fix.copy()  # type: ignore[union-attr]
    odd[0] += 1
    for match, changed in (
        ("1.k.in_scale: numbers must be finite and positive", with_one("in_scale", 2, np.zeros(wide, np.float32))),
        ("1.k.out_scale: numbers must be finite", with_one("out_scale", 2, np.full(wide, np.inf, np.float32))),
        ("1.k.scale: expected numbers from -400 to 400", with_one("scale", 2, np.full(wide, 401, np.int16))),
        ("1.k.bias: expected numbers from -2684", with_one("bias", 2, np.full(wide, -(1 << 28) - 1, np.int32))),
        ("1.k.adapt: expected numbers from -4096", with_one("adapt", 2, np.full(3, 4097, np.int32))),
        ("1.k.fix: expected numbers from -14 to 30", with_one("fix", 2, np.full(wide, 31, np.int8))),
        ("1.k.fix: the two halves", with_one("fix", 2, odd)),
        ("1.v.fix", with_one("fix", 3, one.fix)),
        ("1.k.weight: expected numbers from -127", with_one("weight", 2, np.full_like(one.weight, -128))),
        ("1.k.weight: expected a contiguous", with_one("weight", 2, one.weight[1:])),  # type: ignore[index]
        ("1.k.weight: missing", with_one("weight", 2, None)),
        ("0.k.weight: layer 0", with_one("weight", 0, one.weight)),
        ("1.k.bias: expected a contiguous", with_one("bias", 2, one.bias.astype(np.int64))),
        ("0.v.scale: expected a contiguous", with_one("scale", 1, one.scale[:-1])),
        ("freqs: every row", {"freqs": np.ones_like(model.freqs)}),
        ("freqs: a frequency", {"freqs": np.zeros_like(model.freqs)}),
        ("rope_fine", {"rope_fine": None}),
        ("rope_coarse", {"rope_coarse": np.full_like(model.rope_coarse, 16385)}),
        ("token_kv", {"token_kv": model.token_kv[:, 1:]}),
        ("entry for K and V", {"bias": []}),
        ("shapes", {"shapes": np.zeros((3, 3), np.int64)}),
    ):
        with pytest.raises(ValueError, match=match):
            native(model, **changed)


def test_calls_that_are_not_in_order_are_refused() -> None:
    model, tokens = model_of(SHAPES[0], True, 1), np.arange(4)
    view, coder = view_of(model, block_of(model, "alike", tokens, 0, 1)), native(model)
    out = bytearray(100_000)
    with pytest.raises(ValueError, match="tokens"):
        _predict.encode(coder, tokens.astype(np.float32), 0, view.rows, out)
    with pytest.raises(ValueError, match="rows"):
        _predict.encode(coder, tokens, 0, view.rows[:, 1:], out)
    with pytest.raises(ValueError, match="level"):
        _predict.encode(coder, tokens, 0, view.rows, out, level="best")
    with pytest.raises(ValueError, match="frequencies"):
        _predict.encode(native(model, freqs=None), tokens, 0, view.rows, out)
    with pytest.raises(ValueError, match="tokens"):
        _predict.decode(coder, tokens, 0, 5, b"", [0, 0, 0], view.rows, 4)
    with pytest.raises(ValueError, match="wanted"):
        _predict.decode(coder, tokens, 0, 4, b"", [0, 0, 0], view.rows, 5)
    with pytest.raises(ValueError, match="sizes"):
        _predict.decode(coder, tokens, 0, 4, b"", [0, 0], view.rows, 4)


def test_threads_share_a_model() -> None:
    model, tokens = model_of(SHAPES[3], True, 1), np.arange(64)
    coder, views = native(model), [view_of(model, block_of(model, "predicted", tokens, 0, i)) for i in range(4)]
    threads_agree(lambda view: encoded(coder, tokens, 0, view, LEVELS[-1]), views, 10)


def test_a_thread_that_flushes_subnormal_numbers_codes_the_same() -> None:
    model, tokens = model_of(SHAPES[1], True, 4), np.arange(30)
    parts = [part for pair in model.parts for part in pair]
    tiny = replace(parts[1], in_scale=np.full(parts[1].width, 3e38, np.float32)).in_scale
    coder = native(model, in_scale=[tiny if i == 1 else part.in_scale for i, part in enumerate(parts)])
    block = block_of(model, "predicted", tokens, 0, 1)
    block[0][1][:] = np.arange(block[0][1].size).reshape(block[0][1].shape) % 128  # subnormal V, which K_1 is made of
    view = view_of(model, block)
    want = [encoded(coder, tokens, 0, view, level) for level in LEVELS]
    with subnormals_flushed():
        assert [encoded(coder, tokens, 0, view, level) for level in LEVELS] == want
