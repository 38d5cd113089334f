"""Left-padded batches through a store: each row by itself, the same text and the same caches as without one.

"The same" is against the same split: the same caches in memory, continued in the same groups of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import tiny
from transformers import DynamicCache

from kvstore import Approximate, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import answers, cache_layers, generate
from kvstore.integrations.transformers import prefill as prefill_module
from kvstore.trie import UNIFORM_LOGPROB

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(16 * MIB, "zstd"), segment_bytes=MIB, block_tokens=16
)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
LENGTHS = (60, 47, 71, 33, 52, 18, 1, 40)
HITS = (0, 30, 0, 32, 51, 0, 0, 21)  # leading tokens of a row that are stored before
PAD = 198  # the tokens of rows do not have it
Layers = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@pytest.fixture(params=["llama", "qwen3", "gpt2", "gpt_neox", "gemma3-full"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def _open(path: Path, model: Any) -> KVStore:
    return KVStore(path, ModelIdentity.from_transformers(model), CONFIG)


def _rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randint(1, PAD, (length,), generator=chance) for length in lengths]


def _batch(rows: list[torch.Tensor], columns: int = 0) -> dict[str, torch.Tensor]:
    columns = max(columns, *map(len, rows))
    ids, mask = torch.full((len(rows), columns), PAD), torch.zeros(len(rows), columns, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, columns - len(tokens) :], mask[row, columns - len(tokens) :] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def _same(left: Any, right: Any) -> bool:
    """Whether two sets of layers have the same bits."""
    flat = [[tensor.contiguous().view(torch.int32) for pair in layers for tensor in pair] for layers in (left, right)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def _of(cache: Any, row: int, begin: int, end: int) -> Layers:
    return tuple((k[row : row + 1, :, begin:end], v[row : row + 1, :, begin:end]) for k, v in cache_layers(cache))


@torch.no_grad()
def _computed(model: Any, tokens: torch.Tensor, past: Layers | None = None) -> Layers:
    """The caches of a row by itself, from those of its first tokens."""
    cache = DynamicCache(config=model.config)
    for number, (k, v) in enumerate(past or ()):
        cache.update(k.clone(), v.clone(), number)
    held = cache.get_seq_length()
    if held < len(tokens):
        model(tokens[None, held:], past_key_values=cache, use_cache=True)
    return cache_layers(cache) if len(tokens) else ()


def _padded(rows: list[Layers], columns: int, like: Layers) -> DynamicCache:
    """A batch cache put together by hand."""
    cache = DynamicCache()
    for number, pair in enumerate(like):
        sides = []
        for side, tensor in enumerate(pair):
            sides.append(torch.zeros(len(rows), tensor.shape[1], columns, tensor.shape[3]))
            for row, layers in enumerate(rows):
                if layers and layers[number][side].shape[2]:
                    sides[-1][row, :, columns - layers[number][side].shape[2] :] = layers[number][side][0]
        cache.update(*sides, number)
    return cache


def _put_hits(model: Any, path: Path, rows: list[torch.Tensor], hits: tuple[int, ...]) -> list[Layers | None]:
    """Stores the first tokens of rows; returns their caches, as memory has them."""
    past = [_computed(model, tokens[:count]) if count else None for tokens, count in zip(rows, hits, strict=True)]
    with _open(path, model) as store:
        for tokens, count, layers in zip(rows, hits, past, strict=True):
            if layers is not None:
                store.put(tokens[:count].tolist(), layers)
    return past


@torch.no_grad()
def _one_pass(model: Any, rows: list[torch.Tensor], hits: tuple[int, ...], past: list[Layers | None]) -> list[Layers]:
    """All rows in one pass: what is stored ends in one column, what is new begins in the next."""
    begin = max(hits)
    missing = [len(tokens) - 1 - count for tokens, count in zip(rows, hits, strict=True)]
    like = next(layers for layers in past if layers)
    cache = _padded([layers or () for layers in past], begin, like)
    ids, mask = torch.zeros(len(rows), max(missing), dtype=torch.int64), torch.zeros(len(rows), begin + max(missing))
    for row, (tokens, count, new) in enumerate(zip(rows, hits, missing, strict=True)):
        ids[row, :new], mask[row, begin - count : begin + new] = tokens[count : count + new], 1
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)[:, begin:]
    model(ids, attention_mask=mask.long(), position_ids=positions, past_key_values=cache, use_cache=True)
    return [_of(cache, row, begin - hits[row], begin + missing[row]) for row in range(len(rows))]


# ---- the text, and the caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True], ids=["row by row", "in one pass"])
def test_eight_rows_four_hits_equal_no_store_in_the_same_split(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Texts and caches, bit for bit; the hits come from disk, and each row is found by itself afterwards."""
    monkeypatch.setitem(prefill_module.PASS_TOKENS, "cpu", 1000 if together else -1)
    rows, hits = _rows(LENGTHS), HITS
    if together:  # rows that lack nothing take part in no pass
        rows, hits = [rows[i] for i in (0, 1, 2, 3, 5, 7)], tuple(HITS[i] for i in (0, 1, 2, 3, 5, 7))
        rows[3] = _rows((44,), seed=5)[0]
    past = _put_hits(model, tmp_path / "store", rows, hits)
    batch = _batch(rows)
    columns = batch["input_ids"].shape[1]
    if together:
        prompts = _one_pass(model, rows, hits, past)
    else:
        prompts = [_computed(model, tokens[:-1], layers) for tokens, layers in zip(rows, past, strict=True)]
    memory = _padded(prompts, columns - 1, prompts[0])
    want = model.generate(**batch, past_key_values=memory, **GREEDY)
    with _open(tmp_path / "store", model) as store:
        got = generate(model, store=store, **batch, **GREEDY)
        counters = store.stats()["counters"]
    assert counters["get_hit_tokens_disk"] == sum(hits)
    assert torch.equal(got.sequences, want.sequences)
    with _open(tmp_path / "store", model) as store:
        for row, tokens in enumerate(rows):
            begin, end = columns - len(tokens), got.sequences.shape[1] - 1
            assert _same(_of(got.past_key_values, row, begin, end), _of(want.past_key_values, row, begin, end))
            hit = store.get(got.sequences[row, begin:].tolist())
            assert hit is not None
            assert hit.tokens == end - begin
            assert _same(hit.layers, _of(got.past_key_values, row, begin, end))


def test_a_row_in_a_batch_answers_as_it_does_alone_and_its_cache_is_that_of_its_tokens(
    tmp_path: Path, model: Any
) -> None:
    """In float32, where rounding decides nothing."""
    rows = _rows()
    _put_hits(model, tmp_path / "store", rows, HITS)
    batch = _batch(rows, columns=80)
    with _open(tmp_path / "store", model) as store:
        got = generate(model, store=store, **batch, **GREEDY).sequences
        for row, tokens in enumerate(rows):
            alone = model.generate(tokens[None], attention_mask=torch.ones(1, len(tokens)), **GREEDY).sequences
            assert got[row, 80 - len(tokens) :].tolist() == alone[0].tolist()
            hit = store.get(alone[0, :-1].tolist())
            assert hit is not None
            assert hit.tokens == alone.shape[1] - 1
            for pair, other in zip(hit.layers, _computed(model, alone[0, :-1]), strict=True):
                torch.testing.assert_close(pair, other, atol=2e-5, rtol=1e-4)


def test_the_next_turn_of_a_batch_computes_only_what_is_new(tmp_path: Path, llama: Any) -> None:
    rows = _rows((40, 25, 33))
    with _open(tmp_path / "store", llama) as store:
        first = generate(llama, store=store, session=["a", "b", "c"], **_batch(rows), **GREEDY).sequences
        assert store.session("b").tokens.tolist() == first[1, 15:].tolist()
    with _open(tmp_path / "store", llama) as store:
        longer = [
            torch.cat([row[40 - len(old) :], new])
            for row, old, new in zip(first, rows, _rows((9, 3, 1), 4), strict=True)
        ]
        passes: list[tuple[int, ...]] = []
        hook = llama.register_forward_pre_hook(
            lambda _, args, kwargs: passes.append(tuple((args[0] if args else kwargs["input_ids"]).shape)),
            with_kwargs=True,
        )
        generate(llama, store=store, session=["a", "b", "c"], **_batch(longer), **GREEDY)
        hook.remove()
        assert passes[:2] == [(3, 9), (3, 1)]  # of each row its last token is left for the second pass
        assert store.stats()["counters"]["get_hit_tokens_disk"] == sum(len(row) + 8 for row in rows)
        assert len(store.session("b").tokens) == len(longer[1]) + 9


def test_long_prompts_are_computed_in_chunks(tmp_path: Path, llama: Any) -> None:
    rows, longest = _rows((60, 58, 20)), []
    hook = llama.register_forward_pre_hook(
        lambda _, args, kwargs: longest.append((args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
    )
    with _open(tmp_path / "store", llama) as store:
        got = generate(llama, store=store, prefill_chunk_size=16, **_batch(rows), **GREEDY).sequences
    hook.remove()
    assert max(longest) == 16
    want = llama.generate(**_batch(rows), **GREEDY).sequences
    assert torch.equal(got, want)


def test_chunks_are_refused_where_transformers_computes_a_prompt_twice(
    store: KVStore, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.20.1")
    with pytest.raises(ValueError, match=r"prefill_chunk_size: transformers 5\.20\.1 .*5\.21"):
        generate(llama, store=store, prefill_chunk_size=16, **_batch(_rows((20, 10))), **GREEDY)
    assert not store.stats()["counters"].get("put_tokens")
    generate(llama, store=store, **_batch(_rows((20, 10))), **GREEDY)


def test_prompts_of_one_token_work(store: KVStore, llama: Any) -> None:
    rows = _rows((1, 1))
    got = generate(llama, store=store, **_batch(rows), **GREEDY).sequences
    padded = generate(llama, store=store, **_batch(rows, columns=3), **GREEDY).sequences
    assert torch.equal(got, padded[:, 2:])
    assert store.contains(got[1].tolist()) == 9


# ---- what is stored ------------------------------------------------------------------------------------------------


def test_neither_padding_nor_what_follows_the_end_of_an_answer_is_stored(tmp_path: Path, llama: Any) -> None:
    rows = _rows((30, 20, 41))
    free = llama.generate(**_batch(rows), **GREEDY).sequences[:, 41:]
    end = int(free[1, 3])  # the second row ends with its fourth token, if none before is the same
    assert end not in free[1, :3].tolist()
    want = [row.tolist().index(end) if end in row.tolist() else 8 for row in free]
    with _open(tmp_path / "store", llama) as store:
        got = generate(llama, store=store, eos_token_id=end, pad_token_id=PAD, **_batch(rows), **GREEDY).sequences
        assert PAD in got[1, 41:].tolist()
        held = [len(tokens) + count for tokens, count in zip(rows, want, strict=True)]
        assert [store.contains(row[41 - len(old) :].tolist()) for row, old in zip(got, rows, strict=True)] == held
        assert store.contains([PAD]) == 0
        assert store.stats()["counters"]["put_new_tokens"] == sum(held)


@pytest.mark.parametrize(
    ("answer", "eos", "length"),
    [
        ([5, 6, 7], [], 3),
        ([5, 6, 9], [], 3),  # without an eos nobody pads: a 9 is a token
        ([5, 9, 7], [8], 3),
        ([5, 8, 9], [8], 2),
        ([5, 8, 8], [8], 2),
        ([5, 6, 9, 9], [8], 2),  # another criterion ended this row
        ([9, 9], [8], 1),
        ([8, 6], [7, 8], 1),
    ],
)
def test_where_an_answer_ends(answer: list[int], eos: list[int], length: int) -> None:
    assert answers.answer_length(answer, eos, pad=[9]) == length


def test_rows_that_begin_alike_share_their_blocks(store: KVStore, llama: Any) -> None:
    shared = _rows((32,))[0]
    rows = [torch.cat([shared, tail]) for tail in _rows((4, 9, 14), seed=2)]
    generate(llama, store=store, **_batch(rows), **GREEDY)
    assert store.stats()["counters"]["put_new_tokens"] == 32 + (4 + 9 + 14) + 3 * 8


def test_answers_are_scored_row_by_row(store: KVStore, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[list[int], np.ndarray]] = []
    put = store._put

    def record(tokens: Any, kv: Any, digest: bytes, logprobs: Any, *rest: Any, **more: Any) -> Any:
        given.append((tokens, logprobs))
        return put(tokens, kv, digest, logprobs, *rest, **more)

    monkeypatch.setattr(store, "_put", record)
    rows = _rows((30, 12))
    generate(llama, store=store, **_batch(rows), **GREEDY)
    for (tokens, found), old in zip(given, rows, strict=True):
        with torch.no_grad():
            logits = llama(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        want = logits[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()
        assert found[: len(old)].tolist() == pytest.approx([UNIFORM_LOGPROB] * len(old))
        assert found[len(old) :] == pytest.approx(want[len(old) - 1 :], abs=1e-4)


# ---- several answers to one prompt -----------------------------------------------------------------------------------


def _expanded(model: Any, rows: list[torch.Tensor], copies: int) -> DynamicCache:
    """The cache of prompts, computed row by row, each so many times."""
    prompts = [_computed(model, tokens[:-1]) for tokens in rows]
    columns = max(map(len, rows)) - 1
    return _padded([layers for layers in prompts for _ in range(copies)], columns, prompts[0])


@pytest.mark.parametrize("lengths", [(48,), (48, 16)])
def test_several_sequences_share_the_prompt_and_each_is_stored(
    tmp_path: Path, model: Any, lengths: tuple[int, ...]
) -> None:
    rows, sampling = _rows(lengths), {"do_sample": True, "top_k": 50, "num_return_sequences": 3}
    batch = _batch(rows)
    memory = _expanded(model, rows, 3)
    torch.manual_seed(5)
    want = model.generate(**batch, past_key_values=memory, **GREEDY | sampling)
    with _open(tmp_path / "store", model) as store:
        torch.manual_seed(5)
        got = generate(model, store=store, **batch, **GREEDY | sampling)
        assert torch.equal(got.sequences, want.sequences)
        for number, sequence in enumerate(got.sequences):
            begin = 48 - len(rows[number // 3])
            hit = store.get(sequence[begin:].tolist())
            assert hit is not None
            assert hit.tokens == len(sequence) - begin - 1
            mine = _of(got.past_key_values, number, begin, len(sequence) - 1)
            if number % 3 == 0:  # the others share the prompt's tokens with the first
                assert _same(hit.layers, mine)
            for pair, other in zip(hit.layers, mine, strict=True):
                torch.testing.assert_close(pair, other, atol=2e-5, rtol=1e-4)
        assert store.stats()["counters"]["put_new_tokens"] <= sum(lengths) + len(got.sequences) * 8


@pytest.mark.parametrize("lengths", [(40,), (40, 7, 21)])
def test_beams_share_the_prompt_and_only_the_prompt_is_stored(
    tmp_path: Path, model: Any, lengths: tuple[int, ...]
) -> None:
    rows, beams = _rows(lengths), {"num_beams": 3, "num_return_sequences": 2}
    batch = _batch(rows)
    want = model.generate(**batch, past_key_values=_expanded(model, rows, 3), **GREEDY | beams).sequences
    with _open(tmp_path / "store", model) as store:
        for turn in range(2):
            got = generate(model, store=store, **batch, **GREEDY | beams).sequences
            assert torch.equal(got, want)
            assert store.stats()["counters"]["put_new_tokens"] == sum(lengths), turn
        counters = store.stats()["counters"]
        found = [counters.get(f"get_hit_tokens_{tier}", 0) for tier in ("queue", "host", "disk")]
        assert sum(found) == sum(lengths) - len(lengths)
        for tokens in rows:
            hit = store.get(tokens.tolist())
            assert hit is not None
            for pair, other in zip(hit.layers, _computed(model, tokens), strict=True):
                torch.testing.assert_close(pair, other, atol=2e-5, rtol=1e-4)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_mask": None}, "attention_mask: a batch needs"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask: expected \[2, 4\]"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}, "attention_mask: row 1 ends with padding"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}, "attention_mask: row 0 has padding between"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}, "attention_mask: row 1 has no tokens"),
        ({"session": "s"}, "session: expected a name of its own for each of 2 rows"),
        ({"session": ["s", "s"]}, "session: expected a name of its own"),
        ({"session": ["s", "t"], "num_beams": 2}, "session: a session has one answer"),
        ({"approximate": Approximate(max_kl=0.1)}, "approximate: a batch"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(store: KVStore, llama: Any, changes: dict[str, Any], named: str) -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=f"^{named}"):
        generate(llama, store=store, **batch | changes)
    assert store.stats()["index"]["tokens"] == 0


def test_a_model_whose_tokens_padding_would_move_is_refused_only_where_there_is_padding(
    store: KVStore, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llama.forward
    monkeypatch.setattr(
        llama, "forward", lambda input_ids=None, position_ids_=None, **kwargs: forward(input_ids, **kwargs)
    )
    with pytest.raises(UnsupportedModel, match="llama: the model takes no position_ids"):
        generate(llama, store=store, **_batch(_rows((4, 6))), **GREEDY)
    assert store.stats()["index"]["tokens"] == 0
    rows = _rows((20, 20))
    store.put(rows[0][:11].tolist(), _computed(llama, rows[0][:11]))
    got = generate(llama, store=store, **_batch(rows), **GREEDY).sequences
    assert torch.equal(got, llama.generate(**_batch(rows), **GREEDY).sequences)


def test_layers_that_do_not_keep_all_tokens_are_refused_by_name() -> None:
    prefill_module.check_layers(tiny("gemma3-full"))
    with pytest.raises(
        UnsupportedModel, match=r"gemma3_text: .* DynamicSlidingWindowLayer; call generate for each row"
    ):
        prefill_module.check_layers(tiny("gemma3"))


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_rows_share_a_pass_where_that_computes_less(seed: int) -> None:
    """No row costs more in its group than in a pass of its own; rows that lack nothing are in no group."""
    missing = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    groups = prefill_module.groups_of(missing, 16)
    assert sorted(row for group in groups for row in group) == list(range(40))
    for group in groups:
        longest = max(missing[row] for row in group)
        assert all(longest <= missing[row] + 16 for row in group)
        assert len(group) == 1 or all(missing[row] for row in group)
    cost = sum(16 + len(group) * max(missing[row] for row in group) for group in groups)
    assert cost <= sum(16 + count for count in missing)


def test_without_padding_every_row_is_a_group() -> None:
    assert prefill_module.groups_of([5, 5, 0, 5], -1) == [[0], [1], [3], [2]]
