"""What a connector decides beside vLLM's scheduler: blocks of 16 tokens there, of 8 or 24 in the store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import StoreClosed
from kvstore.integrations.vllm.counters import Counters
from kvstore.integrations.vllm.scheduler import SchedulerSide
from kvstore.integrations.vllm.steps import Save, Step

BLOCK = 16


class Stored:
    """So many leading tokens of every sequence are stored."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        return min(self.tokens, len(tokens))


class Closed:
    def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        raise StoreClosed("the store is closed")


def side(stored: int, unit: int = 8, least: int = BLOCK) -> SchedulerSide:
    return SchedulerSide(Stored(stored), BLOCK, unit, least, Counters())


def request(count: int, name: str = "r", **changes: Any) -> Any:
    fields = {
        "request_id": name,
        "prompt_token_ids": list(range(count)),
        "all_token_ids": list(range(count)),
        "num_tokens": count,
        "num_computed_tokens": 0,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def step(
    scheduler: SchedulerSide,
    tables: dict[str, list[int]],
    drafted: dict[str, list[int]] | None = None,
    **scheduled: int,
) -> Step:
    return scheduler.step(
        SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=drafted or {},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (tables[name],) if name in tables else None
            ),
        )
    )


@pytest.mark.parametrize(
    ("stored", "computed", "count", "more"),
    [
        (0, 0, 100, 0),
        (15, 0, 100, 0),
        (16, 0, 100, 16),
        (100, 0, 100, 96),
        (96, 0, 96, 80),  # the last token is computed, for its logits
        (97, 0, 97, 96),
        (50, 32, 100, 16),
        (50, 48, 100, 0),
        (50, 64, 100, 0),
    ],
)
def test_whole_blocks_are_loaded_and_never_the_last_token(stored: int, computed: int, count: int, more: int) -> None:
    assert side(stored).match(request(count), computed) == more


def test_what_is_too_short_to_be_worth_it_is_computed() -> None:
    assert side(100, least=64).match(request(200), 48) == 0
    assert side(100, least=48).match(request(200), 48) == 48


@pytest.mark.parametrize(
    "change",
    [{"lora_request": object()}, {"mm_features": [1]}, {"prompt_embeds": object()}, {"prompt_token_ids": None}],
)
def test_requests_whose_caches_do_not_follow_from_tokens_are_left_alone(change: dict[str, Any]) -> None:
    counters = Counters()
    scheduler, asked = SchedulerSide(Stored(100), BLOCK, 8, BLOCK, counters), request(100, **change)
    assert scheduler.match(asked, 0) == 0
    assert step(scheduler, {"r": list(range(9))}, r=100).saves == []
    assert counters.take() == {"requests_not_served": 1}


def test_a_load_names_the_blocks_behind_those_that_vllm_has() -> None:
    scheduler, asked = side(70), request(100)
    assert scheduler.match(asked, 32) == 32
    scheduler.allocated(asked, ([10, 11, 12, 13, 14, 15, 16],), 32)
    scheduler.allocated(asked, ([10, 11, 12, 13, 14, 15, 16],), 0)  # vLLM calls again when the load has ended
    (load,) = step(scheduler, {}).loads
    assert (load.request, load.start, len(load.tokens), load.blocks) == ("r", 32, 64, (12, 13))
    assert step(scheduler, {}).loads == []


def test_an_empty_step_may_wait_for_loads() -> None:
    assert step(side(0), {}).idle
    assert not step(side(0), {"r": []}, r=1).idle


def test_a_prompt_in_chunks_is_saved_as_it_is_computed() -> None:
    """Chunks of 40 tokens: each is saved up to the last whole block of the store, and nothing twice."""
    scheduler, asked = side(0, unit=24), request(100)
    scheduler.match(asked, 0)
    found: list[Save] = []
    for computed in (0, 40, 80):
        asked.num_computed_tokens = computed
        found += step(scheduler, {"r": [5, 6, 7, 8, 9, 10, 11]}, r=min(40, 100 - computed)).saves
    assert [(save.start, len(save.tokens), save.blocks) for save in found] == [
        (0, 24, (5, 6)),
        (24, 72, (6, 7, 8, 9)),
        (72, 96, (9, 10)),
    ]
    np.testing.assert_array_equal(found[1].tokens, np.arange(72))


def test_what_is_stored_is_not_saved_again() -> None:
    scheduler, asked = side(70), request(100)
    scheduler.match(asked, 0)
    asked.num_computed_tokens = 64
    (save,) = step(scheduler, {"r": list(range(7))}, r=36).saves
    assert (save.start, len(save.tokens)) == (64, 96)


def test_answers_are_saved_block_by_block() -> None:
    scheduler, asked = side(0), request(20)
    scheduler.match(asked, 0)
    saved = []
    for computed in range(20, 50):
        saved += step(scheduler, {"r": [1, 2, 3, 4]}, r=20 if computed == 20 else 1).saves
        asked.num_computed_tokens = computed
        asked.all_token_ids = list(range(computed + 1))
    assert [len(save.tokens) for save in saved] == [16, 24, 32, 40, 48]


def test_drafted_tokens_are_not_saved_before_they_are_accepted() -> None:
    scheduler, asked = side(0), request(21, num_computed_tokens=20)
    scheduler.match(asked, 0)
    asked.all_token_ids = list(range(30))
    (save,) = step(scheduler, {"r": [1, 2]}, {"r": [1, 2, 3, 4]}, r=5).saves
    assert len(save.tokens) == 16  # 21 are certain


def test_tokens_that_are_not_known_yet_are_saved_later() -> None:
    """With vLLM's asynchronous scheduling a step is planned before the last one's tokens are known."""
    scheduler, asked = side(0), request(23, num_computed_tokens=23)
    scheduler.match(asked, 0)
    assert [len(save.tokens) for save in step(scheduler, {"r": [1, 2]}, r=1).saves] == [16]


def test_a_preempted_request_is_loaded_and_saves_only_what_is_new() -> None:
    scheduler, asked = side(0), request(64)
    scheduler.match(asked, 0)
    step(scheduler, {"r": [0, 1, 2, 3]}, r=64)
    scheduler._index.tokens = 64  # type: ignore[attr-defined]
    asked.all_token_ids, asked.num_tokens = list(range(80)), 80
    assert scheduler.match(asked, 0) == 64
    asked.num_computed_tokens = 64
    (save,) = step(scheduler, {"r": [7, 8, 9, 3, 2]}, r=16).saves
    assert (save.start, save.blocks) == (64, (2,))


def test_what_could_not_be_loaded_is_saved_anew() -> None:
    scheduler, asked = side(64), request(100)
    scheduler.match(asked, 0)
    scheduler.allocated(asked, ([1, 2, 3, 4, 5, 6, 7],), 64)
    step(scheduler, {})
    scheduler.loaded(["r", "unknown"], {3})
    (save,) = step(scheduler, {"r": [1, 2, 3, 4, 5, 6, 7]}, r=100).saves
    assert save.start == 0
    scheduler.finished(asked)
    assert step(scheduler, {"r": [1]}, r=100).saves == []


def test_the_salt_of_a_request_is_its_namespace() -> None:
    scheduler, asked = side(64), request(100, cache_salt="tenant-1")
    scheduler.match(asked, 0)
    scheduler.allocated(asked, ([1, 2, 3, 4, 5, 6, 7],), 64)
    assert step(scheduler, {}).loads[0].namespace == "tenant-1"


def test_a_store_that_fails_is_no_reason_to_fail_a_request() -> None:
    counters = Counters()
    scheduler = SchedulerSide(Closed(), BLOCK, 8, BLOCK, counters)
    assert scheduler.match(request(100), 0) == 0
    assert counters.take() == {"lookup_errors": 1}
