"""What the mode in groups needs of a profile: a level of the exact predictor, for differences instead of values.

The profile's section "donor" has such a level, fitted to differences, or else the section "levels" has one that was
fitted to values: as it is linear, it predicts differences of values as well, only not as closely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from kvstore.codecs.arrays import Array
from kvstore.codecs.donor.model import SECTION
from kvstore.codecs.donor.tables import frequencies
from kvstore.codecs.predictive.levels.model import SECTION as LEVELS_SECTION
from kvstore.codecs.predictive.levels.model import LevelModel, LevelPart, levels_of
from kvstore.codecs.profile import Profile
from kvstore.core.layout import KVLayout

ADAPT = (110, 90, 0)
"""How a row's offset follows from the two parts before, where that was not fitted."""


def groups_model(profile: Profile) -> Callable[[], LevelModel] | None:
    """Return what gives the model of differences of a profile; None if it has none.

    One that was fitted to values is made when it is asked for, and may raise `ProfileError` then: many stores have such
    a profile, and few have members.

    Raises:
        ProfileError: names the array that is missing or malformed.
    """
    layout = profile.layout
    if SECTION in profile.sections:
        if not levels_of(profile.section(SECTION)):
            return None  # see `DonorModel`
        fitted = model_of_section(layout, profile.section(SECTION))
        return lambda: fitted
    if LEVELS_SECTION not in profile.sections or not levels_of(profile.section(LEVELS_SECTION)):
        return None
    return lambda: model_of_levels(layout, profile.section("lossless"), profile.section(LEVELS_SECTION))


def model_of_section(layout: KVLayout, arrays: Mapping[str, Array]) -> LevelModel:
    """Return what was fitted to differences. Raises `ProfileError`."""
    level = levels_of(arrays)[-1]
    return _of_differences(LevelModel.from_arrays(layout, level, without_tokens(layout, arrays), arrays, SECTION))


def model_of_levels(layout: KVLayout, lossless: Mapping[str, Array], levels: Mapping[str, Array]) -> LevelModel:
    """Return what was fitted to values, for differences. Raises `ProfileError`."""
    found = LevelModel.from_arrays(layout, levels_of(levels)[-1], without_tokens(layout, lossless), levels)
    adapt = np.array(ADAPT, np.int32)
    pairs = tuple((replace(k, adapt=adapt), replace(v, adapt=adapt)) for k, v in found.parts)
    return _of_differences(replace(found, parts=pairs, freqs=frequencies()))


def without_tokens(layout: KVLayout, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the angles among the arrays, and a table of one token, all 0."""
    first = layout.layers[0]
    angles = {name: arrays[name] for name in ("rope_fine", "rope_coarse") if name in arrays}
    return {**angles, "token_kv": np.zeros((1, first.heads * (first.key_dim + first.value_dim)), np.int8)}


def _of_differences(model: LevelModel) -> LevelModel:
    """The same for differences, which are 0 in the mean and do not depend on tokens."""
    return replace(model, parts=tuple((_centred(k), _centred(v)) for k, v in model.parts))


def _centred(part: LevelPart) -> LevelPart:
    if part.row is not None:
        return replace(part, row=np.zeros_like(part.row), bias=np.zeros_like(part.bias))
    half = (1 << part.shift.astype(np.int32)) >> 1  # for a shift rounds down
    return replace(part, bias=half)
