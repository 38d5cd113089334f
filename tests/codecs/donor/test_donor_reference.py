"""The donor codec's reference: rotated keys, measured scales, differences carried on; and its model's checks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from donorcases import arrays_of, case_of, layout_of, model_of, referred, rows_alone, rows_of
from hypothesis import given
from hypothesis import strategies as st
from predictcases import SPECIAL, same

from kvstore.codecs.donor import reference as donor_reference
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.tables import frequencies
from kvstore.codecs.predictive.model import ESCAPE
from kvstore.codecs.profile import Profile
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.rope import angles_of
from kvstore.errors import CodecError, ProfileError

SHAPES = [(2, 8, 8)] * 3
CHECKSUM = 1231579669  # of the frequencies, which never change


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().view(torch.int16).long() & 0xFFFF


def test_rotated_keys_are_those_of_the_other_position() -> None:
    layout = layout_of([(2, 16, 16)], True)
    rng = torch.Generator().manual_seed(1)
    plain = torch.randn(40, 2, 2, 8, generator=rng) * torch.exp2(torch.randn(40, 1, 1, 1, generator=rng) * 4)
    angle = torch.outer(torch.arange(40) + 17.0, 100 ** (-torch.arange(8) / 8))[:, None]

    def at(shift: int) -> torch.Tensor:
        moved = angle + shift * 100 ** (-torch.arange(8) / 8)
        a, b = plain[:, :, 0], plain[:, :, 1]
        return torch.stack([a * moved.cos() - b * moved.sin(), b * moved.cos() + a * moved.sin()], 2).reshape(40, 32)

    angles = torch.from_numpy(angles_of(layout, -11)).long()
    found = donor_reference.rotated(bits_of(at(0)), angles[0].expand(40, -1), angles[1].expand(40, -1))
    size = plain.pow(2).sum(2).sqrt().repeat(1, 1, 2).reshape(40, 32)
    error = (donor_reference.values_of(found) - at(-11)).abs() / size
    assert error.max() < 1 / 64  # the rounding of the donor's bf16 and of the result's
    assert (donor_reference.values_of(bits_of(at(0))) - at(-11)).abs().div(size).max() > 0.5


@given(st.lists(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF)), min_size=2, max_size=2), st.integers())
def test_any_pair_can_be_rotated(pair: list[int], seed: int) -> None:
    bits = donor_reference.finite(torch.tensor([pair]))
    angle = math.fmod(seed, 6.28)
    cos, sin = (torch.tensor([[round(16384 * f(angle))]]) for f in (math.cos, math.sin))
    found = donor_reference.rotated(bits, cos, sin)
    assert ((found >= 0) & (found <= 0xFFFF)).all()
    x, y = donor_reference.values_of(found).double()[0], donor_reference.values_of(bits).double()[0]
    assert x.isfinite().all()
    if 1e-25 < y.abs().max() < 1e38:
        assert abs(float(x.norm() / y.norm()) - 1) < 1 / 64


def test_weights_are_quarter_octaves() -> None:
    found = donor_reference.weights().double()
    assert torch.allclose(found, torch.exp2(-torch.arange(-32, 41).double() / 4), rtol=1e-6)


def test_scales_follow_the_size_of_the_residuals() -> None:
    mu = bits_of(torch.full((64, 2 * 20), 3.0))
    noise = torch.randn(64, 40, generator=torch.Generator().manual_seed(2))
    none = torch.zeros(64, dtype=torch.long)
    found = {
        size: donor_reference.scales_of(bits_of(3.0 + size * noise), mu, none, 2).view(2, 3) for size in (0.5, 1.0, 8.0)
    }
    assert ((found[1.0] - found[0.5]) - 4).abs().max() <= 1
    assert ((found[8.0] - found[1.0]) - 12).abs().max() <= 1
    moved = donor_reference.scales_of(bits_of(3.0 + noise), mu, none + 8, 2).view(2, 3)
    assert torch.equal(moved, found[1.0] - 8)
    assert donor_reference.scales_of(mu, mu, none, 2).tolist() == [-400] * 6
    one = mu.clone()
    one[0, 0] = 0x7F00
    assert donor_reference.scales_of(one, mu, none, 2).tolist()[1:] == [400 - 255] * 5


def test_what_is_not_finite_is_nobodys_size() -> None:
    mu = bits_of(torch.ones(4, 8))
    bits = mu.clone()
    bits[0, :4] = torch.tensor([0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
    none = torch.zeros(4, dtype=torch.long)
    assert donor_reference.scales_of(bits, mu, none, 1).tolist() == [-400]


def test_the_tables_code_any_symbol_and_are_alike_for_both_signs() -> None:
    freqs = frequencies().astype(int)
    assert freqs.shape == (72, 193)
    assert (freqs.sum(1) == 4096).all()
    assert freqs.min() >= 1
    assert (freqs[:, 1:ESCAPE] == freqs[:, ESCAPE - 1 : 0 : -1]).all()
    assert int(freqs.ravel() @ (1 + np.arange(freqs.size) % 9973)) == CHECKSUM


@pytest.mark.parametrize("propagated", [False, True])
def test_what_was_encoded_comes_back_and_other_donors_are_noticed(propagated: bool) -> None:
    model = model_of(SHAPES, True, 3) if propagated else None
    case = case_of(SHAPES, True, "near", 40, 8, model=model)
    rows = rows_of(case)
    block = [(torch.from_numpy(k.astype(np.int64)), torch.from_numpy(v.astype(np.int64))) for k, v in rows_alone(case)]
    layers = donor_reference.encode(rows, block)
    assert same(referred(case, layers), rows_alone(case))
    rows.donor[1][0][0, 0] ^= 0x100
    with pytest.raises(CodecError):
        donor_reference.decode(rows, layers)


def test_a_model_that_says_the_difference_makes_the_rest_smaller() -> None:
    """Values one of which is the other's in the layer before: what the model is for, and can only do so."""
    layout = KVLayout.uniform(2, 1, 8)
    arrays: dict[str, Any] = {}
    for layer in range(2):
        for name, inputs in (("k", 16), ("v", 24)):
            arrays[f"{layer}.{name}.in_scale"] = np.full(8, 16, np.float32)
            arrays[f"{layer}.{name}.out_scale"] = np.full(8, 1 / (16 * 127), np.float32)
            if layer:
                weight = np.zeros((inputs, 8), np.int8)
                weight[(0 if name == "k" else 8) + np.arange(8), np.arange(8)] = 127
                arrays[f"{layer}.{name}.weight"] = weight
    model = DonorModel.from_arrays(layout, arrays)
    rng = torch.Generator().manual_seed(5)
    donor = [(bits_of(torch.randn(64, 8, generator=rng)), bits_of(torch.randn(64, 8, generator=rng))) for _ in range(2)]
    step = [torch.randn(64, 8, generator=rng) for _ in range(2)]
    block = [tuple(bits_of(donor_reference.values_of(x) + d) for x, d in zip(p, step, strict=True)) for p in donor]
    positions = torch.arange(64)
    sizes = [
        sum(
            map(len, donor_reference.encode(donor_reference.Rows([1, 1], donor, None, None, None, positions, m), block))
        )  # type: ignore[arg-type]
        for m in (None, model)
    ]
    assert sizes[1] < 0.8 * sizes[0]


def test_arrays_that_cannot_be_are_refused_by_name() -> None:
    layout, good = layout_of(SHAPES, True), arrays_of(SHAPES, True, 1)
    DonorModel.from_arrays(layout, good)
    uneven = good["1.k.fix"].copy()
    uneven[0] += 1
    for name, value in (
        ("1.v.out_scale", np.full_like(good["1.v.out_scale"], np.inf)),
        ("0.k.in_scale", -good["0.k.in_scale"]),
        ("1.k.fix", uneven),
        ("2.k.fix", np.full_like(good["2.k.fix"], 31)),
        ("1.k.weight", good["1.k.weight"][:-1]),
        ("1.v.weight", np.full_like(good["1.v.weight"], -128)),
        ("rope_fine", good["rope_fine"][:, 1:]),
        ("rope_coarse", good["rope_coarse"][:, :0]),
        ("rope_coarse", np.full_like(good["rope_coarse"], 16385)),
    ):
        with pytest.raises(ProfileError, match=name):
            DonorModel.from_arrays(layout, {**good, name: value})
        with pytest.raises(ProfileError, match=name):
            DonorModel.from_arrays(layout, {k: v for k, v in good.items() if k != name})
    with pytest.raises(ProfileError, match="bfloat16"):
        DonorModel.from_arrays(KVLayout(layout.layers, "float16", layout.rope), good)
    with pytest.raises(ProfileError, match="different or odd"):
        DonorModel.from_arrays(layout_of([(2, 8, 8), (2, 6, 8)], True), good)


def test_a_profile_has_a_model_or_none() -> None:
    identity = ModelIdentity("m", "r", "w", "t", layout_of(SHAPES, True))
    with_it = Profile.new(identity, {"donor": arrays_of(SHAPES, True, 1)})
    found = DonorModel.from_profile(with_it)
    assert found is not None
    assert found.layout == identity.layout
    assert DonorModel.from_profile(Profile.new(identity, {"other": {"x": np.zeros(1, np.int8)}})) is None
