"""The filter has every key that was added, few others, and takes no more memory than it was given."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvstore.tiers.remote.key_filter import KeyFilter


def keys_of(count: int, seed: int, suffix: bytes = b"") -> list[bytes]:
    return [hashlib.sha256(bytes([seed]) + i.to_bytes(4, "little")).digest() + suffix for i in range(count)]


@pytest.mark.parametrize("suffix", [b"", b".place", b"-1f4s"])
def test_what_was_added_is_there_and_hardly_anything_else(suffix: bytes) -> None:
    found = KeyFilter(1 << 13)
    inside, outside = keys_of(6500, 1, suffix), keys_of(6500, 2, suffix)  # ten bits a key
    for first in range(0, len(inside), 1000):
        found.add(inside[first : first + 1000])
    assert all(key in found for key in inside)
    assert sum(key in found for key in outside) < 0.02 * len(outside)
    assert len(found) == len(inside)


def test_a_key_and_what_hangs_on_it_are_told_apart() -> None:
    found = KeyFilter(1 << 10)
    (key,) = keys_of(1, 3)
    found.add([key + b".place"])
    assert (key in found, key + b".mark" in found, key + b".place" in found) == (False, False, True)


def test_one_that_is_too_full_only_knows_less() -> None:
    found = KeyFilter(8)
    inside = keys_of(1000, 4)
    found.add(inside)
    assert all(key in found for key in inside)
    assert np.all([key in found for key in keys_of(50, 5)])


@pytest.mark.parametrize("nbytes", [0, 7, 12, -8])
def test_sizes_that_do_not_fit_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        KeyFilter(nbytes)
