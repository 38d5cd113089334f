"""What a cluster says of its slots, true or not."""

from __future__ import annotations

import pytest

from kvstore.errors import RemoteGarbled
from kvstore.tiers.remote.engines.resp.address import Address
from kvstore.tiers.remote.engines.resp.slots import SLOTS, SlotMap, slot_of

ASKED = Address("10.0.0.9", 7000)


def _run(first: int, last: int, host: object = b"10.0.0.1", port: object = 7001) -> list[object]:
    return [first, last, [host, port, b"id", []], [b"10.0.0.2", 7002, b"replica", []]]


def test_runs_name_the_nodes_that_take_writes() -> None:
    slots = SlotMap.parse([_run(0, 8000), _run(8001, SLOTS - 1, port=7005)], ASKED)  # type: ignore[list-item]
    assert slots.nodes() == [Address("10.0.0.1", 7001), Address("10.0.0.1", 7005)]
    for key in ("kvs1/a", "kvs1/b", "kvs1/c"):
        assert slots.owner(key) == Address("10.0.0.1", 7001 if slot_of(key) <= 8000 else 7005)


@pytest.mark.parametrize("host", [None, b"", b"?"])
def test_a_node_that_does_not_know_its_name_is_where_it_was_asked(host: object) -> None:
    assert SlotMap.parse([_run(0, 1, host)], ASKED).nodes() == [Address("10.0.0.9", 7001)]  # type: ignore[list-item]


def test_slots_of_no_node_have_no_owner_until_they_move() -> None:
    slots = SlotMap.parse([], ASKED)
    assert slots.owner("kvs1/a") is None
    slots.move("kvs1/a", ASKED)
    assert slots.owner("kvs1/a") == ASKED
    assert slots.nodes() == [ASKED]


@pytest.mark.parametrize(
    "said",
    [
        b"OK",
        None,
        [1],
        [[]],
        [_run(-1, 5)],
        [_run(5, 4)],
        [_run(0, SLOTS)],
        [_run(0, 1, port=0)],
        [_run(0, 1, port=70_000)],
        [_run(0, 1, port=b"7001")],
        [_run(0, 1, host=7)],
        [_run(0, 1, host=b"x" * 300)],
        [_run(0, 1, host=b"10.0.0.1\0.example")],
        [_run(0, 1, host=b"\xff\xfe")],
        [_run(0, SLOTS - 1), _run(0, SLOTS - 1)],
        [[0, 1]],
        [_run(slot, slot, port=slot + 1) for slot in range(5000)],
    ],
)
def test_what_is_no_list_of_runs_is_garbage(said: object) -> None:
    with pytest.raises(RemoteGarbled):
        SlotMap.parse(said, ASKED)  # type: ignore[arg-type]
