"""What the published systems are measured with: the formats of their papers, and the line between two processes."""

from __future__ import annotations

import socket
from threading import Thread

import numpy as np
import pytest
from benchmodules import load

exponents = load("published.exponents")
transfer = load("published.transfer")
FORMS = load("published.splitzip").FORMS


def normal_bits(count: int, seed: int = 0) -> np.ndarray:
    """bfloat16, rounded towards zero."""
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_the_ablation_gives_back_every_bit(name: str) -> None:
    form = FORMS[name][0]
    values = normal_bits(5001)
    values[::97] = np.arange(len(values[::97]), dtype=np.uint16) * 1201  # exponents that no table has
    table = exponents.most_frequent(exponents.counts([normal_bits(3000, 1)]), form.entries)
    coded = exponents.encode(values, table, form)
    assert 40 < len(coded.exponents) < 1000
    assert np.array_equal(exponents.decode(coded, table, form), values)


def test_coverage_is_the_share_of_values_that_have_a_code() -> None:
    counts = exponents.counts([normal_bits(4096)])
    table = exponents.most_frequent(counts, 8)
    coded = exponents.encode(normal_bits(4096), table, exponents.Form(codes=8))
    assert exponents.covered(counts, table) == 1 - len(coded.exponents) / 4096
    assert 2 < exponents.entropy(counts) < 3
    size, escapes = exponents.window_bytes(normal_bits(4096), 1024)
    assert size == 4096 * 3 // 2 + 4 * 5 + 3 * escapes


@pytest.mark.parametrize("mode", transfer.MODES)
def test_a_cache_that_is_sent_arrives(mode: str) -> None:
    values = normal_bits(transfer.CHUNK // 4)
    values = np.concatenate([values] * 8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = Thread(target=transfer.receive, args=(server.getsockname()[1],))
        receiver.start()
        with server.accept()[0] as line:
            sender = transfer.Sender(line, values)
            assert [sender.send(mode, rate) > 0 for rate in (None, 4e9)] == [True, True]
            line.sendall(transfer._ORDER.pack(0, False))
        receiver.join(30)
    assert not receiver.is_alive()


def test_a_line_lets_no_more_pass_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(transfer.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    bucket = transfer.Bucket(1e6)
    for _ in range(20):
        bucket.take(1 << 20)
    assert clock[0] == pytest.approx(19 * (1 << 20) / 1e6)
