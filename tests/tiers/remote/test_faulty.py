"""What a plan says goes wrong, and nothing else."""

from __future__ import annotations

from dataclasses import fields

import pytest
from remotecases import LONG_S, get, opened, put

from kvstore.errors import RemoteFull, RemoteTimeout, RemoteUnavailable
from kvstore.tiers.remote.engines.faulty import FaultPlan

VALUES = {f"kvs1/{number}": bytes([number]) * (50 + number) for number in range(60)}


def test_without_faults_it_is_the_engine_inside() -> None:
    with opened("memory:faulty-none", faults=FaultPlan()) as engine:
        assert put(engine, "kvs1/a", b"a")
        assert get(engine, "kvs1/a") == b"a"
        assert list(engine.list("", LONG_S)) == ["kvs1/a"]
        assert engine.delete(["kvs1/a"], LONG_S) == 1
        assert not [name for name in engine.stats() if name.startswith("faults_")]


def _reads(**shares: float) -> list[bytes | None]:
    name = f"faulty-{sorted(shares)}"
    with opened(f"memory:{name}") as engine:
        for key, value in VALUES.items():
            put(engine, key, value)
    with opened(f"memory:{name}", faults=FaultPlan(seed=7, **shares)) as engine:  # type: ignore[arg-type]
        found = [get(engine, key) for key in VALUES]
        changed = sum(one != value for one, value in zip(found, VALUES.values(), strict=True))
        assert changed == sum(engine.stats().get(f"faults_{kind}", 0) for kind in shares)
        assert 0 < changed < len(VALUES)
    return found


def test_values_that_are_missing() -> None:
    assert None in _reads(missing=0.5)


def test_values_with_another_bit() -> None:
    for found, value in zip(_reads(flipped=0.5), VALUES.values(), strict=True):
        wrong = int.from_bytes(found or b"") ^ int.from_bytes(value)
        assert wrong.bit_count() in (0, 1)


def test_values_cut_short() -> None:
    assert all(
        value.startswith(found or b"") for found, value in zip(_reads(truncated=0.5), VALUES.values(), strict=True)
    )


def test_values_of_other_keys() -> None:
    assert set(_reads(swapped=0.5)) <= set(VALUES.values())


def test_the_same_seed_gives_the_same_faults() -> None:
    assert _reads(flipped=0.5) == _reads(flipped=0.5)


def test_calls_that_fail_and_writes_to_a_full_server() -> None:
    with opened("memory:faulty-calls", faults=FaultPlan(failing=1.0)) as engine:
        for call in (lambda: put(engine, "kvs1/a", b"a"), lambda: get(engine, "kvs1/a"), lambda: [*engine.list("", 1)]):
            with pytest.raises(RemoteUnavailable):
                call()
    with opened("memory:faulty-calls", faults=FaultPlan(full=1.0)) as engine, pytest.raises(RemoteFull):
        put(engine, "kvs1/a", b"a")
    with opened("memory:faulty-calls") as engine:
        assert get(engine, "kvs1/a") is None


def test_calls_that_hang_take_all_of_their_time_and_may_have_happened() -> None:
    with opened("memory:faulty-hang", faults=FaultPlan(hanging=1.0)) as engine:
        with pytest.raises(RemoteTimeout):
            engine.put("kvs1/a", [b"a"], 0.01)
        engine.plan = FaultPlan()  # type: ignore[attr-defined]
        assert get(engine, "kvs1/a") == b"a"


def test_a_delay_counts_towards_the_time_of_the_call() -> None:
    plan = FaultPlan(delayed=1.0, delay_s=LONG_S * 10)
    with opened("memory:faulty-late", faults=plan) as engine, pytest.raises(RemoteTimeout):
        engine.exist(["kvs1/a"], 0.01)


def test_values_that_are_said_to_be_there() -> None:
    with opened("memory:faulty-ghosts", faults=FaultPlan(ghosts=1.0)) as engine:
        assert engine.exist(["kvs1/a", "kvs1/b"], LONG_S) == [True, True]
        assert get(engine, "kvs1/a") is None


def test_every_kind_of_fault_has_a_share_that_is_0_at_first() -> None:
    assert all(getattr(FaultPlan(), one.name) == 0 for one in fields(FaultPlan))
