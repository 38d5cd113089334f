"""The sections of a profile for layouts with windows: each holds the arrays of every group of layers.

A group is coded as a block of its own (groups.py), so it has a model of its own: that of its layers alone, with their
rotary embedding. Array "0.k.scale" of group 1 stands in its section as "g1/0.k.scale".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from kvstore.codecs.profile import Profile

Arrays = Mapping[str, npt.NDArray[Any]]


def joined(parts: Sequence[Arrays]) -> dict[str, npt.NDArray[Any]]:
    """Return a section of these arrays, of each group of a layout.

    Example:
        >>> import numpy as np
        >>> list(joined([{"freqs": np.ones(1)}, {"freqs": np.ones(1)}]))
        ['g0/freqs', 'g1/freqs']
    """
    return {f"{_prefix(number)}{name}": array for number, part in enumerate(parts) for name, array in part.items()}


def arrays_of(section: Arrays, number: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of group `number` in a section."""
    prefix = _prefix(number)
    return {name.removeprefix(prefix): array for name, array in section.items() if name.startswith(prefix)}


def profile_of_group(profile: Profile, number: int) -> Profile:
    """Return the profile with the layers of group `number` alone; records know it by the same id."""
    sections = {name: arrays_of(profile.section(name), number) for name in profile.sections}
    own = {name: arrays for name, arrays in sections.items() if arrays}
    head = replace(profile.head, layout=profile.layout.groups[number].layout, sections=tuple(own))
    return replace(profile, head=head, _arrays=own)


def _prefix(number: int) -> str:
    return f"g{number}/"
