"""Servers that speak the protocol wrongly, or not at all: a typed error, in time, and the connection is gone."""

from __future__ import annotations

import socket
import threading
import tracemalloc

import pytest
from remotecases import LONG_S, get, opened
from scripted import HELLO, Step, byte_by_byte, scripted, silence

from kvstore.errors import RemoteError, RemoteGarbled, RemoteTimeout, RemoteTooLarge, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.address import Address, Dialer
from kvstore.tiers.remote.engines.resp.connection import refuse
from kvstore.tiers.remote.engines.resp.replies import ErrorReply

SOON_S = 0.1
VALUE = b"$5\r\nvalue\r\n"


def test_a_scripted_server_can_also_be_an_honest_one() -> None:
    with scripted(HELLO, VALUE, VALUE) as server, opened(server.url) as engine:
        assert get(engine, "kvs1/a") == get(engine, "kvs1/a") == b"value"
        assert server.connections == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\xff" * 4000,
        b"$-2\r\n",
        b"$5x\r\nvalue\r\n",
        b"$\r\n\r\n",
        b"$ 5\r\nvalue\r\n",
        b"$" + b"9" * 20 + b"\r\n",
        b"$" + b"1" * 5000 + b"\r\n",
        b"$9223372036854775808\r\n",
        b"$?\r\n;5\r\nvalue\r\n;0\r\n",
        b":5\r\n",
        b"+value\r\n",
        b"*1\r\n$5\r\nvalue\r\n",
        b"$5\r\nvalueXX",
        b"$5\r\nvalue\n\n",
        b">2\r\n$10\r\ninvalidate\r\n*0\r\n",
    ],
)
def test_garbage_for_a_value(garbage: bytes) -> None:
    with scripted(HELLO, garbage) as server, opened(server.url) as engine:
        for number in (1, 2):
            with pytest.raises(RemoteGarbled):
                get(engine, "kvs1/a")
            assert server.connections == number


@pytest.mark.parametrize(
    "garbage",
    [
        b"nonsense\r\n",
        b"*1000000\r\n",
        b"*99999999999\r\n",
        b"%-1\r\n",
        b"$1048577\r\n",
        b"*1\r\n" * 12 + b":1\r\n",
        b"*2\r\n$1000000\r\n" + bytes(1_000_000) + b"\r\n$1000000\r\n",
        b":1.5\r\n",
        b":\r\n",
        b":--1\r\n",
        b":99999999999999999999\r\n",
        b"#x\r\n",
        b"$3\r\n1\r\n\r\n",
        b"+OK\r\n",
        b"_\r\n",
    ],
)
def test_garbage_for_a_number(garbage: bytes) -> None:
    with scripted(HELLO, garbage) as server, opened(server.url) as engine, pytest.raises(RemoteGarbled):
        engine.exist(["kvs1/a"], LONG_S)


@pytest.mark.parametrize(
    "garbage", [b"+OK\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n$1\r\nx\r\n*0\r\n", b"*2\r\n$1\r\n0\r\n:1\r\n"]
)
def test_garbage_for_a_list(garbage: bytes) -> None:
    with scripted(HELLO, garbage + b"\r\n") as server, opened(server.url) as engine, pytest.raises(RemoteGarbled):
        list(engine.list("kvs1/", LONG_S))


def test_names_that_are_no_keys_are_not_listed() -> None:
    names = [b"kvs1/a", b"kvs1/../../etc", b"kvs1/" + b"x" * 600, b"kvs1/\xff", b"other/a", b"kvs1/b"]
    found = b"".join(b"$%d\r\n%s\r\n" % (len(name), name) for name in names)
    with scripted(HELLO, b"*2\r\n$1\r\n0\r\n*6\r\n" + found) as server, opened(server.url) as engine:
        assert list(engine.list("kvs1/", LONG_S)) == ["kvs1/a", "kvs1/b"]


def test_nothing_is_allocated_for_what_is_only_announced() -> None:
    for announced in (b"$500000000\r\n", b"*900000000\r\n"):
        with scripted(HELLO, announced) as server, opened(server.url) as engine:
            tracemalloc.start()
            with pytest.raises(RemoteError):
                engine.exist(["kvs1/a"], LONG_S)
            with pytest.raises(RemoteError):
                get(engine, "kvs1/a", room=100)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert most < 1 << 20


def test_a_value_larger_than_the_buffer_leaves_no_connection_behind() -> None:
    with scripted(HELLO, b"$101\r\n" + bytes(101) + b"\r\n") as server, opened(server.url) as engine:
        with pytest.raises(RemoteTooLarge):
            get(engine, "kvs1/a", room=100)
        with pytest.raises(RemoteTooLarge):
            get(engine, "kvs1/a", room=100)
        assert server.connections == 2


def test_a_reply_that_nobody_asked_for_is_not_taken_for_the_next() -> None:
    """The connection with two replies to one command is not used again."""
    with scripted(HELLO, VALUE + b"$5\r\nwrong\r\n", VALUE) as server, opened(server.url) as engine:
        assert get(engine, "kvs1/a") == b"value"
        assert get(engine, "kvs1/b") == b"value"
        assert server.connections == 2


def half_of_a_value(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"$1000\r\nabc")
    silence(connection, over)


STUCK: dict[str, list[Step]] = {
    "never greets": [silence],
    "never answers": [HELLO, silence],
    "a byte at a time": [HELLO, byte_by_byte(b"$1000\r\n" + bytes(1000), pause_s=SOON_S / 8)],
    "greets a byte at a time": [byte_by_byte(b"+" + b"x" * 1000, pause_s=SOON_S / 8)],
    "half of a value": [
        HELLO,
        lambda connection, over: (connection.sendall(b"$1000\r\nabc"), silence(connection, over))[1],
    ],
}


@pytest.mark.parametrize("name", STUCK)
def test_a_server_that_hangs_is_a_timeout(name: str) -> None:
    with scripted(*STUCK[name]) as server, opened(server.url) as engine:
        buffer = memoryview(bytearray(1000))
        with pytest.raises(RemoteTimeout):
            engine.get_into("kvs1/a", buffer, SOON_S)
        with pytest.raises(RemoteTimeout):
            engine.put("kvs1/a", [bytes(100)], SOON_S)
        with pytest.raises(RemoteError):
            engine.exist(["kvs1/a"], SOON_S)
        assert engine.stats()["timeouts"] >= 2
        assert server.connections == 3  # none is used again


def test_a_server_that_does_not_read_is_a_timeout() -> None:
    with scripted(HELLO, silence) as server, opened(server.url) as engine, pytest.raises(RemoteTimeout):
        engine.put("kvs1/a", [bytes(64 << 20)], SOON_S)


@pytest.mark.parametrize("said", [b"", b"$", b"$1000\r\n", b"$1000\r\n" + bytes(500), b"$3\r\nabc\r"])
def test_a_connection_that_ends_half_way_is_unavailable(said: bytes) -> None:
    with scripted(HELLO, said) as server, opened(server.url) as engine, pytest.raises(RemoteUnavailable):
        get(engine, "kvs1/a")


@pytest.mark.parametrize("moved", ["MOVED 1 10.0.0.1:99999", "MOVED 1 10.0.0.1:0", "ASK 1 a\0b:6379"])
def test_a_key_that_moved_to_where_no_server_can_be(moved: str) -> None:
    with pytest.raises(RemoteGarbled, match="the address of a server"):
        refuse(ErrorReply(moved))


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "."])
def test_a_name_that_no_server_can_have_is_not_reached(host: str) -> None:
    dialer = Dialer()
    with pytest.raises(RemoteUnavailable):
        dialer.dial(Address.said(host, 6379), Deadline(LONG_S))
    dialer.close()
