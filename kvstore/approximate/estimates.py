"""Where the numbers of the estimates come from: the profile's section "approximate"."""

from __future__ import annotations

from threading import Lock
from typing import Protocol

import numpy as np

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.codecs.profile import Described, Profile
from kvstore.core.approximate import Estimates
from kvstore.errors import ProfileError

SECTION = "approximate"
MOST = 1e6  # of a tokens' reach and of nats


def estimates_of(profile: Profile) -> Estimates | None:
    """Return the estimates of a profile; None if it has no such section.

    Raises:
        ProfileError: the section is malformed.
    """
    return from_arrays(profile.section(SECTION)) if SECTION in profile.sections else None


def from_arrays(arrays: dict[str, Array]) -> Estimates:
    """Make the estimates of a section's arrays: `errors` float32 [3], `kl` float32 [2].

    Raises:
        ProfileError: names the array that is missing or malformed.
    """
    taken = SectionArrays("approximate", SECTION, arrays)
    errors, kl = taken.positive("errors", 3, MOST), taken.positive("kl", 2, MOST)
    return Estimates(*(float(x) for x in (*errors, *kl)))


def to_arrays(estimates: Estimates) -> dict[str, Array]:
    """Make the section's arrays."""
    errors = (estimates.seam_error, estimates.reach, estimates.fall)
    return {"errors": np.array(errors, np.float32), "kl": np.array((estimates.floor, estimates.slope), np.float32)}


class ProfileSource(Protocol):
    """Where a store's current profile comes from: `kvstore.tiers.profiles.Profiles`."""

    @property
    def described(self) -> Described | None:
        """What is known of it by its header."""

    @property
    def current(self) -> Profile | None:
        """The profile, read whole."""

    def note_damaged(self, profile_id: bytes) -> None:
        """Count a profile of which a section is malformed."""


class ProfileEstimates:
    """The estimates of a store's profile, read when they are first asked for. Thread-safe."""

    def __init__(self, profiles: ProfileSource) -> None:
        self._profiles = profiles
        self._lock = Lock()  # guards _found
        self._found: tuple[Estimates | None] | None = None

    def get(self) -> Estimates | None:
        """Return them; None if there is no profile, or it lacks the section, or that is malformed, which is counted."""
        with self._lock:
            if self._found is None:
                self._found = (self._read(),)
            return self._found[0]

    def _read(self) -> Estimates | None:
        described = self._profiles.described
        if described is None or SECTION not in described.sections:
            return None  # without reading tens of megabytes
        profile = self._profiles.current
        try:
            return None if profile is None else estimates_of(profile)
        except ProfileError:
            assert profile is not None
            self._profiles.note_damaged(profile.id)
            return None
