"""The estimates beside the store: they come back, and whatever else stands there is as good as none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvstore.gate import saved
from kvstore.gate.gate import Gate
from kvstore.gate.load import LoadCost
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.fs import FileSystem


def informed() -> Gate:
    gate = Gate(True, LoadCost(bytes_per_token=1000, threads=2))
    gate.observe_prefill(2000, 4.0, start=10)
    gate.observe_prefill(1, 0.1, start=10)
    gate.observe_read("disk", 100_000, 0.01)
    gate.observe_decode("raw", 64, 1e-4)
    gate.observe_rest("cpu", 64, 1e-3)
    return gate


def kept(folder: Path) -> dict[str, Any]:
    found = informed().news()
    assert found is not None
    saved.write(FileSystem(), str(folder), found, Metrics())
    return json.loads((folder / saved.NAME).read_bytes().partition(b"\n")[0])


def write(folder: Path, document: Any) -> None:
    body = json.dumps(document).encode() + b"\n"
    (folder / saved.NAME).write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")


def test_what_was_seen_comes_back(tmp_path: Path) -> None:
    kept(tmp_path)
    metrics = Metrics()
    found = saved.read(FileSystem(), str(tmp_path), metrics)
    assert found is not None
    again = Gate(True, LoadCost(bytes_per_token=1000, threads=2))
    again.restore(found)
    assert again.stats() == pytest.approx(informed().stats(), rel=1e-6)
    assert again.news() is None  # nothing that was not known
    assert metrics.snapshot() == {}
    again.observe_prefill(10, 0.1)
    assert again.news() is not None


def test_a_gate_that_knows_nothing_of_computing_keeps_nothing() -> None:
    gate = Gate(True, LoadCost(bytes_per_token=1000, threads=2))
    gate.observe_read("disk", 100_000, 0.01)
    assert gate.news() is None


def test_no_file_and_one_of_another_machine_are_no_damage(tmp_path: Path) -> None:
    metrics = Metrics()
    assert saved.read(FileSystem(), str(tmp_path), metrics) is None
    write(tmp_path, kept(tmp_path) | {"machine": "another"})
    assert saved.read(FileSystem(), str(tmp_path), metrics) is None
    write(tmp_path, kept(tmp_path) | {"version": 2})
    assert saved.read(FileSystem(), str(tmp_path), metrics) is None
    assert metrics.snapshot() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": {"cpu": [1.0, 10, [[1.0, 1.0, 0.0]], []]}},
        {"prefill": {"cpu": [1.0, 10, [[1.0, 1.0, -1.0]], []]}},
        {"prefill": {"cpu": [1.0, 10, [[1.0, 1.0]], []]}},
        {"prefill": {"cpu": [1.0, 10, [], []]}},
        {"prefill": {"cpu": [1.0, 10, [[1.0, 1.0, 1.0]] * 321, []]}},
        {"prefill": {"cpu": [1.0, 1e30, [[1.0, 1.0, 1.0]], []]}},
        {"prefill": {"cpu": [True, 10, [[1.0, 1.0, 1.0]], []]}},
        {"prefill": {"cpu": [1.0, 10]}},
        {"prefill": {"cpu": [1.0, 10, [[1.0, 1.0, 1.0]], [0.0]]}},
        {"prefill": {"cpu": [1.0, 10, [[1.0, 1.0, 1.0]], 1.0]}},
        {"prefill": []},
        {"prefill": {"x" * 65: [1.0, 10, [[1.0, 1.0, 1.0]], []]}},
        {"reads": {"disk": [[1.0, "1"]]}},
        {"reads": {"disk": 3}},
        {"reads": {str(number): [[1.0, 1.0]] for number in range(33)}},
        {"rates": {"raw": [0.0, 0.0]}},
        {"rest": None},
        {"machine": None, "rates": 1},
    ],
)
def test_numbers_that_cannot_be_are_counted_as_damage(tmp_path: Path, changes: dict[str, Any]) -> None:
    document = kept(tmp_path) | changes
    if changes.get("machine", "") is None:
        del document["machine"]
    write(tmp_path, document)
    metrics = Metrics()
    assert saved.read(FileSystem(), str(tmp_path), metrics) is None
    assert metrics[Metric.DAMAGED_ESTIMATES] == 1


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{}", b"[" * 100_000, b"\xff" * 100, b"{}\n{}\n", b"x" * (saved.LIMIT + 1)]
)
def test_bytes_that_are_no_estimates_are_counted_as_damage(tmp_path: Path, data: bytes) -> None:
    (tmp_path / saved.NAME).write_bytes(data)
    metrics = Metrics()
    assert saved.read(FileSystem(), str(tmp_path), metrics) is None
    assert metrics[Metric.DAMAGED_ESTIMATES] == 1


@pytest.mark.parametrize("place", [0, 40, 200, -2])
def test_a_flipped_bit_is_damage(tmp_path: Path, place: int) -> None:
    kept(tmp_path)
    data = bytearray((tmp_path / saved.NAME).read_bytes())
    data[place] ^= 1
    (tmp_path / saved.NAME).write_bytes(data)
    metrics = Metrics()
    assert saved.read(FileSystem(), str(tmp_path), metrics) is None
    assert metrics[Metric.DAMAGED_ESTIMATES] == 1


def test_a_disk_that_refuses_is_counted_and_no_more(tmp_path: Path) -> None:
    found, metrics = informed().news(), Metrics()
    assert found is not None
    saved.write(FileSystem(), str(tmp_path / "missing"), found, metrics)
    assert metrics[Metric.DISK_WRITE_ERRORS] == 1
