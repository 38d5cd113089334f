"""The levels of the exact predictor in C++ against their reference: every twin, byte for byte, and what damage does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from codertwins import needs_exactly, threads_agree
from cpulevels import cpu_levels
from damaged_layers import changed_word, damage_found, damage_is_named
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from levelcases import block_of, decoded, encoded, model_of, same
from predictcases import SHAPES, VOCABULARY, Shapes, as_bits, longs, same_longs, view_of

from kvstore.codecs.predictive import _levels
from kvstore.codecs.predictive.levels import reference
from kvstore.codecs.predictive.levels.mode import native_model
from kvstore.codecs.predictive.levels.model import LEVELS, packed_size
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
CPUS = cpu_levels()
KINDS = ("predicted", "random", "special", "zeros")


@settings(max_examples=part(60), deadline=None)
@given(
    st.sampled_from(SHAPES), st.sampled_from(LEVELS), st.booleans(), st.sampled_from(KINDS),
    st.sampled_from([1, 5, 64, 123]), st.sampled_from([0, 5000]), st.sampled_from([0.3, 3.0]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_twins_give_the_bytes_of_the_reference(
    shapes: Shapes, level: int, rope: bool, kind: str, n: int, start: int, wild: float, seed: int
) -> None:
    model = model_of(shapes, rope, level, seed, wild)
    tokens = np.random.default_rng(seed).integers(-5, VOCABULARY + 20, n)
    block = block_of(model, kind, tokens, start, seed)
    want = reference.encode(model, torch.from_numpy(tokens), start, longs(block))
    coder, view = native_model(model), view_of(model, block)
    for cpu in CPUS:
        assert encoded(coder, tokens, start, view, cpu) == want
        assert same(decoded(model, coder, tokens, start, want, cpu), model, block)
        wanted = 1 + seed % n
        assert same(decoded(model, coder, tokens, start, want, cpu, wanted), model, block, wanted)


# A layer that the next is predicted from, wide enough that kernels add its products up in pieces; the last group of V
# has four columns.
WIDE: Shapes = [(5, 64, 68)] * 2


@pytest.mark.parametrize("kind", ["predicted", "random"])  # the latter escapes everywhere
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_twins_agree_on_wide_layers(level: int, kind: str, rope: bool) -> None:
    model, tokens = model_of(WIDE, rope, level, 8), np.arange(103)  # more rows than kernels take at once
    block = block_of(model, kind, tokens, 3, 9)
    want = reference.encode(model, torch.from_numpy(tokens), 3, longs(block))
    coder, view = native_model(model), view_of(model, block)
    for cpu in CPUS:
        assert encoded(coder, tokens, 3, view, cpu) == want
        assert same(decoded(model, coder, tokens, 3, want, cpu), model, block)


@pytest.mark.parametrize("n", [*range(1, 14), 95, 96, 97, 193])
def test_twins_agree_whatever_the_number_of_rows(n: int) -> None:
    model, tokens = model_of(SHAPES[1], n % 2 == 0, 3, n), np.arange(n)
    block = block_of(model, "predicted", tokens, 0, n)
    want = reference.encode(model, torch.from_numpy(tokens), 0, longs(block))
    coder, view = native_model(model), view_of(model, block)
    for cpu in CPUS:
        assert encoded(coder, tokens, 0, view, cpu) == want
        assert same(decoded(model, coder, tokens, 0, want, cpu), model, block)


@pytest.mark.parametrize("level", LEVELS)
def test_the_reference_decodes_what_it_encodes(level: int) -> None:
    model, tokens = model_of(SHAPES[1], True, level, 3), np.arange(20)
    block = longs(block_of(model, "special", tokens, 9, 4))
    layers = reference.encode(model, torch.from_numpy(tokens), 9, block)
    found = reference.decode(model, torch.from_numpy(tokens), 9, layers)
    assert same_longs(found, block)
    with pytest.raises(CodecError, match="mode"):
        reference.decode(model, torch.from_numpy(tokens), 9, [bytes(changed_word(layers[0], 0, 1)), *layers[1:]])


def test_groups_take_off_what_the_groups_before_know() -> None:
    """The second half of the columns is the first half again: with weights that say so, all is left out."""
    model, tokens = model_of([(1, 8, 32), (1, 8, 32)], False, 1, 1), np.arange(64)
    part = model.parts[1][1]
    part.groups[0][:] = 0
    part.groups[0][np.arange(16), np.arange(16)] = 64
    part.weight[:] = 0  # type: ignore[index]
    for name, value in (("narrow", 1 << 14), ("shift", 5), ("bias", 16), ("fix", 4), ("scale", 0), ("adapt", 0)):
        getattr(part, name)[:] = value
    block = block_of(model, "zeros", tokens, 0, 1)
    values = np.random.default_rng(1).integers(-100, 101, (64, 16)) / 8
    block[1][1][:] = as_bits(torch.from_numpy(np.concatenate([values, values], 1)))
    _, coded = reference.parts_of(model, torch.from_numpy(tokens), 0, longs(block))[-1]
    distances = (coded.symbols - 96).abs().double().mean(0)
    assert distances[16:].max() < 4 < distances[:16].min()


def test_blocks_that_cannot_be_predicted_fall_back() -> None:
    model, tokens = model_of(SHAPES[0], True, 3, 1), np.arange(64)
    coder, view = native_model(model), view_of(model, block_of(model, "predicted", tokens, 0, 1))
    last, out = model.positions - 64, bytearray(1 << 20)
    assert coder.positions == model.positions
    assert isinstance(_levels.encode(coder, tokens, last, view.rows, out), tuple)
    for start in (-1, last + 1, 1 << 62, -(1 << 62)):
        assert _levels.encode(coder, tokens, start, view.rows, out) == _levels.FALL_BACK
        assert "positions" in str(_levels.decode(coder, tokens, start, b"", [0, 0, 0], view.rows, 64))
    assert _levels.encode(coder, tokens[:0], 0, view.rows, out) == _levels.FALL_BACK


def test_room_and_limit() -> None:
    model, tokens = model_of(SHAPES[0], True, 2, 1), np.arange(64)
    coder, view = native_model(model), view_of(model, block_of(model, "predicted", tokens, 0, 1))
    size = sum(map(len, encoded(coder, tokens, 0, view, CPUS[-1])))
    needs_exactly(size, partial(_levels.encode, coder, tokens, 0, view.rows), _levels.FALL_BACK)


@pytest.mark.parametrize("shapes", [SHAPES[1], [(2, 16, 20)] * 2])  # the latter has whole groups and a narrow one
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["predicted", "random", "special"])
def test_damage_is_found_and_harms_nothing(kind: str, level: int, shapes: Shapes) -> None:
    model, rng = model_of(shapes, True, level, 2), np.random.default_rng(3)
    tokens = rng.integers(0, VOCABULARY, 20)
    block = block_of(model, kind, tokens, 7, 5)
    coder = native_model(model)
    layers = encoded(coder, tokens, 7, view_of(model, block), CPUS[-1])
    decode = partial(decoded, model, coder, tokens, 7)
    assert damage_found(layers, 400, rng, 7, CPUS, decode, partial(same, model=model, block=block)) > 320


def test_every_kind_of_damage_is_named() -> None:
    model, tokens = model_of(SHAPES[0], True, 3, 2), np.arange(20)
    block = block_of(model, "special", tokens, 7, 5)
    coder = native_model(model)
    layers = encoded(coder, tokens, 7, view_of(model, block), CPUS[-1])

    damage_is_named(layers, lambda bad: decoded(model, coder, tokens, 7, bad, CPUS[-1]))
    view = view_of(model, block)
    for sizes in ([1, 1, 1 << 40], [len(layers[0]), 0, 0], [1 << 63, 0, 0]):
        assert _levels.decode(coder, tokens, 7, b"".join(layers), sizes, view.rows, 20) is not None


def test_models_and_calls_that_are_not_in_order_are_refused() -> None:
    model, tokens = model_of(SHAPES[0], True, 3, 1), np.arange(4)
    part = model.parts[1][0]
    packed = np.concatenate([np.zeros(0, np.int8), *(group.reshape(-1) for group in part.groups)])
    assert packed.size == packed_size(part.width)

    def refused(match: str, **changed: Any) -> None:
        names = ("fix", "gain", "narrow", "shift", "bias", "scale", "adapt", "row", "weight")
        parts = []
        for i, one in enumerate(part for pair in model.parts for part in pair):
            groups = [np.zeros(0, np.int8), *(group.reshape(-1) for group in one.groups)]
            arrays = {name: getattr(one, name) for name in names} | {"groups": np.concatenate(groups)}
            parts.append(arrays | {name: value for name, value in changed.items() if i == 2})
        with pytest.raises(ValueError, match=match):
            _levels.Model(
                level=3,
                shapes=np.array([(x.heads, x.key_dim, x.value_dim) for x in model.layout.layers], np.int64),
                parts=parts,
                token_kv=model.token_kv,
                freqs=model.freqs,
                rope_fine=model.rope_fine,
                rope_coarse=model.rope_coarse,
            )

    odd = part.fix.copy()
    odd[0] += 1
    refused("1.k.fix: the halves", fix=odd)
    refused("1.k.gain: expected numbers from 0", gain=np.full(16, -1, np.int16))
    refused("1.k.shift: expected numbers from 0 to 24", shift=np.full(16, 25, np.int8))
    refused("1.k.weight: expected numbers from -127", weight=np.full_like(part.weight, -128))
    refused("1.k.weight: expected a contiguous", weight=part.weight[1:])  # type: ignore[index]
    refused("1.k.groups: expected a contiguous", groups=np.zeros(1, np.int8))
    refused("1.k.narrow", narrow=None)
    view, coder = view_of(model, block_of(model, "zeros", tokens, 0, 1)), native_model(model)
    with pytest.raises(ValueError, match="wanted"):
        _levels.decode(coder, tokens, 0, b"", [0, 0, 0], view.rows, 5)
    with pytest.raises(ValueError, match="sizes"):
        _levels.decode(coder, tokens, 0, b"", [0, 0], view.rows, 4)
    with pytest.raises(ValueError, match="rows"):
        _levels.encode(coder, tokens, 0, view.rows[:, 1:], bytearray(1000))


def test_threads_share_a_model() -> None:
    model, tokens = model_of(SHAPES[3], True, 3, 1), np.arange(64)
    coder = native_model(model)
    views = [view_of(model, block_of(model, "predicted", tokens, 0, i)) for i in range(4)]
    threads_agree(lambda view: encoded(coder, tokens, 0, view, CPUS[-1]), views, 5)
