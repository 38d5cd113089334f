"""What delete and close leave behind, and settings that a store refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from awaiting import calls_of
from kvcases import GatedFS, assert_hit, identity, kv_of, open_store, put, tokens
from own_memory import resident
from threadruns import HANGS_S

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.config import MIB
from kvstore.errors import StoreClosed
from kvstore.write.put import PutPath

# ---- delete, close -------------------------------------------------------------------------------------------------


def test_a_deleted_sequence_is_gone_also_after_a_restart(tmp_path: Path) -> None:
    ids, other = tokens(20), tokens(20, seed=1)
    with open_store(tmp_path) as store:
        put(store, ids)
        put(store, other)
        store.flush()
        assert store.delete(ids) == 3
        assert store.get(ids) is None
        assert store.stats()["disk"]["records"] == 3
    with open_store(tmp_path) as store:
        assert store.get(ids) is None
        assert_hit(store.get(other), other, 20)


def test_a_sequence_deleted_before_it_was_written_is_never_written(tmp_path: Path) -> None:
    ids, fs = tokens(20), GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        put(store, tokens(9, seed=3))
        store.flush()
        fs.shut()
        put(store, tokens(9, seed=4))  # holds up the writing thread
        assert fs.waiting.wait(HANGS_S)
        put(store, ids)
        with ThreadPoolExecutor(1) as executor, calls_of(PutPath, "_forget_sequence", 1) as gone:
            deleted = executor.submit(store.delete, ids)  # durable on return: waits for the write under way
            assert gone.wait(HANGS_S)
            assert store.contains(ids) == 0
            assert not deleted.done()
            fs.gate.set()
            assert deleted.result() == 3
        store.flush()
        assert store.stats()["disk"]["records"] == 4
    with open_store(tmp_path) as store:
        assert store.get(ids) is None


def test_deleting_keeps_what_others_share(store: KVStore) -> None:
    ids, other = tokens(24), tokens(24)
    other[16:] = tokens(8, seed=5)
    put(store, ids)
    put(store, other)
    store.flush()
    assert store.delete(ids) == 1
    assert_hit(store.get(other), other, 24)
    assert_hit(store.get(ids), ids, 16)


def test_deleting_a_sequence_that_is_not_stored_in_full_removes_nothing(store: KVStore) -> None:
    put(store, tokens(20)[:12])
    assert store.delete(tokens(20)) == 0
    assert store.contains(tokens(20)) == 12


def test_deleted_tokens_can_be_put_again(store: KVStore) -> None:
    put(store, tokens(20))
    store.delete(tokens(20))
    assert put(store, tokens(20)).new_blocks == 3
    store.flush()
    assert_hit(store.get(tokens(20)), tokens(20), 20)


def test_a_closed_store_refuses_everything_and_closes_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    session = store.session("s")
    put(store, tokens(3))
    store.close()
    store.close()
    for call in (
        lambda: put(store, tokens(3)),
        lambda: store.get([1]),
        lambda: store.contains([1]),
        lambda: store.prefetch([1]),
        lambda: store.delete([1]),
        store.flush,
        store.stats,
        store.sessions,
        lambda: store.session("s"),
        session.resume,
        session.delete,
        lambda: session.save(tokens(3), kv_of(tokens(3))),
        lambda: session.tokens,
    ):
        with pytest.raises(StoreClosed):
            call()


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    ids = tokens(20)
    store = open_store(tmp_path)
    put(store, ids)
    store.close()
    with open_store(tmp_path) as again:
        assert_hit(again.get(ids), ids, 20)


def test_a_closed_store_gives_back_the_memory_of_its_tiers(tmp_path: Path) -> None:
    """Also while somebody refers to it, as `with KVStore(...) as store:` does behind its end."""
    layout = KVLayout.uniform(num_layers=4, heads=8, head_dim=64)
    config = StoreConfig(host=TierConfig(96 * MIB, "raw"), disk=TierConfig(256 * MIB, "raw"), learn="off")
    ids = list(range(8_192))  # 64 MiB
    kv = [(torch.ones(8, len(ids), 64).bfloat16(), torch.ones(8, len(ids), 64).bfloat16()) for _ in range(4)]
    with KVStore(tmp_path, identity(layout), config) as store:
        store.put(ids, kv)
        store.flush()
        assert store.prefetch(ids).result() == len(ids)
        assert store.stats()["host"]["bytes"] >= 64 * MIB
        used = resident()
    assert resident() < used - 64 * MIB
    with pytest.raises(StoreClosed):
        store.stats()


# ---- settings ------------------------------------------------------------------------------------------------------


def test_a_store_opens_with_settings_from_toml_and_environment(tmp_path: Path) -> None:
    (tmp_path / "store.toml").write_text(
        "[kvstore]\nblock_tokens = 8\nsegment_bytes = 65536\n[kvstore.disk]\nbytes = 1048576\ncodec = 'raw'\n"
    )
    settings = StoreConfig.from_env(
        {"KVSTORE_HOST_BYTES": "65536"}, base=StoreConfig.from_toml(tmp_path / "store.toml")
    )
    with KVStore(tmp_path / "store", identity(), settings) as store:
        put(store, tokens(20))
        store.flush()
        stats = store.stats()
        assert (stats["disk"]["budget"], stats["host"]["budget"], stats["disk"]["records"]) == (1048576, 65536, 3)


@pytest.mark.parametrize("count", [1, 3, 64])
def test_any_block_size_is_exact(tmp_path: Path, count: int) -> None:
    ids = tokens(20)
    with open_store(tmp_path, block_tokens=count) as store:
        put(store, ids)
        store.flush()
        for length in (1, 2, 3, 19, 20):
            assert_hit(store.get(ids[:length]), ids, length)


def test_a_codec_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gzip' is unknown"):
        open_store(tmp_path, disk=TierConfig(1 * MIB, "gzip"))


def test_a_block_that_does_not_fit_a_segment_is_refused_at_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segment_bytes: a block of 8 tokens can take"):
        open_store(tmp_path, KVLayout.uniform(32, 8, 128))
