"""When the donor codec codes in groups, with which model, and what it does without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import donorcases
import groupcases
import levelcases
import numpy as np
import predictcases
import pytest
import torch
from donorblocks import apart, decode, encode, info_of
from donorcases import case_of, layout_of
from predictcases import same
from profilecases import identity_of, profile_of

from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.groups import reference
from kvstore.codecs.donor.groups.model import groups_model, model_of_levels, model_of_section
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.spans import EXACT, GROUPS
from kvstore.codecs.donor.tables import frequencies
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.profile import Profile
from kvstore.errors import CodecError, ProfileError

SHAPES = [(2, 8, 8)] * 3
LAYOUT = layout_of(SHAPES, True)


def codec_of(level: int = 2, seed: int = 5) -> DonorCodec:
    model = groupcases.model_of(SHAPES, True, level, seed)
    return DonorCodec(EntropyCodec(), groups=lambda: model)


def mode(codec: DonorCodec, case: Any, payload: bytes) -> int:
    return codec.spans_of(info_of(case), memoryview(payload)).mode


@pytest.mark.parametrize("kind", ["near", "same", "random", "special"])
@pytest.mark.parametrize("count", [1, 30, 64])
def test_any_block_with_any_donors_comes_back(kind: str, count: int) -> None:
    case, codec = apart(case_of(SHAPES, True, kind, count, 3)), codec_of()
    found = encode(codec, case)
    assert found is not None
    assert len(found[0]) <= codec.bound(info_of(case))
    assert mode(codec, case, found[0]) == GROUPS
    assert same(decode(codec, case, *found), case.block)
    assert same(decode(codec, case, *found, 1), case.block, 1)


def test_a_record_needs_the_model_that_it_was_coded_with() -> None:
    case = apart(case_of(SHAPES, True, "near", 30, 5))
    found = encode(codec_of(), case)
    assert found is not None
    with pytest.raises(CodecError, match="model of differences"):
        decode(DonorCodec(EntropyCodec()), case, *found)
    with pytest.raises(CodecError):
        decode(codec_of(seed=6), case, *found)
    other = groupcases.model_of([(2, 8, 8)] * 4, True, 2, 5)
    with pytest.raises(CodecError, match="model of differences"):
        decode(DonorCodec(EntropyCodec(), groups=lambda: other), case, *found)


def test_positions_that_the_model_does_not_know_are_coded_without_it() -> None:
    case, model = apart(case_of(SHAPES, True, "near", 30, 5)), groupcases.model_of(SHAPES, True, 2, 5)
    beyond = replace(case, start=model.positions - 29)
    codec = DonorCodec(EntropyCodec(), groups=lambda: model)
    found = encode(codec, beyond)
    assert found is not None
    assert mode(codec, beyond, found[0]) == EXACT
    assert found == encode(DonorCodec(EntropyCodec()), beyond)
    assert same(decode(codec, beyond, *found), case.block)


def test_the_model_is_of_differences_else_of_values() -> None:
    layout, lossless = predictcases.arrays_of(SHAPES, True, 1)
    levels, fitted = levelcases.arrays_of(SHAPES, True, 1), groupcases.arrays_of(SHAPES, True, 2, 7)
    base = {"lossless": lossless, "levels": levels}
    both = groups_model(Profile.new(identity_of(layout), {**base, "donor": fitted}))
    values = groups_model(Profile.new(identity_of(layout), base))
    assert both is not None
    assert values is not None
    assert (both().level, values().level) == (2, 3)
    assert np.array_equal(both().parts[2][0].weight, model_of_section(layout, fitted).parts[2][0].weight)  # type: ignore[arg-type]
    assert np.array_equal(values().freqs, frequencies())
    assert np.array_equal(values().parts[2][0].weight, model_of_levels(layout, lossless, levels).parts[2][0].weight)  # type: ignore[arg-type]
    for part in (part for pair in values().parts for part in pair):
        assert part.row is None or not part.row.any()
        assert part.bias.min() >= 0
    assert groups_model(Profile.new(identity_of(layout), {"lossless": lossless})) is None


def test_profiles_of_before_go_on_as_they_did() -> None:
    profile = profile_of(LAYOUT, "lossless", "levels", "donor")
    assert DonorModel.from_profile(profile) is not None
    assert groups_model(profile) is None
    fitted = groupcases.arrays_of(SHAPES, True, 2, 7)
    assert DonorModel.from_profile(Profile.new(identity_of(LAYOUT), {"donor": fitted})) is None


def test_a_malformed_section_is_named() -> None:
    arrays = groupcases.arrays_of(SHAPES, True, 2, 7)
    arrays["2.1.k.narrow"] = arrays["2.1.k.narrow"][1:]
    with pytest.raises(ProfileError, match=r"donor/2\.1\.k\.narrow"):
        groups_model(Profile.new(identity_of(LAYOUT), {"donor": arrays}))


def test_rows_are_scaled_by_how_much_they_differ() -> None:
    """Differences that are larger by a power of two have another shift, and look the same to the model."""
    model = groupcases.model_of(SHAPES, False, 2, 7)
    case = case_of(SHAPES, False, "near", 8, 1)
    rows = donorcases.rows_of(case)
    donor = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in rows.donor]
    rows = replace(rows, donor=donor)
    n = len(rows)
    near = [(torch.full((n, 16), 0x3F80), torch.full((n, 16), 0x3F80)) for _ in SHAPES]  # 1.0
    far = [(torch.full((n, 16), 0x4180), torch.full((n, 16), 0x4180)) for _ in SHAPES]  # 16.0
    shifts = [reference.shifts_of(rows, model, block) for block in (near, far)]
    assert torch.equal(shifts[0], shifts[1] + 4)
    walks = [reference.Walk(rows, model, shift) for shift in shifts]
    seen = [walk.differences(block[1][1], donor[1][1], 1, 1) for walk, block in zip(walks, (near, far), strict=True)]
    assert torch.equal(*seen)
