"""The scalar, AVX2, AVX-512 and NEON twins of the comparison give the same answer everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.levels import LEVELS, cpu_levels
from kvstore.trie._trie import common_narrow_prefix, common_prefix, level, machine_level

pytestmark = pytest.mark.native


@pytest.fixture(params=LEVELS)
def twin(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in cpu_levels():
        pytest.skip(f"this machine has no {name}")
    return name


def test_every_length_offset_and_place_of_the_first_difference(twin: str) -> None:
    base = np.random.default_rng(0).integers(0, 2**32, 400, dtype=np.uint32)
    for length in range(131):
        for offset in (0, 1, 3, 7, 15):
            a = base[offset : offset + length]
            b = np.concatenate([base[:2], a])[2:]  # another alignment
            assert common_prefix(a, b, twin) == length
            for place in {0, length // 2, length - 1} & set(range(length)):
                c = b.copy()
                c[place] ^= np.uint32(1 << (place % 32))
                c[place + 1 :] ^= np.uint32(5)  # what follows must not matter
                assert common_prefix(a, c, twin) == place


def test_every_place_of_the_first_difference(twin: str) -> None:
    a = np.zeros(200, np.uint32)
    for place in range(200):
        b = a.copy()
        b[place] = 0x80000000
        assert common_prefix(a, b, twin) == place


def test_tokens_of_two_bytes_at_every_length_offset_and_place_of_the_first_difference(twin: str) -> None:
    base = np.random.default_rng(0).integers(0, 2**16, 400, dtype=np.uint16)
    for length in range(131):
        for offset in (0, 1, 3, 7, 15):
            a = base[offset : offset + length]
            b = np.concatenate([base[:2], a])[2:].astype(np.uint32)
            assert common_narrow_prefix(a, b, twin) == length
            for place in {0, length // 2, length - 1} & set(range(length)):
                c = b.copy()
                c[place] ^= np.uint32(1 << (place % 32))  # also where a has no bits
                c[place + 1 :] ^= np.uint32(5)
                assert common_narrow_prefix(a, c, twin) == place


def test_the_environment_caps_the_level_and_never_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEVELS:
        monkeypatch.setenv("KVSTORE_CPU", name)
        assert level() == (name if name in cpu_levels() else machine_level())
    for name in ("", "avx1024"):
        monkeypatch.setenv("KVSTORE_CPU", name)
        assert level() == machine_level()
    monkeypatch.delenv("KVSTORE_CPU")
    assert level() == machine_level()


def test_a_level_that_the_machine_lacks_or_nobody_knows_is_refused() -> None:
    a = np.zeros(3, np.uint32)
    with pytest.raises(ValueError, match="level"):
        common_prefix(a, a, "sse9")
    other = "neon" if "neon" not in cpu_levels() else "avx2"
    known = "(scalar|scalar or avx2|scalar, avx2 or avx512|scalar, avx2, avx512 or amx|scalar or neon)"
    with pytest.raises(ValueError, match=f"level: this machine has no {other}; choose {known}$"):
        common_prefix(a, a, other)
    with pytest.raises(ValueError, match="b"):
        common_prefix(a, a[:2], "scalar")
