"""Layers that are read after their get: the same bits as of whole records, whatever happens before the last one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcases import kv_of, open_store, same_kv, tokens
from lazyhits import interrupts_lose_nothing, lazily
from small_stores import catalog_entries
from striped_stores import COUNT, IDS, KV, LAYOUT, counter, filled, opened
from threadruns import run_together

from kvstore import KVLayout, KVStore, TierConfig
from kvstore.config import KIB, MIB
from kvstore.core.lazy_layers import LazyLayers
from kvstore.core.record import FLAG_SUMS
from kvstore.errors import StoreForked
from kvstore.read import ahead
from kvstore.read.layerwise import LayerDecode, steps_of
from kvstore.read.stripes import StripeReader, first_bytes, parts_of
from kvstore.residency import block
from kvstore.tiers.disk.ahead import SegmentReads
from kvstore.tiers.disk.tier import DiskTier

pytestmark = pytest.mark.usefixtures("small_records")


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["splitzip", "entropy", "zstd"])
@pytest.mark.parametrize("count", [68, 64, 61, 30])
def test_the_bits_are_those_of_whole_records(tmp_path: Path, codec: str, count: int, made: list[StripeReader]) -> None:
    with filled(tmp_path, codec) as store:
        hit = lazily(store, tokens(COUNT)[:count])
        assert hit.tokens == count
        assert hit.tiers == {"disk": count}
        assert same_kv(tuple(hit.layers), kv_of(IDS, LAYOUT), count)
        assert len(made) == 1
        assert counter(store, "fallback_read_twice") == 0
        assert store.check(deep=True).problems == ()


@pytest.mark.parametrize("order", [range(11, -1, -1), [4, 0, 8, 4]])
def test_layers_may_be_taken_in_any_order(tmp_path: Path, order: Any, alone: None) -> None:
    with filled(tmp_path) as store:
        layers = lazily(store, IDS).layers
        for number in order:
            assert same_kv([layers[number]], [KV[number]])


def test_only_the_beginnings_are_read_before_the_get_returns(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    begin = SegmentReads.begin_parts

    def noted(self: SegmentReads, parts: Any, kept: object) -> Any:
        read.extend(len(part.memory) for part in parts)
        return begin(self, parts, kept)

    monkeypatch.setattr(SegmentReads, "begin_parts", noted)
    with filled(tmp_path) as store:
        sizes = [entry.extent.nbytes for entry in catalog_entries(store)]
        hit = lazily(store, IDS)
        ahead = 2 * 64 * KIB  # and what is under way by then
        assert sum(read) < sum(sizes) / 3 + ahead < sum(sizes)
        assert same_kv(tuple(hit.layers), KV)
        assert sum(read) < 1.6 * sum(sizes)  # here a page has the ends of two parts


def test_what_is_under_way_is_bounded(tmp_path: Path, made: list[StripeReader], alone: None) -> None:
    with filled(tmp_path) as store:
        layers = lazily(store, IDS).layers
        for number in range(12):
            layers[number]
            assert made[0]._nbytes == sum(len(one.buffer.view) for one in made[0]._begun.values())
            assert made[0]._nbytes < 64 * KIB + max(sum(map(len, stripe.spans())) for stripe in made[0]._stripes)
        assert not made[0]._begun


def test_threads_may_wait_for_the_same_layers(tmp_path: Path) -> None:
    with filled(tmp_path, threads=2) as store:
        layers = lazily(store, IDS).layers
        found: list[bool] = []
        run_together(*[lambda: found.append(same_kv(tuple(layers), KV))] * 4)
        assert found == [True] * 4


def test_units_that_are_wanted_out_of_turn_are_read_then(tmp_path: Path, alone: None) -> None:
    with filled(tmp_path) as store:
        layers = lazily(store, IDS).layers
        assert isinstance(layers, LazyLayers)
        decode: LayerDecode = layers._ready.__self__  # type: ignore[attr-defined]
        for unit in reversed(decode._units):
            decode._finish(unit)
        assert same_kv(tuple(layers), KV)


# ---- what is read whole ---------------------------------------------------------------------------------------------


def test_records_without_checksums_of_layers_are_read_whole(
    tmp_path: Path, made: list[StripeReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(block, "_LEAST_FOR_SUMS", 1 << 40)
        store = filled(tmp_path)
    with store:
        assert not any(entry.flags & FLAG_SUMS for entry in catalog_entries(store))
        assert same_kv(tuple(lazily(store, IDS).layers), KV)
        assert not made


def test_raw_records_are_read_whole(tmp_path: Path, made: list[StripeReader]) -> None:
    with filled(tmp_path, "raw") as store:
        assert same_kv(tuple(lazily(store, IDS).layers), KV)
        assert not made


def test_what_the_host_tier_is_to_have_is_read_whole(tmp_path: Path, made: list[StripeReader]) -> None:
    with filled(tmp_path, host=TierConfig(16 * MIB, "raw")) as store:
        for tier in ("disk", "disk", "host"):
            hit = lazily(store, IDS)
            assert hit.tiers == {tier: COUNT}
            assert same_kv(tuple(hit.layers), KV)
        assert len(made) == 1


def test_blocks_in_memory_and_blocks_in_parts_come_together(tmp_path: Path, made: list[StripeReader]) -> None:
    with filled(tmp_path, host=TierConfig(16 * MIB, "raw")) as store:
        assert store.prefetch(IDS[:16]).result() == 16
        for _ in range(3):
            assert lazily(store, IDS[:16]).tiers == {"host": 16}  # read often, but not from disk
        hit = lazily(store, IDS)
        assert hit.tiers == {"host": 16, "disk": COUNT - 16}
        assert same_kv(tuple(hit.layers), KV)
        assert len(made) == 1


def test_a_process_that_only_reads_reads_whole_records(tmp_path: Path, made: list[StripeReader]) -> None:
    filled(tmp_path).close()
    with opened(tmp_path, read_only=True) as reader:
        assert same_kv(tuple(lazily(reader, IDS).layers), KV)
        assert not made


def test_a_first_layer_much_larger_than_its_share_is_counted(
    tmp_path: Path, made: list[StripeReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path) as store:
        monkeypatch.setattr(ahead, "first_bytes", lambda source, layers: first_bytes(source, layers**2))
        assert same_kv(tuple(lazily(store, IDS).layers), KV)
        assert counter(store, "fallback_read_twice") == 8
        assert not made
        assert store.stats()["host"]["records"] == 0  # that was no second read


def test_a_small_record_among_large_ones_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read first of large ones would have less than its tokens take."""
    monkeypatch.setattr(block, "_LEAST_FOR_SUMS", 0)
    layout, ids = KVLayout.uniform(8, 1, 8, "bfloat16"), tokens(2 * 4096)
    kv = [(k.clone(), v.clone()) for k, v in kv_of(ids, layout)]
    for k, v in kv:
        k[:, :4096] = v[:, :4096] = 1.0
    disk = TierConfig(16 * MIB, "zstd")
    with open_store(tmp_path, layout, disk=disk, segment_bytes=4 * MIB, block_tokens=4096) as store:
        store.put(ids, kv)
    with open_store(tmp_path, layout, disk=disk, segment_bytes=4 * MIB, block_tokens=4096) as store:
        hit = lazily(store, ids)
        assert hit.tokens == len(ids)
        assert same_kv(tuple(hit.layers), kv)
        assert counter(store, "fallback_read_twice") == 1


def test_how_many_parts() -> None:
    class Source:
        tier, codec_id, has_layer_sums = "disk", 1, True

        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    class Read:
        def __init__(self, nbytes: int) -> None:
            self.source = Source(nbytes)

    def parts(layers: int, nbytes: int, count: int = 10) -> int:
        return parts_of([Read(nbytes)] * count, layers)  # type: ignore[list-item]

    assert parts(30, 64 * KIB, 1) == 4
    assert parts(30, 60 * KIB, 1) == 1  # too little in all
    assert parts(30, MIB) == 8
    assert parts(4, MIB) == 2
    assert parts(1, MIB) == parts(2, MIB) == parts(3, MIB) == 1
    for layers in range(4, 200):
        found = parts(layers, MIB)
        first, *others = steps_of(layers, 0.0, found)
        assert first == range(1)
        assert len(others) == found
        assert first_bytes(Source(MIB), layers) >= 2 * MIB // layers  # type: ignore[arg-type]
    Source.has_layer_sums = False
    assert parts(30, MIB) == 1


# ---- ends in between ------------------------------------------------------------------------------------------------


def test_layers_come_after_the_store_is_closed(tmp_path: Path, alone: None) -> None:
    store = filled(tmp_path)
    hit, dropped = lazily(store, IDS), lazily(store, IDS[:40])
    del dropped
    store.close()
    for segment in (tmp_path / "segments").iterdir():
        segment.write_bytes(bytes(segment.stat().st_size))  # nothing is read any more
    assert same_kv(tuple(hit.layers), KV)


def test_layers_come_after_the_records_are_deleted(tmp_path: Path, alone: None) -> None:
    """Their place is not written to as long as somebody is to read it."""
    with filled(tmp_path) as store:
        hit = lazily(store, IDS)
        assert store.delete(IDS) == 9
        store.compact()
        for seed in range(1, 40):
            ids = tokens(64, seed)
            store.put(ids, kv_of(ids, LAYOUT))
        store.flush()
        assert same_kv(tuple(hit.layers), KV)


def test_who_has_all_layers_or_drops_them_holds_nothing(tmp_path: Path, alone: None) -> None:
    def readers(store: KVStore) -> int:
        disk = store._engine.residency.disk
        assert disk is not None
        gc.collect()
        return sum(len([hold for hold in one.readers if hold() is not None]) for one in segments(disk))

    def segments(disk: DiskTier) -> Iterator[Any]:
        return iter(disk.segments.by_number.values())

    with filled(tmp_path, host=TierConfig(0)) as store:
        hit = lazily(store, IDS)
        assert readers(store) > 0
        tuple(hit.layers)
        assert readers(store) == 0
        hit = lazily(store, IDS)
        assert readers(store) > 0
        del hit
        assert readers(store) == 0
        hit = lazily(store, IDS)
        assert store.check().problems == ()  # which reads what is left
        assert readers(store) == 0
        assert same_kv(tuple(hit.layers), KV)


def test_an_interrupt_of_a_wait_loses_nothing(tmp_path: Path) -> None:
    with filled(tmp_path, threads=1) as store:
        interrupts_lose_nothing(store, lambda: lazily(store, IDS), KV)


def test_what_was_decoded_is_not_read_again_by_whoever_was_interrupted(
    tmp_path: Path, made: list[StripeReader], alone: None
) -> None:
    """Others may have its place by then."""
    with filled(tmp_path) as store:
        hit = lazily(store, IDS)
        tuple(hit.layers)
        for segment in (tmp_path / "segments").iterdir():
            with open(segment, "r+b") as file:
                file.write(bytes(segment.stat().st_size))
        assert made[0].decode(len(made[0]._stripes) - 1) == []
        assert same_kv(tuple(hit.layers), KV)


def test_hits_that_have_all_layers_keep_nothing_of_the_system(tmp_path: Path) -> None:
    count = Path("/proc/sys/fs/aio-nr")
    with filled(tmp_path, host=TierConfig(0)) as store:
        hits = [lazily(store, IDS)]
        tuple(hits[0].layers)
        before = int(count.read_text())
        for _ in range(40):
            hits.append(lazily(store, IDS))
            tuple(hits[-1].layers)
        assert int(count.read_text()) - before < 20 * 32  # others may use some meanwhile


def test_a_forked_child_says_that_its_layers_are_not_there(tmp_path: Path, alone: None) -> None:
    with filled(tmp_path) as store:
        layers = lazily(store, IDS).layers
        pid = os.fork()
        if not pid:
            code = 1
            try:
                layers[11]
            except StoreForked:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert same_kv(tuple(layers), KV)


def test_a_session_whose_blocks_are_taken_apart_by_a_move_still_comes(tmp_path: Path, alone: None) -> None:
    with filled(tmp_path) as store:
        hit = lazily(store, IDS)
        store.delete(IDS[:64])
        store.compact(move=True)
        assert same_kv(tuple(hit.layers), KV)
