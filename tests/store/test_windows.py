"""Layouts with windows: which prefixes can be used, and that they are what the model would have kept, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_writer import Writer
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcases import BLOCK, kv_of, open_store, tokens
from sessionturns import put_one_by_one, six_turns
from windowcases import ONLY_SLIDING, WINDOWED, is_kept, kept

from kvstore import KVLayout, KVStore, TierConfig
from kvstore.config import MIB
from kvstore.core.explanation import Reason
from kvstore.errors import ConfigError, LayoutMismatch

LAYOUTS = {"mixed": WINDOWED, "only sliding": ONLY_SLIDING}
WINDOW = 20


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return LAYOUTS[request.param]


def put(store: KVStore, ids: Any, layout: KVLayout = WINDOWED) -> None:
    store.put(ids, kept(ids, layout))


def usable(store: KVStore, ids: Any) -> list[int]:
    """How many tokens a get returns for each prefix of a sequence."""
    return [0, *(store.contains(ids[:count]) for count in range(1, len(ids) + 1))]


@pytest.mark.parametrize("codec", ["raw", "splitzip", "entropy", "zstd"])
def test_a_prefix_put_closed_and_opened_comes_back_as_the_model_kept_it(
    tmp_path: Path, layout: KVLayout, codec: str
) -> None:
    for count in (1, 7, 8, 19, 20, 21, 40, 100):
        ids = tokens(count, seed=count)
        with open_store(tmp_path / "s", layout, disk=TierConfig(16 * MIB, codec)) as store:
            put(store, ids, layout)
            queued = store.get(ids)
            assert queued is not None
            assert is_kept(queued, ids, layout)
        with open_store(tmp_path / "s", layout, disk=TierConfig(16 * MIB, codec)) as store:
            hit = store.get([*ids.tolist(), 1, 2, 3])
            assert hit is not None
            assert hit.tokens == count
            assert is_kept(hit, ids, layout)
            again = store.get(ids)
            assert again is not None
            assert is_kept(again, ids, layout)
            assert store.check(deep=True).ok


def test_within_the_window_every_prefix_can_be_used(tmp_path: Path, layout: KVLayout) -> None:
    ids = tokens(10)
    with open_store(tmp_path / "s", layout) as store:
        put(store, ids, layout)
        assert usable(store, ids) == list(range(11))
        for count in range(1, 11):
            hit = store.get(ids[:count])
            assert hit is not None
            assert hit.tokens == count
            assert is_kept(hit, ids, layout)


def test_of_a_longer_prompt_only_the_end_can_be_used(tmp_path: Path, layout: KVLayout) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "s", layout) as store:
        put(store, ids, layout)
        assert usable(store, ids) == [0] * 100 + [100]
        assert store.get(ids[:99]) is None
        counters = store.stats()["counters"]
        assert counters["short_no_window"] == 1


def test_a_prompt_that_was_put_while_it_grew_can_be_used_from_its_first_end_on(
    tmp_path: Path, layout: KVLayout
) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "s", layout) as store:
        for count in (*range(60, 100, 3), 100):  # no farther at once than a window reaches back over a block
            put(store, ids[:count], layout)
        got = usable(store, ids)
        assert got[:60] == [0] * 60
        assert got[60:] == list(range(60, 101))
        for count in (60, 64, 71, 88, 99):
            hit = store.get(ids[:count])
            assert hit is not None
            assert is_kept(hit, ids, layout)


def test_a_cache_that_kept_everything_can_be_used_everywhere(tmp_path: Path) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "s", WINDOWED) as store:
        store.put(ids, kv_of(ids, WINDOWED))
        assert usable(store, ids) == list(range(101))
        hit = store.get(ids[:77])
        assert hit is not None
        assert is_kept(hit, ids)


@pytest.mark.parametrize("first", [61, 64])
def test_a_prompt_that_others_begin_with_stays_usable_whatever_comes_behind_it(
    tmp_path: Path, layout: KVLayout, first: int
) -> None:
    """A long continuation keeps no window at the end of the prompt: what the prompt has of it must not be replaced."""
    ids = tokens(200)
    other = np.concatenate([ids[:first], tokens(50, seed=9)])
    with open_store(tmp_path / "s", layout) as store:
        put(store, ids[:first], layout)
        put(store, ids, layout)
        assert store.contains(ids[:first]) == first
    with open_store(tmp_path / "s", layout) as store:
        for sequence in (ids[:first], other):
            hit = store.get(sequence)
            assert hit is not None
            assert hit.tokens == first
            assert is_kept(hit, ids, layout)
        hit = store.get(ids)
        assert hit is not None
        assert hit.tokens == 200
        assert is_kept(hit, ids, layout)
        assert store.check(deep=True).ok


@pytest.mark.parametrize("first", [61, 64])
def test_a_prompt_that_is_put_after_what_continues_it_becomes_usable(
    tmp_path: Path, layout: KVLayout, first: int
) -> None:
    ids = tokens(200)
    with open_store(tmp_path / "s", layout) as store:
        put(store, ids, layout)
        assert store.contains(ids[:first]) == 0
        put(store, ids[:first], layout)
        again = store.put(ids[:first], kept(ids[:first], layout))
        assert again.new_blocks == 0
        assert store.contains(ids[:first]) == first
    with open_store(tmp_path / "s", layout) as store:
        for count in (first, 200):
            hit = store.get(ids[:count])
            assert hit is not None
            assert hit.tokens == count
            assert is_kept(hit, ids, layout)
        assert store.check(deep=True).ok


SEQUENCES = [
    tokens(90, seed=1),
    np.concatenate([tokens(37, seed=1), tokens(53, seed=2)]),
    np.concatenate([tokens(35, seed=1), tokens(55, seed=3)]),
]
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.sampled_from(list(LAYOUTS.values())))
def test_the_end_of_every_put_stays_a_place_to_resume(steps: list[tuple[int, int, bool]], layout: KVLayout) -> None:
    """Whatever is put before and behind it; and every prefix that is returned is right."""

    def all_are_there(store: KVStore, ends: set[tuple[int, int]]) -> None:
        for which, end in ends:
            assert store.contains(SEQUENCES[which][:end]) == end

    with put_one_by_one(layout, put, SEQUENCES, steps, all_are_there) as (store, _):
        for ids in SEQUENCES:
            got = usable(store, ids)
            assert got == [max(end for end in range(count + 1) if got[end] == end) for count in range(len(got))]
            for count in range(1, 91, 4):
                hit = store.get(ids[:count])
                assert (hit.tokens if hit else 0) == got[count]
                assert hit is None or is_kept(hit, ids, layout)


def test_more_tokens_never_find_less(tmp_path: Path, layout: KVLayout) -> None:
    """A block before the last may be another sequence's: where they part, that one has what the windows need."""
    first, other, _ = SEQUENCES  # 37 tokens alike
    with open_store(tmp_path / "s", layout) as store:
        for ids in (other[:33], other[:84], first[:42]):
            put(store, ids, layout)
        assert usable(store, other)[33:84] == [33, 34, 35, 36] + [37] * 47
        hit = store.get(other[:83])
        assert hit is not None
        assert hit.tokens == 37
        assert is_kept(hit, other, layout)


def test_sequences_that_part_inside_of_a_block_keep_the_ends_of_each_other(tmp_path: Path) -> None:
    """Their blocks begin alike, and only one of them has what layers with windows need there."""
    first, other, third = SEQUENCES  # the other has 37 tokens like the first, and the third 35
    with open_store(tmp_path / "s", WINDOWED) as store:
        for ids in (first[:33], first[:38], other[:43], third[:50]):
            put(store, ids)
        for wanted in (first[:33], first[:38], other[:43], third[:50]):
            assert store.contains(wanted) == len(wanted)
            hit = store.get(wanted)
            assert hit is not None
            assert is_kept(hit, wanted)
        assert store.contains(third[:38]) == 35, "of the block of the first sequence"
        hit = store.get(third[:38])
        assert hit is not None
        assert is_kept(hit, third)
        assert store.check(deep=True).problems == ()


def test_bytes_stored_of_a_long_prompt_are_those_of_its_cache(tmp_path: Path) -> None:
    ids = tokens(800)
    with open_store(tmp_path / "s", ONLY_SLIDING, disk=TierConfig(16 * MIB, "raw")) as store:
        put(store, ids, ONLY_SLIDING)
        store.flush()
        cache = sum(x.numel() * x.element_size() for pair in kept(ids, ONLY_SLIDING) for x in pair)
        found = [store._residency.disk.entry(record) for record in store._residency.index.counts()[0].tolist()]
        assert len(found) == 100
        # Blocks before the window hold their tokens alone, in one page each.
        assert sum(entry.nbytes for entry in found) <= 100 * 4096 + cache


def test_explain_says_that_the_window_is_missing(tmp_path: Path) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "s", WINDOWED) as store:
        put(store, ids)
        put(store, ids[:33])
        why = store.explain(ids[:70])
        assert (why.tokens, why.reason) == (33, Reason.NO_WINDOW)
        assert "windows" in why.why
        assert store.explain(ids).tokens == 100


def test_a_damaged_block_gives_the_next_shorter_place(tmp_path: Path) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "s", WINDOWED, host=TierConfig(0)) as store:
        put(store, ids[:50])
        put(store, ids)
        store.flush()
        record = store.explain(ids).blocks[-1].record
        entry = store._residency.disk.entry(record)
    segment = tmp_path / "s" / "segments" / f"{entry.extent.segment:08x}.seg"
    with segment.open("r+b") as file:
        file.seek(entry.extent.offset + 700)
        byte = file.read(1)
        file.seek(entry.extent.offset + 700)
        file.write(bytes([byte[0] ^ 255]))
    with open_store(tmp_path / "s", WINDOWED, host=TierConfig(0)) as store:
        hit = store.get(ids)
        assert hit is not None
        assert hit.tokens == 50
        assert is_kept(hit, ids)


def test_eviction_leaves_places_that_can_be_used(tmp_path: Path) -> None:
    """More than fits: whatever is still said to be there comes back right."""
    with open_store(tmp_path / "s", WINDOWED, disk=TierConfig(1 * MIB, "raw"), host=TierConfig(0)) as store:
        sequences = [tokens(120, seed=seed) for seed in range(60)]
        for ids in sequences:
            put(store, ids[:60])
            put(store, ids)
        store.flush()
        found = 0
        for ids in sequences:
            hit = store.get(ids)
            assert hit is None or is_kept(hit, ids)
            found += hit is not None
        assert found > 0
        assert store.stats()["counters"]["disk_evicted_records"] > 0
        assert store.check(deep=True).ok


def test_a_rebuilt_catalog_knows_what_blocks_lack(tmp_path: Path) -> None:
    ids = tokens(200)
    with open_store(tmp_path / "s", WINDOWED) as store:
        put(store, ids[:61])
        put(store, ids)
    data = tmp_path / "s" / "catalog" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with open_store(tmp_path / "s", WINDOWED) as store:
        assert store.stats()["counters"]["catalog_rebuilt"] == 1
        assert store.contains(ids[:100]) == 61
        hit = store.get(ids)
        assert hit is not None
        assert hit.tokens == 200
        assert is_kept(hit, ids)


_PUTS = """
import sys
from kvcases import *
from windowcases import *
store = open_store(sys.argv[1], WINDOWED)
def put(count):
    store.put(tokens(200)[:count], kept(tokens(200)[:count]))
    store.flush()
"""


def test_a_reader_follows_puts_of_windows(tmp_path: Path) -> None:
    ids = tokens(200)
    writer = Writer(_PUTS, tmp_path / "s")
    try:
        writer.do("put(61)")
        with open_store(tmp_path / "s", WINDOWED, read_only=True) as reader:
            assert reader.contains(ids) == 61
            writer.do("put(200)")
            writer.do("put(100)")
            for count in (61, 100, 200):
                hit = reader.get(ids[:count])
                assert hit is not None
                assert hit.tokens == count
                assert is_kept(hit, ids)
            assert reader.contains(ids[:90]) == 61
    finally:
        writer.end()


def test_a_session_of_six_turns_is_resumed_after_each_restart(tmp_path: Path, layout: KVLayout) -> None:
    six_turns(tmp_path / "s", layout, kept, is_kept, longer=17)


def test_too_few_tokens_of_a_window_are_refused(tmp_path: Path) -> None:
    ids = tokens(50)
    short = [(k[:, 1:], v[:, 1:]) for k, v in kept(ids, ONLY_SLIDING)]
    with open_store(tmp_path / "s", ONLY_SLIDING) as store:
        with pytest.raises(LayoutMismatch, match="tokens=19 to 50"):
            store.put(ids, short)
        uneven = [(k, v[:, 1:]) for k, v in kv_of(ids, ONLY_SLIDING)]
        with pytest.raises(LayoutMismatch, match="K has 50 tokens and V has 49"):
            store.put(ids, uneven)
        assert store.contains(ids) == 0


def test_what_does_not_code_windows_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device tier does not hold layouts with windows"):
        open_store(tmp_path / "a", WINDOWED, device=TierConfig(MIB, "raw"))
    with pytest.raises(ConfigError, match="not coded against others"):
        open_store(tmp_path / "b", WINDOWED, disk=TierConfig(16 * MIB, "entropy"), donor_step=0.5)
    assert not (tmp_path / "a").exists()


def test_deleting_a_sequence_leaves_the_prompt_it_begins_with(tmp_path: Path) -> None:
    ids = tokens(200)
    other = np.concatenate([ids[:64], tokens(50, seed=9)])
    with open_store(tmp_path / "s", WINDOWED) as store:
        for sequence in (ids[:64], ids, other):
            put(store, sequence)
        store.delete(ids)
        assert store.contains(ids) == 64
        hit = store.get(other)
        assert hit is not None
        assert hit.tokens == len(other)
        assert is_kept(hit, other)
        assert store.check(deep=True).ok


def test_blocks_are_of_the_size_that_the_tests_assume() -> None:
    assert BLOCK == 8
    assert max(layer.window for layer in WINDOWED.layers) == WINDOW
