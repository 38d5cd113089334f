"""Sealed values: only who has the fleet key reads them or makes one."""

from __future__ import annotations

from pathlib import Path

import pytest
import remotestores as rs
import small_stores as small

from kvstore.core.record import DamagedRecord
from kvstore.errors import ConfigError
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.sealing import KEY_BYTES, OVERHEAD, Sealer, key_from

KEY, OTHER = b"k" * KEY_BYTES, b"o" * KEY_BYTES
TOKENS = small.tokens_of(1, 3 * small.BLOCK)
LONG_S = 60.0


def _value(name: str = "kvs1/a", data: bytes = b"record" * 20) -> bytearray:
    return bytearray(b"".join(Sealer(KEY).seal(name, data)))


def test_a_sealed_value_comes_back_under_its_name() -> None:
    value = _value()
    assert len(value) == 120 + OVERHEAD
    assert Sealer(KEY).opened("kvs1/a", memoryview(value)) == b"record" * 20


@pytest.mark.parametrize("at", range(0, 120 + OVERHEAD, 7))
def test_every_bit_counts(at: int) -> None:
    value = _value()
    value[at] ^= 16
    with pytest.raises(DamagedRecord):
        Sealer(KEY).opened("kvs1/a", memoryview(value))


@pytest.mark.parametrize("size", [0, 7, OVERHEAD - 1, OVERHEAD, 120 + OVERHEAD - 1])
def test_a_value_cut_short_is_refused(size: int) -> None:
    with pytest.raises(DamagedRecord):
        Sealer(KEY).opened("kvs1/a", memoryview(_value())[:size])


def test_another_name_or_key_is_refused() -> None:
    for sealer, name in ((Sealer(KEY), "kvs1/b"), (Sealer(OTHER), "kvs1/a")):
        with pytest.raises(DamagedRecord):
            sealer.opened(name, memoryview(_value()))


def test_no_nonce_comes_twice() -> None:
    assert len({bytes(_value()[16:28]) for _ in range(100)}) == 100


def test_a_key_file_holds_bytes_or_hex_digits() -> None:
    assert key_from(KEY) == key_from(KEY.hex().encode() + b"\n") == KEY
    for bad in (b"", KEY[:-1], b"x" * 64):
        with pytest.raises(ConfigError, match=r"remote\.key"):
            key_from(bad)


def test_stores_with_the_key_share_and_others_do_not(tmp_path: Path) -> None:
    url, file = f"memory:{tmp_path.name}", tmp_path / "fleet.key"
    file.write_text(KEY.hex())
    rs.filled(tmp_path / "a", rs.settings(url, key=file), TOKENS)
    engine = open_engine(url)
    for name in engine.list("kvs1/", LONG_S):  # nothing of the caches can be seen
        buffer = bytearray(1 << 16)
        engine.get_into(name, memoryview(buffer), LONG_S)
        assert TOKENS[: small.BLOCK].tobytes() not in buffer
        assert b"KVSTREC1" not in buffer
    for folder, key, tokens in (("same", KEY, len(TOKENS)), ("other", OTHER, 0), ("none", None, 0)):
        with rs.open_store(tmp_path / folder, rs.settings(url, key=key)) as store:
            assert small.stored(store, TOKENS) == tokens
            assert rs.counters(store).get("remote_damaged", 0) == (0 if tokens else 3)


def test_a_record_that_is_not_sealed_is_a_miss_for_the_fleet(tmp_path: Path) -> None:
    url = f"memory:{tmp_path.name}"
    rs.filled(tmp_path / "a", rs.settings(url), TOKENS)
    with rs.open_store(tmp_path / "b", rs.settings(url, key=KEY)) as store:
        assert store.get(TOKENS) is None


def test_a_key_that_is_none_is_told_before_anything_is_made(tmp_path: Path) -> None:
    for key in (b"short", tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"remote\.key"):
            rs.open_store(tmp_path / "a", rs.settings("memory:x", key=key))
