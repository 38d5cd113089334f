"""Servers behind TLS; tests/tiers/remote/test_contract.py asks them everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from remotecases import LONG_S, opened, put
from scripted import scripted, silence
from tlsproxy import tls_in_front_of, trusting
from valkeys import valkey

from kvstore.errors import RemoteTimeout, RemoteUnavailable

SOON_S = 0.1


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    with valkey() as server, tls_in_front_of(server.port, tmp_path) as port:
        with opened(f"valkeys://localhost:{port}") as engine, pytest.raises(RemoteUnavailable, match="certificate"):
            put(engine, "kvs1/a", b"a")
        with opened(f"valkeys://127.0.0.2:{port}", tls_context=trusting(tmp_path)) as engine:
            with pytest.raises(RemoteUnavailable):
                put(engine, "kvs1/a", b"a")


def test_a_server_without_tls_is_unavailable(tmp_path: Path) -> None:
    with valkey() as server, opened(f"rediss://127.0.0.1:{server.port}") as engine:
        with pytest.raises((RemoteUnavailable, RemoteTimeout)):
            engine.exist(["kvs1/a"], SOON_S)


def test_a_server_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    with scripted(silence) as server, opened(f"valkeys://127.0.0.1:{server.port}") as engine:
        with pytest.raises(RemoteTimeout):
            engine.exist(["kvs1/a"], SOON_S)
    with valkey() as server, tls_in_front_of(server.port, tmp_path) as port:
        with opened(f"valkeys://localhost:{port}", tls_context=trusting(tmp_path)) as engine:
            put(engine, "kvs1/a", b"a")
            server.stop()
            for call in (
                lambda: engine.get_into("kvs1/a", memoryview(bytearray(9)), SOON_S),
                lambda: engine.put("kvs1/b", [bytes(32 << 20)], SOON_S),
            ):
                with pytest.raises(RemoteTimeout):
                    call()
            server.go_on()
            assert engine.exist(["kvs1/a"], LONG_S) == [True]
