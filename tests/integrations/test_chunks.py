"""Pieces under opaque keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from threadruns import run_together

from kvstore import StoreConfig, TierConfig
from kvstore.config import MIB
from kvstore.errors import ConfigError, DiskError, KVStoreError, LayoutMismatch
from kvstore.integrations.chunks.settings import ChunkSettings
from kvstore.integrations.chunks.shape import ChunkShape
from kvstore.integrations.chunks.stores import ChunkStores

CONFIG = StoreConfig(host=TierConfig(0), disk=TierConfig(64 * MIB, "auto"))
SHAPES = [
    ChunkShape.of((2, 3, 70, 10), "bfloat16"),
    ChunkShape.of((1, 3, 16, 6), "float16"),
    ChunkShape.of((70, 2, 8), "float32"),  # fewer than eight tokens: bytes
    ChunkShape.of((2, 2, 64, 6), "float8_e4m3fn"),
    ChunkShape.of((64, 5), "bfloat16"),
    ChunkShape.of((4096,), "uint8"),
    ChunkShape.of((1,), "uint8"),
    ChunkShape.of((12347,), "uint8"),
]


def _memory(shape: ChunkShape, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(shape.nbytes))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.folder)
def test_every_byte_comes_back_also_after_a_restart(shape: ChunkShape, tmp_path: Path) -> None:
    given, found = _memory(shape), bytearray(shape.nbytes)
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        assert not chunks.get_into(b"k", found, shape)
        assert chunks.put(b"k", given, shape)
        given_then = bytes(given)
        given[:] = bytes(shape.nbytes)  # it was copied
        assert chunks.get_into(b"k", found, shape)
        assert found == given_then
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        found = bytearray(shape.nbytes)
        assert chunks.contains(b"k")
        assert not chunks.contains(b"K")
        assert chunks.get_into(b"k", found, shape)
        assert found == given_then


def test_a_shape_is_a_store_of_its_own(tmp_path: Path) -> None:
    one, other = SHAPES[0], SHAPES[5]
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        chunks.put(b"k", _memory(one), one)
        assert not chunks.get_into(b"k", bytearray(other.nbytes), other)
        chunks.put(b"k", _memory(other), other)
        assert sorted(chunks.stats()) == sorted([one.folder, other.folder])
        assert chunks.delete(b"k") == one.nbytes + other.nbytes
        assert not chunks.contains(b"k")
        assert chunks.delete(b"k") == 0


def test_namespaces_do_not_share(tmp_path: Path) -> None:
    shape, found = SHAPES[0], bytearray(SHAPES[0].nbytes)
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        chunks.put(b"k", _memory(shape), shape, namespace="a")
        assert not chunks.get_into(b"k", found, shape)
        assert not chunks.contains(b"k", namespace="b")
        assert chunks.get_into(b"k", found, shape, namespace="a")


def test_memory_of_another_size_is_refused(tmp_path: Path) -> None:
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        for call in (chunks.put, chunks.get_into):
            with pytest.raises(LayoutMismatch, match="expected 8400 bytes"):
                call(b"k", bytearray(9), SHAPES[0])


def test_what_is_damaged_is_not_found(tmp_path: Path) -> None:
    shape = SHAPES[0]
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        chunks.put(b"k", _memory(shape), shape)
    (path,) = (tmp_path / shape.folder / "segments").iterdir()
    data = np.fromfile(path, np.uint8)
    data[4096:] ^= 1
    data.tofile(path)
    found = bytearray(shape.nbytes)
    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        assert not chunks.get_into(b"k", found, shape)
        assert found == bytearray(shape.nbytes)


def test_a_store_of_another_engine_is_refused(tmp_path: Path) -> None:
    with ChunkStores(tmp_path, "one", CONFIG) as chunks:
        chunks.put(b"k", _memory(SHAPES[0]), SHAPES[0])
    with pytest.raises(KVStoreError, match="other"):
        ChunkStores(tmp_path, "other", CONFIG)


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(DiskError, match="is no folder that can be used"):
            ChunkStores(path, "mine")


def test_threads_put_and_get(tmp_path: Path) -> None:
    shape, wrong = SHAPES[0], []

    def work(number: int) -> None:
        found = bytearray(shape.nbytes)
        for round_ in range(5):
            key = bytes([number, round_])
            chunks.put(key, _memory(shape, 100 * number + round_), shape)
            if not chunks.get_into(key, found, shape) or found != _memory(shape, 100 * number + round_):
                wrong.append(key)

    with ChunkStores(tmp_path, "test", CONFIG) as chunks:
        run_together(*(partial(work, number) for number in range(4)))
    assert not wrong


def test_the_budget_is_kept(tmp_path: Path) -> None:
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(2 * MIB, "raw"), segment_bytes=MIB)
    shape = ChunkShape.of((2, 4, 64, 64), "bfloat16")  # 128 KiB
    with ChunkStores(tmp_path, "test", config) as chunks:
        for number in range(40):
            chunks.put(bytes([number]), _memory(shape, number), shape)
        chunks.flush()
        stats = chunks.stats()[shape.folder]
        assert stats["disk"]["bytes"] <= 2 * MIB
        assert stats["counters"]["disk_evicted_records"] > 0
        found = bytearray(shape.nbytes)
        assert chunks.get_into(bytes([39]), found, shape)
        assert found == _memory(shape, 39)


def test_settings_that_do_not_fit_are_named() -> None:
    for bad in (
        None,
        {},
        {"path": ""},
        {"path": "x", "disk_gb": -1},
        {"path": "x", "threads": 0},
        {"path": "x", "a": 1},
    ):
        with pytest.raises(ConfigError, match=r"given|path|disk_gb|threads"):
            ChunkSettings.of(bad, "given")
