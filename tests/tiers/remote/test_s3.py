"""S3 stores that are weak, hang, refuse, are full, or are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remotecases import LONG_S, S3_KEYS, failures, get, opened, put
from remotestores import until
from s3servers import S3Server, s3_server
from valkeys import free_port

from kvstore.errors import ConfigError, RemoteError, RemoteFull, RemoteRefused, RemoteTimeout, RemoteUnavailable
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.opening import open_engine

SOON_S = 0.15


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def _fails(engine: RemoteEngine, timeout_s: float) -> set[type[BaseException]]:
    return set(failures(engine, timeout_s, 1 << 20))


@pytest.mark.parametrize("is_weak", [False, True])
def test_put_if_absent_is_found_out_at_opening_and_leaves_nothing_behind(is_weak: bool) -> None:
    with s3_server(is_weak) as server, opened(server.url, **S3_KEYS) as engine:
        assert engine.limits.has_put_if_absent is not is_weak
        assert not server.objects


def test_a_server_that_was_away_at_opening_is_tried_with_the_first_write(server: S3Server) -> None:
    server.goes_on.clear()
    with opened(server.url, timeout_s=SOON_S, **S3_KEYS) as engine:
        assert not engine.limits.has_put_if_absent
        server.goes_on.set()
        until(lambda: server.answered == server.requests > 0)  # the server may yet write what was given up
        assert put(engine, "kvs1/a", b"a")
        assert engine.limits.has_put_if_absent
        assert list(server.objects) == ["/records/kvs1/a"]


def test_a_server_that_hangs_and_goes_on(server: S3Server) -> None:
    with opened(server.url, **S3_KEYS) as engine:
        put(engine, "kvs1/a", b"a")
        server.goes_on.clear()
        assert _fails(engine, SOON_S) == {RemoteTimeout}
        server.goes_on.set()
        assert get(engine, "kvs1/a") == b"a"


def test_a_server_that_is_not_there_is_unavailable_and_asked_once() -> None:
    with opened(f"s3://records?endpoint=http://127.0.0.1:{free_port()}", **S3_KEYS) as engine:
        assert _fails(engine, LONG_S) == {RemoteUnavailable}


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, RemoteRefused), (401, RemoteRefused), (500, RemoteUnavailable), (503, RemoteUnavailable)],
)
def test_answers_that_are_errors_are_not_asked_for_again(
    server: S3Server, status: int, error: type[RemoteError]
) -> None:
    with opened(server.url, **S3_KEYS) as engine:
        server.refuses = status
        before = server.requests
        assert _fails(engine, LONG_S) == {error}
        assert server.requests - before <= 6  # one each; two for the two keys of `exist`


def test_a_full_store(server: S3Server) -> None:
    with opened(server.url, **S3_KEYS) as engine:
        server.refuses = 507
        with pytest.raises(RemoteFull):
            put(engine, "kvs1/a", b"a")


def test_objects_of_others_are_left_alone(server: S3Server) -> None:
    server.objects = {"/records/p/kvs1/a b": b"", "/records/kvs1/z": b"", "/other/p/kvs1/x": b""}
    with opened(server.url.replace("?", "/p?"), **S3_KEYS) as engine:
        assert put(engine, "kvs1/a", b"a")
        assert list(engine.list("", LONG_S)) == ["kvs1/a"]
        assert set(server.objects) == {"/records/p/kvs1/a", "/records/p/kvs1/a b", "/records/kvs1/z", "/other/p/kvs1/x"}


@pytest.mark.parametrize("url", ["s3://", "s3://b?x=1", "s3://key:secret@b", "s3://b#x"])
def test_urls_that_name_no_bucket(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine(url)
    assert "secret@" not in str(caught.value)


def test_settings_that_the_library_does_not_have() -> None:
    with pytest.raises(ConfigError):
        open_engine("s3://records", no_such_setting=1)
