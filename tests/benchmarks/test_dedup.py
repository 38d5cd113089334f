"""The workloads of deduplication are what they say, and their bytes are counted as they say. No model is needed."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmodules import load

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import MIB

dedup = load("dedup")
Text = load("workloads.text").Text
Ledger, caches = load("workloads.ledger").Ledger, load("workloads.caches")
variants, retrieval, transcript = (load(f"workloads.{name}") for name in ("variants", "retrieval", "transcript"))
growing, sessions = load("workloads.growing"), load("workloads.sessions")
common, decode, loss = load("common"), load("workloads.decode"), load("workloads.loss")

LAYOUT = KVLayout.uniform(2, 2, 8)
IDENTITY = ModelIdentity("benchmark", "", "weights", "", LAYOUT)


class Words:
    """A tokenizer of words and line ends, whose ids are by order of appearance."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, verbose: bool = True) -> Any:
        words = text.replace("\n", " \n ").split(" ")
        return SimpleNamespace(input_ids=[self.known.setdefault(word, len(self.known)) for word in words if word])


@pytest.fixture
def text(tmp_path: Path) -> Any:
    path = tmp_path / "text"
    path.write_text(" ".join(f"word{number}" for number in range(20_000)))
    return Text(Words(), path, 20_000)


def common_prefix(a: Any, b: Any) -> int:
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def test_text_comes_once_until_it_is_rewound(text: Any) -> None:
    first, second = text.take(100), text.take(100)
    assert not set(first) & set(second)
    turns = text.dialogue()
    assert len(turns) >= 3
    text.rewind()
    assert text.take(200) == first + second
    with pytest.raises(SystemExit, match="too few"):
        text.take(20_000)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", dedup.WORKLOADS)
def test_a_workload_is_the_same_each_time_and_fits_the_text(text: Any, name: str, quick: bool) -> None:
    runs = []
    for _ in range(2):
        text.rewind()
        runs.append(list(dedup.WORKLOADS[name](text, quick)))
    assert len(runs[0]) == len(runs[1]) > 1
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(*runs, strict=True))
    assert all(len(a.tokens) > 64 and a.tokens.dtype == np.uint32 for a in runs[0])
    assert not runs[0][0].counterpart
    lossy = name in dedup.LOSSY
    assert all((a.following is not None) == lossy for a in runs[0])


@pytest.mark.parametrize("name", ["near-synonym", "other-instruction"])
def test_variants_differ_before_the_document_and_nowhere_else(text: Any, name: str) -> None:
    first, second = list(dedup.WORKLOADS[name](text, True))
    length = variants.DOCUMENTS_QUICK[0]
    assert (first.counterpart, second.counterpart) == (False, True)
    assert np.array_equal(first.tokens[-length:], second.tokens[-length:])
    assert common_prefix(first.tokens, second.tokens) < 10
    assert np.array_equal(first.following, second.following)


def test_the_prompts_are_not_those_that_the_donor_tables_were_fitted_behind() -> None:
    tool = (Path(__file__).parents[2] / "tools/make_donor_tables.py").read_text()
    assert "You are a helpful assistant." in tool
    for prompt in (variants.BASE, variants.NEAR_SYNONYM, variants.OTHER_INSTRUCTION):
        assert prompt[:20] not in tool


def test_retrieval_has_a_counterpart_once_its_passages_were_seen(text: Any) -> None:
    size = retrieval.FULL
    prompts = list(retrieval.retrieval(text, False))
    assert len(prompts) == size.prompts
    apart = size.passages // size.chosen
    assert [prompt.counterpart for prompt in prompts] == [False] * apart + [True] * (size.prompts - apart)
    text.rewind()
    passages = [text.take(size.tokens) for _ in range(size.passages)]

    def chosen(prompt: Any) -> list[int]:
        """By where they stand."""
        tokens = prompt.tokens.tolist()
        return sorted(
            (p for p in range(size.passages) if passages[p][0] in tokens), key=lambda p: tokens.index(passages[p][0])
        )

    orders = [chosen(prompt) for prompt in prompts]
    assert sorted(orders[0] + orders[1]) == list(range(size.passages))
    assert all(len(order) == size.chosen for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_transcript_is_edited_near_its_beginning(text: Any) -> None:
    arrivals = list(transcript.transcript(text, 0, 3000, 3))
    assert len(arrivals) > 7
    for number in range(1, len(arrivals)):
        before, after = arrivals[number - 1], arrivals[number]
        shared = common_prefix(before.tokens, after.tokens)
        assert after.counterpart == (number % 3 == 0)
        if after.counterpart:
            assert shared < 400
            end = len(before.tokens) - 400  # the turns are the same, at another place
            assert set(before.tokens[-end:].tolist()) < set(after.tokens.tolist())
        else:
            assert shared == len(before.tokens)


def test_edits_change_the_date_and_the_tools_by_turns(text: Any) -> None:
    beginnings = [transcript.beginning(text, 0, edits) for edits in range(5)]
    at = [common_prefix(np.array(a), np.array(b)) for a, b in itertools.pairwise(beginnings)]
    assert at[0] == at[2] < 10  # the date
    assert at[1] == at[3] > 100  # the tools
    assert len({tuple(x) for x in beginnings}) == 5


def test_sessions_are_interleaved_and_each_goes_on(text: Any) -> None:
    arrivals = list(sessions.sharegpt(text, True))
    count = sessions.SESSIONS_QUICK
    for number, arrival in enumerate(arrivals[count:], count):
        before = arrivals[number - count].tokens
        assert common_prefix(before, arrival.tokens) == len(before) < len(arrival.tokens)


def test_the_sum_of_snapshots_is_that_of_their_lengths(text: Any) -> None:
    work = growing.growing(text, True)
    lengths = [work.prompt + step for step in range(1, work.steps + 1)]
    assert work.snapshot_tokens == sum(lengths)
    assert lengths[-1] == len(work.tokens)


def test_unrelated_sequences_share_no_token_but_their_own(text: Any) -> None:
    arrivals = list(dedup.WORKLOADS["unrelated"](text, True))
    assert not set(arrivals[0].tokens.tolist()) & set(arrivals[1].tokens.tolist())


def test_ratios_are_of_sequences_with_a_counterpart() -> None:
    ledger = Ledger()
    ledger.arrive(100, 100, False, {"a": 100, "b": 50})
    ledger.arrive(100, 60, True, {"a": 60, "b": 15})
    assert ledger.ratios("a") == {"ratio": 1, "ratio_stored": 1, "ratio_put": pytest.approx(200 / 160)}
    assert ledger.ratios("b") == {
        "ratio": 4,
        "ratio_stored": pytest.approx(160 / 65),
        "ratio_put": pytest.approx(200 / 65),
    }


def test_ratios_without_counterparts_are_of_everything() -> None:
    ledger = Ledger()
    ledger.arrive(100, 100, False, {"a": 50})
    assert ledger.ratios("a") == {"ratio": 2, "ratio_stored": 2, "ratio_put": 2}


def layers(tokens: int, seed: int) -> Any:
    numbers = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.randn(1, 2, tokens, 8, generator=numbers).bfloat16()

    return [(random(), random()) for _ in LAYOUT.layers]


def test_bytes_of_a_put_are_what_the_disk_holds_more(tmp_path: Path) -> None:
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(8 * MIB, "raw"), segment_bytes=2 * MIB)
    kv, tokens = layers(192, 0), np.arange(192, dtype=np.uint32)
    width = LAYOUT.bytes_per_token
    with KVStore(tmp_path / "store", IDENTITY, config) as store:
        first = [(k[:, :, :100], v[:, :, :100]) for k, v in kv]
        stored, raw = caches.put(store, tokens[:100], first)
        assert raw == 100 * width <= stored
        _, raw = caches.put(store, tokens, kv)  # its second block replaces the tail
        assert raw == 92 * width
        assert caches.put(store, tokens, kv)[1] == 0
        assert caches.digest_of(store, tokens) == caches.digest(kv)
        assert caches.digest_of(store, tokens[:100]) == caches.digest(first)
        other = layers(192, 1)
        assert caches.digest(other) != caches.digest(kv)
        assert caches.digest_of(store, tokens[::-1].copy()) is None


class Identity:
    """A peer that codes nothing."""

    def encode(self, values: Any) -> Any:
        return values


def test_a_peer_codes_the_new_tokens_of_every_tensor() -> None:
    kv = layers(100, 0)
    assert caches.tensor_bytes(Identity(), kv, 30) == 30 * LAYOUT.bytes_per_token
    assert caches.tensor_bytes(Identity(), kv, 0) == 0


def test_members_are_decoded_from_the_sequences_before() -> None:
    passage = np.arange(1000, 1256, dtype=np.uint32)
    first, second = (np.concatenate([np.arange(at, at + 20, dtype=np.uint32), passage]) for at in (0, 100))
    sequences = [(first, layers(len(first), 0)), (second, layers(len(second), 1))]
    rows = common.Rows("dedup")
    assert decode.decode_speed(rows, "test", LAYOUT, "entropy", None, sequences, True)
    assert {row["metric"] for row in rows.rows} == {"decode_GBps", "ratio_payload"}
    assert {row["case"] for row in rows.rows} == {"donor/decode/test"}
    nothing = common.Rows("dedup")
    alone = [(np.arange(2000, 2256, dtype=np.uint32), layers(256, 2)), sequences[1]]
    assert decode.decode_speed(nothing, "test", LAYOUT, "entropy", None, alone, True)
    assert not nothing.rows


def test_a_loss_is_of_what_comes_back_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is a stand-in whose predictions are the cache's first values."""

    def predicted(model: Any, following: Any, kv: Any) -> torch.Tensor:
        return kv[0][0][0, 0, : len(following)].float().log_softmax(-1)

    monkeypatch.setattr(loss, "predicted", predicted)
    arrival = load("workloads.arrival").Arrival
    tokens, kv = list(range(64)), layers(64, 0)
    found = {}
    for name, given in (("exact", kv), ("other", layers(64, 1))):
        config = StoreConfig(host=TierConfig(0), disk=TierConfig(8 * MIB, "raw"), segment_bytes=2 * MIB)
        rows = common.Rows("dedup")
        with KVStore(tmp_path / name, IDENTITY, config) as store:
            measured = loss.Loss(store)
            measured.report(rows, name)
            assert not rows.rows
            with monkeypatch.context() as patch:
                patch.setattr(loss, "put", lambda store, ids, _, given=given: caches.put(store, ids, given))
                measured.arrive(None, arrival.of(tokens, True, [1, 2, 3]), kv)
            measured.report(rows, name)
        found[name] = {row["metric"]: row["value"] for row in rows.rows}
    assert found["exact"]["kl"] == 0 == found["exact"]["kl_max"]
    assert found["exact"]["top1"] == 1
    assert found["exact"]["bits_per_value"] >= 16
    assert found["other"]["kl"] > 0.1
