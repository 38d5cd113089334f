"""What every engine promises (`RemoteEngine`), asked of all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from remotecases import ENGINES, LONG_S, get, put
from threadruns import run_together

from kvstore.errors import RemoteTimeout, RemoteTooLarge, RemoteUnavailable
from kvstore.tiers.remote.engine import RemoteEngine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteEngine]:
    with ENGINES[request.param](tmp_path) as engine:
        yield engine


def test_a_value_comes_back_as_it_was_put(engine: RemoteEngine) -> None:
    for size in (0, 1, 5, 100, 4096, 70_001, 1 << 20):
        value = random.randbytes(size)
        assert put(engine, f"kvs1/v/{size}", value)
        assert get(engine, f"kvs1/v/{size}") == value


def test_parts_of_any_kind_make_one_value(engine: RemoteEngine) -> None:
    numbers = memoryview(bytes(range(16))).cast("I")
    assert engine.put("kvs1/parts", [b"", b"ab", numbers, b"", memoryview(bytearray(b"cd"))], LONG_S)
    assert get(engine, "kvs1/parts") == b"ab" + bytes(range(16)) + b"cd"
    many = [bytes([i % 256]) * (i % 7) for i in range(3000)]
    assert put(engine, "kvs1/many", *many)
    assert get(engine, "kvs1/many") == b"".join(many)


def test_only_as_much_of_the_buffer_is_written_as_the_value_has(engine: RemoteEngine) -> None:
    put(engine, "kvs1/a", b"value")
    buffer = bytearray(b"." * 12)
    assert engine.get_into("kvs1/a", memoryview(buffer)[2:], LONG_S) == 5
    assert buffer == b"..value....."


def test_a_value_exactly_as_large_as_the_buffer_fits_and_a_larger_one_raises(engine: RemoteEngine) -> None:
    put(engine, "kvs1/a", bytes(5000))
    assert engine.get_into("kvs1/a", memoryview(bytearray(5000)), LONG_S) == 5000
    for room in (0, 10, 4999):
        with pytest.raises(RemoteTooLarge, match="5000"):
            engine.get_into("kvs1/a", memoryview(bytearray(room)), LONG_S)
    assert get(engine, "kvs1/a") == bytes(5000)


def _part(engine: RemoteEngine, key: str, offset: int, *sizes: int) -> tuple[int | None, list[bytes]]:
    buffers = [bytearray(b"." * size) for size in sizes]
    views = [memoryview(buffer) for buffer in buffers]
    return engine.get_parts_into(key, offset, views, LONG_S), [bytes(buffer) for buffer in buffers]  # type: ignore[attr-defined]


def _reads_parts(engine: RemoteEngine) -> bool:
    """Who has no such call says so."""
    has_call = hasattr(engine, "get_parts_into")
    assert has_call or not engine.limits.parcel_bytes
    return has_call


def test_parts_of_a_value_come_in_one_call(engine: RemoteEngine) -> None:
    if not _reads_parts(engine):
        return
    value = random.randbytes(5000)
    put(engine, "kvs1/a", value)
    calls = engine.stats()["calls"]
    assert _part(engine, "kvs1/a", 0, 5000) == (5000, [value])
    assert _part(engine, "kvs1/a", 100, 1, 999, 2000) == (3000, [value[100:101], value[101:1100], value[1100:3100]])
    assert _part(engine, "kvs1/none", 0, 10)[0] is None
    assert (engine.stats()["calls"] - calls, engine.stats()["bytes_read"]) == (3, 8000)


def test_a_part_behind_the_end_of_a_value_is_shorter(engine: RemoteEngine) -> None:
    if not _reads_parts(engine):
        return
    put(engine, "kvs1/a", b"0123456789")
    assert _part(engine, "kvs1/a", 6, 3, 3, 3) == (4, [b"678", b"9..", b"..."])
    assert _part(engine, "kvs1/a", 10, 5) == (0, [b"....."])
    assert _part(engine, "kvs1/a", 1 << 40, 5) == (0, [b"....."])
    assert engine.stats()["failures"] == 0


def test_parts_in_no_time_of_no_key_and_of_a_closed_engine(engine: RemoteEngine) -> None:
    if not _reads_parts(engine):
        return
    with pytest.raises(RemoteTimeout):
        engine.get_parts_into("kvs1/a", 0, [memoryview(bytearray(1))], 0)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="key: expected"):
        _part(engine, "a//b", 0, 1)
    engine.close()
    with pytest.raises(RemoteUnavailable):
        _part(engine, "kvs1/a", 0, 1)


def test_ages_count_from_writing_and_from_touching_where_it_is_kept(engine: RemoteEngine) -> None:
    if not engine.limits.has_ages:
        assert not hasattr(engine, "ages")
        return
    put(engine, "kvs1/a", b"value")
    first, none = engine.ages(["kvs1/a", "kvs1/none"], LONG_S)
    assert (first is not None and 0 <= first < 3600, none) == (True, None)
    engine.touch(["kvs1/a", "kvs1/none"], 60, LONG_S)
    assert engine.ages(["kvs1/none"], LONG_S) == [None]


def test_what_is_not_there_is_missing(engine: RemoteEngine) -> None:
    assert get(engine, "kvs1/none") is None
    assert engine.exist(["kvs1/none"], LONG_S) == [False]
    assert list(engine.list("kvs1/", LONG_S)) == []
    engine.touch(["kvs1/none"], 60, LONG_S)
    engine.delete(["kvs1/none"], LONG_S)


def test_a_value_is_never_replaced(engine: RemoteEngine) -> None:
    assert put(engine, "kvs1/a", b"first")
    assert not put(engine, "kvs1/a", b"second")
    assert get(engine, "kvs1/a") == b"first"
    engine.delete(["kvs1/a"], LONG_S)
    assert put(engine, "kvs1/a", b"third")
    assert get(engine, "kvs1/a") == b"third"


def test_but_where_that_is_asked_for(engine: RemoteEngine) -> None:
    for value in (b"new", b"another, longer", b"", b"x" * 70_001):
        assert engine.put("kvs1/a", [value[:2], value[2:]], LONG_S, LONG_S, over=True)
        assert get(engine, "kvs1/a") == value
        assert not put(engine, "kvs1/a", b"never")
    assert engine.put("kvs1/a", [b"for ever"], LONG_S, over=True)
    assert (get(engine, "kvs1/a"), list(engine.list("kvs1/a", LONG_S))) == (b"for ever", ["kvs1/a"])
    with pytest.raises(RemoteTimeout):
        engine.put("kvs1/a", [b"late"], 0, over=True)
    assert get(engine, "kvs1/a") == b"for ever"


def test_of_writers_at_once_one_wins(engine: RemoteEngine) -> None:
    if not engine.limits.has_put_if_absent:
        return
    values = [random.randbytes(30_000) for _ in range(8)]
    won: list[bytes] = []
    run_together(
        *(lambda value=value: won.append(value) if put(engine, "kvs1/race", value) else None for value in values)
    )  # type: ignore[misc]
    assert won == [get(engine, "kvs1/race")]


def test_existence_is_told_key_by_key(engine: RemoteEngine) -> None:
    keys = [f"kvs1/e/{i:064x}" for i in range(100)]
    there = {key for key in keys if random.random() < 0.5}
    for key in there:
        put(engine, key, b"x")
    assert engine.exist(keys, LONG_S) == [key in there for key in keys]
    assert engine.exist([keys[0]] * 3, LONG_S) == [keys[0] in there] * 3
    assert engine.exist([], LONG_S) == []


def test_deleting(engine: RemoteEngine) -> None:
    keys = [f"kvs1/d/{i}" for i in range(20)]
    for key in keys:
        put(engine, key, b"x")
    assert engine.delete(keys[:12], LONG_S) == 12
    assert engine.exist(keys, LONG_S) == [False] * 12 + [True] * 8
    assert engine.delete([], LONG_S) == 0


def test_listing_by_prefix(engine: RemoteEngine) -> None:
    keys = {f"kvs1/{identity}/{i:02x}{i:060x}" for identity in ("aa", "ab", "b.") for i in range(40)}
    keys |= {"kvs1/a", "kvs1/aa/profile/7", "other/x"}
    for key in keys:
        put(engine, key, b"x")
    for prefix in ("", "kvs1", "kvs1/", "kvs1/a", "kvs1/aa/", "kvs1/aa/1", "kvs1/b.", "kvs1/b/", "none", "other/x"):
        assert set(engine.list(prefix, LONG_S)) == {key for key in keys if key.startswith(prefix)}, prefix


def test_values_live_on_without_ttl_and_with_a_long_one(engine: RemoteEngine) -> None:
    put(engine, "kvs1/a", b"a")
    put(engine, "kvs1/b", b"b", ttl_s=600)
    engine.touch(["kvs1/a", "kvs1/b"], 900, LONG_S)
    assert engine.exist(["kvs1/a", "kvs1/b"], LONG_S) == [True, True]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a/../b", ".", "a b", "a\r\nDEL", "a*", "ä", "~new/x", "x" * 513]
)
def test_what_is_no_key_is_refused(engine: RemoteEngine, key: str) -> None:
    for call in (
        lambda: put(engine, key, b"x"),
        lambda: get(engine, key),
        lambda: engine.exist([key], LONG_S),
        lambda: engine.delete(["ok", key], LONG_S),
        lambda: engine.touch([key], 60, LONG_S),
    ):
        with pytest.raises(ValueError, match="key: expected"):
            call()


def test_no_time_is_a_timeout(engine: RemoteEngine) -> None:
    for call in (
        lambda: engine.get_into("kvs1/a", memoryview(bytearray(1)), 0),
        lambda: engine.put("kvs1/a", [b"x"], 0),
        lambda: engine.exist(["kvs1/a"], 0),
        lambda: engine.delete(["kvs1/a"], 0),
        lambda: list(engine.list("kvs1/", 0)),
    ):
        with pytest.raises(RemoteTimeout):
            call()
    assert engine.stats()["timeouts"] == engine.stats()["failures"] == 5
    assert not engine.exist(["kvs1/a"], LONG_S)[0]


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_finite_number(engine: RemoteEngine, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        engine.exist(["kvs1/a"], timeout_s)


def test_larger_values_than_the_limit_are_not_sent(engine: RemoteEngine) -> None:
    part = bytes(1 << 20)
    with pytest.raises(RemoteTooLarge):
        engine.put("kvs1/a", [part] * (engine.limits.max_value_bytes // len(part) + 1), LONG_S)
    assert engine.exist(["kvs1/a"], LONG_S) == [False]


def test_what_is_counted(engine: RemoteEngine) -> None:
    put(engine, "kvs1/a", b"abc", b"de")
    put(engine, "kvs1/a", b"abc", b"de")
    get(engine, "kvs1/a")
    get(engine, "kvs1/b")
    stats = engine.stats()
    assert (stats["bytes_written"], stats["bytes_read"], stats["calls"], stats["failures"]) == (5, 5, 4, 0)


def test_many_threads_at_once(engine: RemoteEngine) -> None:
    """More than the engine serves at once; each sees its own values only."""

    def work(number: int) -> None:
        for turn in range(6):
            value = bytes([number]) * (1000 * turn + 1)
            assert put(engine, f"kvs1/t/{number}/{turn}", value)
            assert get(engine, f"kvs1/t/{number}/{turn}") == value
        assert engine.exist([f"kvs1/t/{number}/{turn}" for turn in range(8)], LONG_S) == [True] * 6 + [False] * 2

    run_together(*(lambda number=number: work(number) for number in range(24)))  # type: ignore[misc]


def test_a_closed_engine_is_unavailable(engine: RemoteEngine) -> None:
    engine.close()
    engine.close()
    for call in (
        lambda: put(engine, "kvs1/a", b"x"),
        lambda: get(engine, "kvs1/a"),
        lambda: engine.exist(["k"], LONG_S),
    ):
        with pytest.raises(RemoteUnavailable):
            call()


def test_keys_of_one_server_have_one_endpoint(engine: RemoteEngine) -> None:
    assert engine.endpoint("kvs1/a")
    assert engine.endpoint("kvs1/a") == engine.endpoint("kvs1/a")
