"""Freed memory goes back to the system."""

from __future__ import annotations

import os

import pytest
from own_memory import resident

from kvstore.core.heap import give_back_freed

MIB = 1 << 20


@pytest.mark.skipif(os.environ.get("KVSTORE_EXPECT_SANITIZED") == "1", reason="the sanitizer has its own heap")
@pytest.mark.skipif("glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="only glibc gives memory back")
def test_what_lies_below_memory_in_use_is_given_back() -> None:
    parts = [bytes(range(256)) * 256 for _ in range(1_000)]  # too small to be mapped each for itself
    kept = parts[::100]
    del parts
    held = resident()
    assert give_back_freed()
    assert resident() < held - 30 * MIB
    assert all(part == kept[0] for part in kept)
