"""Layers that are read after their get, and cannot be read then, or are damaged: no wrong one is given to anybody."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from kvcases import same_kv
from lazyhits import lazily
from small_stores import catalog_entries
from striped_stores import COUNT, IDS, KV, counter, filled, flip, threads_are_done

from kvstore.errors import LayerLost
from kvstore.read.stripes import StripeReader
from kvstore.tiers.disk.ahead import SegmentReads
from kvstore.tiers.disk.tier import DiskTier

pytestmark = pytest.mark.usefixtures("small_records")


@pytest.mark.parametrize("layer", [1, 7, 11])
def test_a_damaged_layer_is_lost_and_those_before_it_are_not(tmp_path: Path, layer: int) -> None:
    with filled(tmp_path) as store:
        flip(store, tmp_path, 3, layer)
        hit = lazily(store, IDS)
        assert hit.tokens == COUNT
        later = hit.layers._ready.__self__  # type: ignore[attr-defined]
        step = next(step for step in later._steps if layer in step)
        assert same_kv(hit.layers[: step.start], KV[: step.start])
        with pytest.raises(LayerLost, match=f"layer {layer} cannot be decoded"):
            hit.layers[layer]
        threads_are_done(store)  # one of them tells of the record
        assert counter(store, "damaged_payload_sum") == 1
        assert counter(store, "fallback_layer_lost") == 1
        assert lazily(store, IDS).tokens == 24


def test_damage_in_the_first_layers_makes_the_prefix_shorter(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        flip(store, tmp_path, 3, 0)
        hit = lazily(store, IDS)
        assert hit.tokens == 24
        assert same_kv(tuple(hit.layers), KV, 24)
        assert counter(store, "damaged_payload_sum") == 1


def test_damage_of_all_that_is_decoded_together_is_a_miss(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        for number in range(8):
            flip(store, tmp_path, number, 0)
        assert store.get(IDS, lazy=True) is None
        assert counter(store, "damaged_payload_sum") == 8


def test_all_of_a_stripe_may_be_damaged(tmp_path: Path, alone: None) -> None:
    with filled(tmp_path) as store:
        for number in range(8):
            flip(store, tmp_path, number, 11)
        hit = lazily(store, IDS)
        assert same_kv(hit.layers[:8], KV[:8])
        with pytest.raises(LayerLost):
            hit.layers[11]
        assert store.check().problems == ()


def test_nothing_is_decoded_once_a_layer_is_lost(tmp_path: Path, alone: None) -> None:
    """Whoever was told so fills it in another way, and those behind it."""
    with filled(tmp_path) as store:
        flip(store, tmp_path, 3, 5)
        hit = lazily(store, IDS)
        with pytest.raises(LayerLost):
            hit.layers[5]
        tensors = hit.layers.tensors[11][0]  # type: ignore[attr-defined]
        before = tensors.clone()
        later = hit.layers._ready.__self__  # type: ignore[attr-defined]
        later.finish()
        for _ in later._units:
            later.step()
        assert same_kv([(tensors, tensors)], [(before, before)])
        with pytest.raises(LayerLost):
            hit.layers[11]
        assert same_kv(hit.layers[:4], KV[:4])


def test_a_damaged_head_makes_the_prefix_shorter(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        extent = catalog_entries(store)[3].extent
        with open(tmp_path / "segments" / f"{extent.segment:08x}.seg", "r+b") as file:
            file.seek(extent.offset + 300)
            file.write(b"\xff\xff")
        hit = lazily(store, IDS)
        assert hit.tokens == 24
        assert same_kv(tuple(hit.layers), KV, 24)
        assert counter(store, "damaged_header_sum") == 1


class Failing:
    """Reads of the system that fail from a call on, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.EIO) -> None:
        self.left = 0
        wait = SegmentReads.wait

        def failing(reads: SegmentReads, at: int) -> None:
            wait(reads, at)
            if self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(SegmentReads, "wait", failing)


def test_a_read_that_fails_once_is_made_again(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    with filled(tmp_path) as store:
        hit = lazily(store, IDS)
        failing.left = 3
        assert same_kv(tuple(hit.layers), KV)
        assert counter(store, "disk_read_errors") == 3
        assert lazily(store, IDS).tokens == COUNT


@pytest.mark.parametrize(("number", "left"), [(errno.EIO, 0), (errno.ENOMEM, COUNT)])
def test_what_cannot_be_read_later_is_lost(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, number: int, left: int
) -> None:
    """For good, if the disk says so; what is for a moment costs this get alone."""
    failing = Failing(monkeypatch, number)
    with filled(tmp_path) as store:
        hit = lazily(store, IDS)
        failing.left = 1

        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as broken:
            broken.setattr(DiskTier, "read", refuse)
            with pytest.raises(LayerLost):
                tuple(hit.layers)
        threads_are_done(store)
        again = store.get(IDS)
        assert (0 if again is None else again.tokens) == left


def test_reads_that_cannot_begin_are_made_when_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[StripeReader]
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "no descriptors")

    with filled(tmp_path) as store:
        monkeypatch.setattr(SegmentReads, "begin_parts", refuse)
        assert same_kv(tuple(lazily(store, IDS).layers), KV)
        assert len(made) == 1


def test_what_cannot_be_read_is_held_by_nobody(tmp_path: Path, alone: None) -> None:
    """Not until Python collects its garbage, either: a call would wait for the place of the records."""
    with filled(tmp_path) as store:
        extent = catalog_entries(store)[3].extent
        with open(tmp_path / "segments" / f"{extent.segment:08x}.seg", "r+b") as file:
            file.truncate(extent.offset + 1000)
        gc.collect()
        gc.disable()
        try:
            hit = lazily(store, IDS)
            assert hit.tokens == 24
            assert same_kv(tuple(hit.layers), KV, 24)
            del hit
            assert store.check().problems == ()
        finally:
            gc.enable()
