"""Two stores share what one of them put, by way of a remote tier; nothing that goes wrong there is more than a miss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import remotestores as rc
import small_stores as small

from kvstore.core.explanation import Reason

BLOCKS = 6
TOKENS = small.tokens_of(1, BLOCKS * small.BLOCK + 2)
WHOLE = BLOCKS * small.BLOCK


@pytest.fixture(params=["memory", "folder", "parcels", "parcels in a folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"folder://{tmp_path}/shared" if "folder" in request.param else f"memory:{tmp_path.name}"
    return rc.WithParcels(url) if "parcels" in request.param else url


def test_what_one_store_put_is_a_hit_in_another(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote) as store:
        hit = rc.got(store, TOKENS)
        assert (hit.tokens, hit.tiers, hit.reason) == (WHOLE, {"remote": WHOLE}, Reason.NEVER_PUT)
        assert rc.counters(store)["get_hit_tokens_remote"] == WHOLE


def test_what_came_is_kept_and_survives_the_remote_tier(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote) as store:
        rc.got(store, TOKENS)
        assert store.flush().durable_blocks == BLOCKS
        assert rc.got(store, TOKENS).tiers == {"host": WHOLE}
        assert store.check(deep=True).problems == ()
        counts = rc.counters(store)
        assert (counts["remote_kept_records"], counts.get("remote_written_records", 0)) == (BLOCKS, 0)
    with small.KVStore(tmp_path / "b", small.IDENTITY, small.config()) as store:
        assert rc.got(store, TOKENS).tiers == {"disk": WHOLE}


def test_local_blocks_come_first_and_the_rest_from_there(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote) as store:
        start = TOKENS[: 2 * small.BLOCK + 1]  # two blocks, and the beginning of the third
        small.put(store, start)
        assert store.flush(remote=True).remote_due == 0
        hit = rc.got(store, TOKENS)
        assert hit.tiers == {"host": 2 * small.BLOCK, "remote": WHOLE - 2 * small.BLOCK}
        store.flush()
        assert store.check(deep=True).problems == ()


def test_each_block_is_written_once_whoever_puts_it(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    longer = np.concatenate([TOKENS, small.tokens_of(2, 3 * small.BLOCK)])
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote) as store:
        small.put(store, longer)
        assert store.flush(remote=True).remote_due == 0
        assert rc.counters(store)["remote_written_records"] == len(longer) // small.BLOCK - BLOCKS


def test_an_empty_disk_goes_on_from_there(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    sequences = [small.tokens_of(number, 5 * small.BLOCK) for number in range(1, 6)]
    rc.filled(tmp_path / "a", remote, *sequences)
    with rc.open_store(tmp_path / "new", remote) as store:
        assert [small.stored(store, tokens) for tokens in sequences] == [5 * small.BLOCK] * 5


def test_namespaces_do_not_share(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    with rc.open_store(tmp_path / "a", remote) as store:
        small.put(store, TOKENS, b"ann")
        store.flush(remote=True)
    with rc.open_store(tmp_path / "b", remote) as store:
        assert store.get(TOKENS) is None
        assert small.stored(store, TOKENS, b"ann") == WHOLE


@pytest.mark.parametrize("upload", ["second use", "put"])
def test_the_policy_says_what_is_written(tmp_path: Path, url: str, upload: str) -> None:
    with rc.open_store(tmp_path / "a", rc.settings(url, upload=upload)) as store:
        small.put(store, TOKENS)
        store.flush(remote=True)
        at_first = rc.counters(store).get("remote_written_records", 0)
        rc.got(store, TOKENS)
        store.flush(remote=True)
        assert (at_first, rc.counters(store)["remote_written_records"]) == (BLOCKS * (upload == "put"), BLOCKS)


def test_a_store_that_only_reads_there_writes_nothing(tmp_path: Path, url: str) -> None:
    with rc.open_store(tmp_path / "a", rc.settings(url, read_only=True)) as store:
        small.put(store, TOKENS)
        assert store.flush(remote=True).remote_due == 0
        assert rc.counters(store).get("remote_written_records", 0) == 0


def test_what_the_disk_gives_up_is_found_there(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url, upload="eviction", queue_bytes=1 << 26, flush_timeout_s=60.0)
    sequences = [small.tokens_of(number, 8 * small.BLOCK) for number in range(1, 40)]
    with rc.open_store(tmp_path / "a", remote, host=0, disk=6 * small.SEGMENT) as store:
        written = []
        for tokens in sequences:
            small.put(store, tokens)
            written += [tokens] if store.flush().dropped_blocks == 0 else []
        assert store.flush(remote=True).remote_due == 0
        assert rc.counters(store)["disk_evicted_records"] > 50
        assert len(written) > len(sequences) // 2
        for tokens in written:  # what comes drives out others
            assert small.stored(store, tokens) == 8 * small.BLOCK
            assert store.flush(remote=True).remote_due == 0
        assert store.check(deep=True).problems == ()


def test_explain_names_what_is_there(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url)
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote) as store:
        small.put(store, TOKENS[: small.BLOCK])
        store.flush()
        found = store.explain(TOKENS)
        assert found.tokens == WHOLE
        assert [block.tiers[0] for block in found.blocks if block.tiers] == ["host"] + ["remote"] * (BLOCKS - 1)
        after_a_get = store.explain(TOKENS, start=small.BLOCK)  # it asked, and asks no server again
        assert after_a_get.tokens == small.BLOCK
        assert after_a_get.why.endswith("is not stored here, and did not come from the remote tier.")


@pytest.mark.parametrize("reading_s", [1e-3, 100.0])
def test_the_gate_leaves_out_what_is_computed_sooner(tmp_path: Path, url: str, reading_s: float) -> None:
    remote = rc.settings(url, promote="second")
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote, prefill_tokens_per_s=1.0) as store:
        rc.got(store, TOKENS)  # nothing is known of reading
        store._engine.gate.check("remote", [(4096, reading_s)] * 20)
        hit = store.get(TOKENS)
        assert (hit is None) == (reading_s > 1)
        assert rc.counters(store).get("get_withheld_tokens", 0) == (WHOLE if hit is None else 0)


def test_a_hit_says_what_of_the_remote_tier_was_withheld(tmp_path: Path, url: str) -> None:
    remote = rc.settings(url, promote="second")
    rc.filled(tmp_path / "a", remote, TOKENS)
    with rc.open_store(tmp_path / "b", remote, prefill_tokens_per_s=1.0) as store:
        assert rc.got(store, TOKENS).withheld == 0
        small.put(store, TOKENS[: 2 * small.BLOCK])
        store.flush()
        store._engine.gate.check("remote", [(4096, 100.0)] * 20)
        hit = rc.got(store, TOKENS)
        assert (hit.tiers, hit.withheld) == ({"host": 2 * small.BLOCK}, WHOLE - 2 * small.BLOCK)
        assert hit.reason is Reason.NOT_WORTH
