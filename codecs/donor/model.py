"""What the donor codec needs of a profile of before to carry differences from layer to layer: the arrays, checked.

Where a block differs from its donor in one layer, it differs in the next one in a way that is nearly linear: int8
weights, as the predictive codec has them, but fitted to differences, of one layer's reach, and without bias. The
arithmetic is in reference.py; FORMAT.md has the arrays' names and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.codecs.predictive.levels.model import levels_of
from kvstore.codecs.predictive.linear_model import LinearModel, LinearPredictor, rotated_half, rotation_tables
from kvstore.codecs.profile import Profile
from kvstore.core.layout import KVLayout

SECTION = "donor"


@dataclass(frozen=True, kw_only=True)
class DonorModel(LinearModel):
    """How differences from a donor go on from layer to layer: predictors of K and V of every layer. Immutable."""

    parts: tuple[tuple[LinearPredictor, LinearPredictor], ...]

    @classmethod
    def from_profile(cls, profile: Profile) -> DonorModel | None:
        """Make the model of a profile; None if it has no section "donor", or one for the mode in groups. Raises
        `ProfileError` as `from_arrays`."""
        if SECTION not in profile.sections or levels_of(profile.section(SECTION)):
            return None
        return cls.from_arrays(profile.layout, profile.section(SECTION))

    @classmethod
    def from_arrays(cls, layout: KVLayout, arrays: Mapping[str, Array]) -> DonorModel:
        """Make the model of a profile's section "donor".

        Raises:
            ProfileError: names the array that is missing or malformed.
        """
        taken = SectionArrays("donor", SECTION, arrays)
        half = rotated_half(layout, taken.codec)
        widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
        parts = []
        for number, width in enumerate(widths):
            before = sum(widths[number - 1]) if number else 0
            k = LinearPredictor.of(taken, f"{number}.k.", width[0], before, half)
            v = LinearPredictor.of(taken, f"{number}.v.", width[1], before + width[0] if number else 0, 0)
            parts.append((k, v))
        fine, coarse = rotation_tables(taken, half)
        return cls(layout=layout, parts=tuple(parts), rope_fine=fine, rope_coarse=coarse)
