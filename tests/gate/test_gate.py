"""What the gate lets through: everything as long as nothing is known, then what pays, without going back and forth."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.gate.gate import Gate, device_kind
from kvstore.gate.load import LoadCost, Part

DISK = [Part("disk", "raw", 100_000, 100)] * 20  # 2,000 tokens of 1,000 bytes


def gate(token_s: float = 0.001, byte_s: float = 1e-9, **more: Any) -> Gate:
    made = Gate(True, LoadCost(bytes_per_token=1000, threads=2), **more)
    if token_s:
        made.observe_prefill(2000, 2000 * token_s)
    if byte_s:
        for nbytes in (100_000, 2_000_000):
            made.observe_read("disk", nbytes, nbytes * byte_s)
    return made


def test_without_knowledge_of_either_side_everything_is_loaded() -> None:
    assert gate(token_s=0).decide(DISK, "cpu").parts == 20
    assert gate(byte_s=0).decide(DISK, "cpu").parts == 20
    assert gate(byte_s=1e-3).decide(DISK, "cuda:1").parts == 20  # passes were seen on the CPU


def test_what_pays_is_loaded_and_what_does_not_is_not() -> None:
    assert gate(byte_s=1e-9).decide(DISK, "cpu").parts == 20
    refused = gate(byte_s=1e-5).decide(DISK, "cpu")
    assert refused.parts == 0
    assert refused.load_s > 10 * refused.saved_s > 0


def test_a_beginning_in_memory_is_loaded_without_the_rest() -> None:
    near = [Part(None, "raw", 0, 100)] * 5
    assert gate(byte_s=1e-5).decide([*near, *DISK], "cpu").parts == 5
    assert gate(byte_s=1e-5).decide([*near, *DISK], "cpu", whole=True).parts == 0
    assert gate(byte_s=1e-9).decide([*near, *DISK], "cpu", whole=True).parts == 25


@pytest.mark.parametrize("passes", [[(65, 9.58), (492, 3.53)], [(65, 2.0), (492, 1.4)], [(492, 1.4), (65, 2.0)]])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_pass_that_was_held_up_does_not_say_that_tokens_cost_nothing(
    passes: list[tuple[int, float]], device: str
) -> None:
    made = gate(token_s=0)
    for tokens, seconds in passes:
        made.observe_prefill(tokens, seconds, device=device)
    found = made.stats()
    assert 0 < found[f"{device}_pass_s"] <= 1025 * found[f"{device}_token_s"]
    assert made.decide(DISK[:4], device, total=401).parts == 4  # 400 tokens, which the disk has in half a millisecond


def test_far_beyond_what_was_seen_nothing_is_concluded() -> None:
    assert gate(byte_s=1e-5).decide(DISK * 5, "cpu").parts == 100


def test_a_rate_from_the_settings_is_knowledge() -> None:
    made = gate(token_s=0, byte_s=1e-5, tokens_per_s=1000.0)
    assert made.is_informed
    assert made.knows("cuda")
    assert made.decide(DISK, "cuda").parts == 0
    assert made.prefill_seconds(500) == 0.5


def test_two_ways_that_take_as_long_do_not_alternate() -> None:
    made = gate(byte_s=0.00092e-3)  # 92 % of what computing takes
    assert made.decide(DISK, "cpu").parts == 0
    made.note(2000, refused=False)
    assert made.decide(DISK, "cpu").parts == 20
    made.note(2000, refused=True)
    for _ in range(10):
        made.observe_read("disk", 2_000_000, 2_000_000 * 0.00087e-3)  # a little better: not by enough
    assert made.decide(DISK, "cpu").parts == 0


HOST = [Part(None, "splitzip", 0, 100)] * 20


def got(made: Gate, seconds: float) -> None:
    """A get of these blocks that took so long, beside decoding as long."""
    for part in HOST:
        made.observe_decode(part.codec, part.tokens, seconds / len(HOST))
    made.observe_rest("cpu", 2000, seconds)
    made.note(2000, refused=False)


def test_one_slow_get_of_what_is_in_memory_stops_no_other() -> None:
    made = gate()
    got(made, 30.0)
    assert made.decide(HOST, "cpu").parts == 20
    for _ in range(3):
        got(made, 0.001)
    got(made, 30.0)
    assert made.decide(HOST, "cpu").parts == 20


def test_memory_that_was_slow_for_long_is_tried_again_and_again() -> None:
    made, loaded = gate(), []
    for _ in range(6):
        got(made, 30.0)
    for _ in range(12):
        loaded.append(made.decide(HOST, "cpu").parts)
        made.note(2000, refused=not loaded[-1])
    assert loaded == [0, 0, 0, 20] * 3
    got(made, 0.001)
    assert [made.decide(HOST, "cpu").parts for _ in range(5)] == [20] * 5


def test_slow_storage_is_not_tried_for_that() -> None:
    made = gate(byte_s=1e-5)
    for _ in range(12):
        assert made.decide(DISK, "cpu").parts == 0
        made.note(2000, refused=True)


def test_a_timed_read_that_is_far_off_begins_anew() -> None:
    made = gate(byte_s=1e-5)
    made.check("disk", [(4096, 1e-4), (65536, 1.5e-4)])
    assert made.decide(DISK, "cpu").parts == 20
    made.check("disk", [(4096, 1.1e-4)])  # about as expected: nothing is forgotten
    assert len(made.load.reads["disk"]) == 3


def test_a_tier_is_due_once_in_a_while() -> None:
    now = [100.0]
    made = gate(clock=lambda: now[0])
    assert not made.is_due("disk")  # it was read just now
    now[0] += 11
    assert made.is_due("disk")
    assert not made.is_due("disk")
    assert made.is_due("remote")


def test_numbers_of_what_is_known() -> None:
    found = gate().stats()
    assert found["enabled"] == 1
    assert found["cpu_prefill_seen_s"] == 2.0
    assert found["disk_s_per_MB"] == pytest.approx(1e-3, rel=0.05)
    assert gate(token_s=0, byte_s=0).stats() == {"enabled": 1}


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1", None])
def test_seconds_that_are_none_are_refused(bad: Any) -> None:
    made = gate(token_s=0)
    with pytest.raises(ValueError, match="seconds"):
        made.observe_prefill(10, bad)
    assert not made.is_informed


@pytest.mark.parametrize(("name", "given"), [("tokens", 0), ("tokens", 1.5), ("start", -1), ("start", True)])
def test_counts_that_are_none_are_refused(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=name):
        gate().observe_prefill(**{"tokens": 10, "seconds": 1.0, name: given})
    with pytest.raises(ValueError, match=name):
        gate().prefill_seconds(**{"tokens": 10, name: given})


def test_a_codec_that_the_disk_waits_for_is_named() -> None:
    assert gate(byte_s=1e-10).faster_codec("predictive", "disk") == ("splitzip", pytest.approx(12.5))
    assert gate(byte_s=1e-7).faster_codec("predictive", "disk") is None  # of 10 MB/s: the smallest is the fastest
    assert gate(byte_s=0).faster_codec("predictive", "disk") is None


def test_kinds_of_devices() -> None:
    assert [device_kind(x) for x in (None, "cpu", "cuda:1")] == ["cpu", "cpu", "cuda"]


def test_what_loading_takes_is_told_apart_into_reading_and_decoding() -> None:
    gate = Gate(True, LoadCost(bytes_per_token=1000, threads=2))
    parts = [Part("disk", "raw", 3_000_000, 100), Part(None, "raw", 5, 50)]
    reading, decoding = gate.loading(parts)
    assert reading == pytest.approx(0.001)  # as from a fast disk
    assert decoding == pytest.approx(150_000 / 4e9)
    for nbytes in (1_000_000, 2_000_000, 4_000_000):
        gate.observe_read("disk", nbytes, nbytes / 1e8)
    for _ in range(80):
        gate.observe_decode("raw", 10, 0.01)
    reading, decoding = gate.loading(parts)
    assert reading == pytest.approx(0.03, rel=0.1)
    assert decoding == pytest.approx(150 * 0.001)
    assert gate.loading([]) == (0, 0)
