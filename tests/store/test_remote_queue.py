"""Blocks that came from the remote tier and wait to be written: nothing is decoded for that; readers decode them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import remotestores as rc
import small_stores as small
import torch

import kvstore.write.encode as encode
from kvstore.codecs import KVView
from kvstore.dedup.donor_cache import DonorReader
from kvstore.read.decode import BlockDecoder

BLOCKS = 6
WHOLE = BLOCKS * small.BLOCK
TOKENS = small.tokens_of(1, WHOLE + 2)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing leaves the queue of a store until this is set."""
    go, records_of = threading.Event(), encode.Encoder._records_of

    def wait(self: encode.Encoder, *arguments: object) -> object:
        go.wait()
        return records_of(self, *arguments)

    monkeypatch.setattr(encode.Encoder, "_records_of", wait)
    yield go
    go.set()


@pytest.fixture
def remote(tmp_path: Path) -> rc.RemoteConfig:
    return rc.settings(f"memory:{tmp_path.name}")


def arrived(store: rc.KVStore) -> None:
    """Gets the tokens from the remote tier, and waits until they are queued."""
    assert rc.got(store, TOKENS).tiers == {"remote": WHOLE}
    rc.until(lambda: rc.counters(store).get("remote_kept_records", 0) == BLOCKS)


@pytest.mark.parametrize("codec", ["raw", "entropy"])
def test_it_is_read_while_it_waits_and_written_as_it_came(
    tmp_path: Path, remote: rc.RemoteConfig, codec: str, held: threading.Event
) -> None:
    held.set()
    rc.filled(tmp_path / "a", remote, TOKENS, codec=codec)
    held.clear()
    with rc.open_store(tmp_path / "b", remote, codec=codec) as store:
        arrived(store)
        assert rc.got(store, TOKENS).tiers == {"queue": WHOLE}
        assert {block.tiers for block in store.explain(TOKENS).blocks[:BLOCKS]} == {("queue",)}
        small.put(store, TOKENS)  # all but its end is there
        held.set()
        assert store.flush().dropped_blocks == 0
        assert rc.got(store, TOKENS[:WHOLE]).tokens == WHOLE
        small.all_is_well(store)
    with small.KVStore(tmp_path / "b", small.IDENTITY, small.config(codec=codec)) as store:
        assert rc.got(store, TOKENS).tiers == {"disk": WHOLE + 2}


def test_nothing_is_decoded_for_the_queue_but_for_a_device_tier(
    tmp_path: Path, remote: rc.RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rc.filled(tmp_path / "a", remote, TOKENS)
    calls, decode = list[int](), BlockDecoder.decode

    def counted(self: BlockDecoder, read: object, header: object, payload: memoryview, target: KVView) -> bool:
        calls.append(target.tokens)
        return decode(self, read, header, payload, target)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockDecoder, "decode", counted)
    for name, device, times in (("b", 0, 1), ("c", 1 << 20, 2)):
        with rc.open_store(tmp_path / name, remote, device=device) as store:
            arrived(store)
        assert len(calls) == times * BLOCKS
        calls.clear()


def test_it_may_be_a_donor_while_it_waits(
    tmp_path: Path, remote: rc.RemoteConfig, monkeypatch: pytest.MonkeyPatch, held: threading.Event
) -> None:
    readers, init = list[DonorReader](), DonorReader.__post_init__

    def noted(self: DonorReader) -> None:
        init(self)
        readers.append(self)

    monkeypatch.setattr(DonorReader, "__post_init__", noted)
    held.set()
    rc.filled(tmp_path / "a", remote, TOKENS)
    held.clear()
    with rc.open_store(tmp_path / "b", remote) as store:
        arrived(store)
        first = store.explain(TOKENS).blocks[0]
        (donor,) = readers[-1].of([first.record])
        want = small.kv_of(TOKENS[: small.BLOCK])
        found = [(torch.empty_like(k), torch.empty_like(v)) for k, v in want]
        donor.view.copy_to(KVView.of_layers(small.LAYOUT, found))
        held.set()  # a store that closes waits for it
    for one, other in zip(found, want, strict=True):
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


def test_a_view_of_nothing_is_refused_by_whoever_reads_it() -> None:
    view = KVView.of_nothing(small.LAYOUT, 4)
    assert (view.nbytes, view.tokens, view.has_memory) == (4 * small.LAYOUT.bytes_per_token, 4, False)
    with pytest.raises(ValueError, match="no memory"):
        view.tensors()
    with pytest.raises(ValueError, match="no memory"):
        view.copy_to(KVView.of_nothing(small.LAYOUT, 4))
    with pytest.raises(ValueError, match="no memory"):
        _ = view.rows
