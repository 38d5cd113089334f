"""What comes over the socket is checked, whoever sent it; so is the memory that comes with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import IDENTITY, config, kv_of, tokens_of

from kvstore import SharedKVStore
from kvstore.core.keys import NamespaceDigest
from kvstore.core.learning_status import LearningStatus
from kvstore.core.prepared import PreparedCache
from kvstore.core.states import State
from kvstore.shared.calls import PrefixMissing, from_wire, pack_error, pack_result, result_of, to_wire
from kvstore.shared.memory import can_read, probe
from kvstore.shared.owner import FolderSocket
from kvstore.shared.shipment import Shipment, fetch, unship
from kvstore.shared.wire import Disconnected, Late, receive, send
from kvstore.tiers.buffers import BufferPool

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_as_they_were_sent(pair: Pair) -> None:
    message = {"call": "x", "arguments": {"a": b"1" * 100_000, "b": [1, 2.5, None, "t"]}}
    sender = threading.Thread(target=send, args=(pair[0], message))
    sender.start()
    assert receive(pair[1]) == (message, None)
    sender.join()
    fd = os.open(os.devnull, os.O_RDONLY)
    send(pair[0], {"a": 1}, fd)
    os.close(fd)
    found, theirs = receive(pair[1])
    assert found == {"a": 1}
    assert theirs is not None
    os.close(theirs)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"kvs1",
        struct.pack("<4sI", b"kvs1", 1 << 31),
        struct.pack("<4sI", b"kvs1", 3) + b"\xc1\xc1\xc1",
        struct.pack("<4sI", b"kvs1", 1) + b"\x01",
        struct.pack("<4sI", b"kvs1", 9) + b"\x81",
        struct.pack("<4sI", b"kvs1", 5) + b"\xdf\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_message_end_the_connection(pair: Pair, data: bytes) -> None:
    pair[0].sendall(data)
    pair[0].close()
    with pytest.raises(Disconnected):
        receive(pair[1])


def test_descriptors_of_a_refused_message_are_closed(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file:
        socket.send_fds(pair[0], [b"x" * 8], [file.fileno()] * 3)
        with pytest.raises(Disconnected):
            receive(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_that_does_not_come_is_late(pair: Pair) -> None:
    pair[1].settimeout(0.01)
    with pytest.raises(Late):
        receive(pair[1])


def test_arguments_and_results_survive_the_way() -> None:
    value = {"tokens": np.arange(3, dtype=np.uint32), "logprobs": np.ones(2), "namespace": NamespaceDigest(bytes(32))}
    back = from_wire(to_wire(value))
    assert back["tokens"].tolist() == [0, 1, 2]
    assert back["logprobs"].dtype == np.float64
    assert isinstance(back["namespace"], NamespaceDigest)
    for wrong in ({"": "O", "data": b""}, {"": "<u4", "data": 5}, {"": None}):
        with pytest.raises(ValueError):
            from_wire(wrong)
    with pytest.raises(KeyError, match="no session"):
        result_of(pack_error(KeyError("no session")))
    with pytest.raises(PrefixMissing) as missing:
        result_of(pack_error(PrefixMissing(16)))
    assert missing.value.begin == 16
    assert result_of(pack_result(7)) == 7
    learned = LearningStatus("adopted", blocks=9, before=1.5, after=1.9)
    assert result_of(pack_result(learned)) == learned


def _cache(count: int = 10) -> PreparedCache:
    states = (State(0, 0, True, torch.arange(6.0), None),)
    return PreparedCache(tuple(kv_of(tokens_of(1, count))), states)


LAYOUT = IDENTITY.layout
POOL = BufferPool(1 << 20)


def by_memory(shipment: Shipment, told: dict[str, Any]) -> Any:
    return fetch(os.getpid(), {"places": shipment.places, **told}, LAYOUT, 10, POOL.take)


def by_descriptor(shipment: Shipment, told: dict[str, Any]) -> Any:
    fd = shipment.sealed()
    try:
        return unship(fd, told)
    finally:
        os.close(fd)


@pytest.mark.parametrize("way", [by_memory, by_descriptor])
def test_a_shipment_holds_the_tensors_from_a_token_on(way: Any) -> None:
    cache = _cache()
    shipment = Shipment.of(cache, 4)
    layers, states = way(shipment, shipment.told)
    for got, want in zip(layers, cache.layers, strict=True):
        assert all(torch.equal(a.view(torch.int16), b[:, 4:].view(torch.int16)) for a, b in zip(got, want, strict=True))
    assert torch.equal(states[0].conv, torch.arange(6.0))
    assert states[0].has_previous
    layers[0][0].zero_()  # what arrived is the owner's
    assert not torch.equal(cache.layers[0][0].view(torch.int16), torch.zeros(1, 10, 4, dtype=torch.int16))


@pytest.mark.parametrize("way", [by_memory, by_descriptor])
@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["tensors"].pop(),
        lambda told: told["tensors"][0].__setitem__(0, "int64"),
        lambda told: told["tensors"][0].__setitem__(1, [1, 1 << 40, 1 << 40]),
        lambda told: told["tensors"][0].__setitem__(1, [1, -1, 4]),
        lambda told: told["tensors"][0].__setitem__(1, "abc"),
        lambda told: told["tensors"][0].__setitem__(2, 1 << 20),
        lambda told: told["tensors"][0].__setitem__(2, 1),
        lambda told: told.__setitem__("states", [0, 1 << 40]),
        lambda told: told.__setitem__("tensors", None),
        lambda told: told.__setitem__("size", -1),
        lambda told: told.__setitem__("size", 1 << 40),
    ],
)
def test_a_shipment_that_says_something_else_is_refused(change: Any, way: Any) -> None:
    shipment = Shipment.of(_cache(), 0)
    told = {**shipment.told, "tensors": [list(row) for row in shipment.told["tensors"]]}
    change(told)
    with pytest.raises(ValueError, match="shipment"):
        way(shipment, told)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda rows: rows.pop(), ValueError),
        (lambda rows: rows[0].__setitem__(2, 1 << 40), ValueError),
        (lambda rows: rows[1].__setitem__(0, 0), ValueError),
        (lambda rows: rows[0].__setitem__(1, -1), ValueError),
        (lambda rows: rows.append("x"), ValueError),
        (lambda rows: rows[0].__setitem__(1, 4096), OSError),
    ],
)
def test_places_that_do_not_fit_are_refused(change: Any, error: type[Exception]) -> None:
    shipment = Shipment.of(_cache(), 0)
    rows = [list(row) for row in shipment.places]
    change(rows)
    with pytest.raises(error):
        by_memory(shipment, {**shipment.told, "places": rows})


def test_tensors_whose_heads_or_tokens_lie_apart_arrive_whole() -> None:
    """A cache in reserved space, one with the heads behind the tokens, and one token of a larger one."""
    made = torch.arange(2 * 40 * 4, dtype=torch.int16).view(torch.bfloat16)
    apart = made.view(2, 40, 4)[:, 3:13]
    swapped = made.view(40, 2, 4).transpose(0, 1)[:, :10]
    cache = PreparedCache(((apart, swapped), (swapped[:, 4:5], apart[:, 2:3])))
    for way in (by_descriptor, lambda s, told: fetch(os.getpid(), {"places": s.places, **told}, LAYOUT, 99, POOL.take)):
        shipment = Shipment.of(cache, 0)
        layers, _ = way(shipment, shipment.told)
        for got, want in zip(layers, cache.layers, strict=True):
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, want, strict=True))


def test_a_process_that_cannot_be_read_is_noticed() -> None:
    assert can_read(os.getpid(), probe())
    assert not can_read(os.getpid(), 4096)
    assert not can_read(os.getpid(), 1 << 70)
    assert not can_read(1 << 30, probe())


def test_memory_that_may_still_change_is_refused() -> None:
    """A file that becomes shorter under a map would end the owner by a signal."""
    told = Shipment.of(_cache(), 0).told
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ValueError, match="not sealed"):
        unship(fd, told)
    os.close(fd)
    with open(os.devnull) as file, pytest.raises((ValueError, OSError)):
        unship(file.fileno(), told)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"call": "close", "arguments": {}},
        {"call": "__init__", "arguments": {}},
        {"call": "put", "arguments": {}},
        {"call": "put", "arguments": []},
        {"call": "put", "arguments": {"tokens": {"": "<u4", "data": b"\x01\0\0\0"}, "kv": 3}},
        {"call": ["put"], "arguments": {}},
        {"call": "flush", "arguments": {"x": 1}},
        {"call": "delete", "arguments": {"tokens": "x", "namespace": b"", "erase": False}},
    ],
)
def test_an_owner_answers_a_call_that_it_cannot_make_with_an_error(tmp_path: Path, message: dict[str, Any]) -> None:
    with SharedKVStore(tmp_path, IDENTITY, config()) as store, socket.socket(socket.AF_UNIX) as sock:
        with FolderSocket(str(tmp_path)) as address:
            sock.connect(address)
        send(sock, message)
        answer, _ = receive(sock)
        assert answer["error"] in ("ValueError", "TypeError", "LayoutMismatch")
        assert answer["text"]
        send(sock, {"call": "flush", "arguments": {}})
        assert result_of(receive(sock)[0]).dropped_blocks == 0
        assert store.check().problems == ()


def test_an_owner_outlives_a_connection_that_speaks_something_else(tmp_path: Path) -> None:
    tokens = tokens_of(1, 5)
    with SharedKVStore(tmp_path, IDENTITY, config()) as store:
        with FolderSocket(str(tmp_path)) as address, socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)
            sock.sendall(b"\0" * 4096)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert store.put(tokens, kv_of(tokens)).new_blocks == 2
