"""The cache of a batch of prompts: from the store as far as it has it, the rest computed.

Rows that lack about as many tokens are computed together, in one pass: what is stored of them stands on the left,
padded on its left, and what is new on the right, padded on its right. No token that is stored is computed again, and no
position of padding is seen by a token. The others are computed one by one, without any padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvstore.core.layout import KVLayers
from kvstore.core.results import Hit
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.cache import cache_layers
from kvstore.integrations.transformers.feeding import advance
from kvstore.integrations.transformers.logprobs import Logprobs, Scores, prompt_scores
from kvstore.integrations.transformers.padding import LeftPadded, Rows, check_rows, row_of
from kvstore.integrations.transformers.positions import heeds_positions
from kvstore.store import KVStore

PASS_TOKENS = {"cpu": 32}
"""About how many tokens take as long as a pass takes by itself, which reads all weights; by the type of the device.
benchmarks/batch.py measures it."""
DEVICE_PASS_TOKENS = 256  # not measured: a GPU computes some hundred tokens in the time that it takes to start a pass
_RESERVE = 64
_GROWTH = 8  # the reserve of the cache is at least an eighth of it, as that of a `GrowingLayer`
_BY_DISTANCE = ("bloom", "mpt")  # take no position_ids, and need none: only distances between tokens count


def check_padding(model: Any) -> None:
    """Check that the model computes the same of a sequence wherever in a batch its first column is.

    Raises:
        UnsupportedModel: the positions that the model counts begin at the first column, padding or not.
    """
    plain = bare(model)
    name = getattr(plain.config, "model_type", type(plain).__name__)
    if name in _BY_DISTANCE:
        return
    takes = "position_ids" in inspect.signature(plain.forward).parameters
    if not takes or not heeds_positions(model):
        raise UnsupportedModel(
            f"{name}: the model {'heeds' if takes else 'takes'} no position_ids, so padding moves its tokens to other "
            "positions; pass rows of the same length, or one row at a time"
        )


def check_layers(model: Any) -> None:
    """Check that rows of the model's caches can stand beside each other, each with padding of its own.

    Raises:
        UnsupportedModel: names layers that do not keep all tokens.
    """
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
    if kinds:
        name = getattr(model.config, "model_type", type(model).__name__)
        raise UnsupportedModel(
            f"{name}: batches are supported of layers that keep all tokens, and the cache has a {min(kinds)}; call "
            "generate for each row by itself"
        )


def groups_of(missing: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Return which rows are computed in one pass: those whose padding costs less than a pass of their own.

    Args:
        missing: how many tokens each row lacks.
        pass_tokens: what a pass costs by itself, in tokens.

    Example:
        >>> groups_of([500, 12, 0, 490, 30], pass_tokens=32)
        [[0, 3], [4, 1], [2]]
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(missing)), key=lambda row: -missing[row]):
        longest = missing[groups[-1][0]] if groups else 0
        if missing[row] and longest and longest - missing[row] <= pass_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def prefill(
    model: Any, rows: Rows, store: KVStore, namespace: str | bytes, copies: int = 1, chunk: int | None = None
) -> tuple[Any, torch.Tensor]:
    """Make the cache of all columns of a batch but the last. The store is read, and not changed.

    Args:
        model: in evaluation mode.
        rows: the prompts.
        store: what it holds of each row is not computed.
        namespace: see `KVStore.get`.
        copies: how many neighbouring rows of the cache each prompt gets.
        chunk: compute at most so many tokens of a row at a time.

    Returns:
        A transformers cache `[rows * copies, heads, columns - 1, dim]`, zeros where padding is; and the
        log-probabilities of its tokens, float32 `[rows * copies, columns - 1]`, NaN where there are none.

    Raises:
        UnsupportedModel: see `check_layers`, and `check_padding` for rows of different lengths.
    """
    check_layers(model)
    check_rows(store.identity.layout)
    if rows.is_padded:
        check_padding(model)
    width = rows.columns - 1
    prompts = [tokens[:-1] for tokens in rows.tokens]
    batch = LeftPadded(
        store.identity.layout, len(prompts) * copies, width, model.device, max(_RESERVE, width // _GROWTH)
    )
    known = [store.contains(prompt, namespace=namespace) if prompt else 0 for prompt in prompts]
    missing = [len(prompt) - count for prompt, count in zip(prompts, known, strict=True)]
    passes, scored = Passes(model, store, chunk), torch.full((len(prompts) * copies, width), float("nan"))
    for group in groups_of(missing, pass_tokens(model)):
        ours = [prompts[row] for row in group]
        hits = [store.get(prompt, namespace=namespace, device=model.device) if prompt else None for prompt in ours]
        found = [passes.alone(ours[0], hits[0])] if len(group) == 1 else passes.together(ours, hits)
        for row, (layers, logprobs) in zip(group, found, strict=True):
            batch.fill(row * copies, layers, copies)
            if logprobs is not None:
                scored[row * copies : (row + 1) * copies, width - len(logprobs) :] = torch.from_numpy(logprobs)
    return batch.cache(), scored


def pass_tokens(model: Any) -> int:
    """Return what a pass costs by itself, in tokens; below 0 if the model must never see padding."""
    try:
        check_padding(model)
    except UnsupportedModel:
        return -1
    return PASS_TOKENS.get(model.device.type, DEVICE_PASS_TOKENS)


class Computed(NamedTuple):
    """The cache of a prompt, and the log-probabilities of its tokens as `Scores.logprobs` has them; None if they were
    not asked for, or nothing was computed."""

    layers: KVLayers
    logprobs: Logprobs | None


@dataclass(frozen=True)
class Passes:
    """Goes on from hits. store: what the caches are for; chunk: compute at most so many tokens of a row at a time."""

    model: Any
    store: KVStore
    chunk: int | None

    def alone(self, prompt: list[int], hit: Hit | None) -> Computed:
        """The cache of one prompt, computed without any padding; none of an empty one."""
        held = 0 if hit is None else hit.tokens
        if held == len(prompt):
            return Computed(() if hit is None else hit.layers, None)
        cache = DynamicCache(config=self.model.config) if hit is None else hit.cache()
        scores = self._compute(cache, torch.tensor([prompt[held:]]), torch.arange(held, len(prompt))[None], None)
        return Computed(cache_layers(cache), None if scores is None else scores.logprobs(len(prompt)))

    def together(self, prompts: list[list[int]], hits: list[Hit | None]) -> list[Computed]:
        """The caches of several prompts. The first tokens that they lack stand in the same column."""
        held = [0 if hit is None else hit.tokens for hit in hits]
        lengths = [len(prompt) - count for prompt, count in zip(prompts, held, strict=True)]
        begin, new = max(held), max(lengths)
        cache = DynamicCache(config=self.model.config)
        if begin:
            past = LeftPadded(self.store.identity.layout, len(hits), begin, self.model.device, reserve=new)
            for row, hit in enumerate(hits):
                past.fill(row, () if hit is None else hit.layers)
            cache = past.cache()
        ids = torch.zeros((len(prompts), new), dtype=torch.int64)
        mask = torch.zeros((len(prompts), begin + new), dtype=torch.int64)
        for row, (prompt, count, length) in enumerate(zip(prompts, held, lengths, strict=True)):
            ids[row, :length] = torch.tensor(prompt[count:], dtype=torch.int64)
            mask[row, begin - count : begin + length] = 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, begin:]
        scores = self._compute(cache, ids, positions, None if bool(mask.all()) else mask)
        layers = cache_layers(cache)
        return [
            Computed(
                row_of(layers, row, begin - count, begin + length),
                None if scores is None else scores.logprobs(count + length, row, begin - count),
            )
            for row, (count, length) in enumerate(zip(held, lengths, strict=True))
        ]

    def _compute(
        self, cache: Any, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> Scores | None:
        """Run the model over new tokens `[rows, new]`; `cache` grows by them. mask: of all columns; None for ones."""
        with prompt_scores(self.model, cache, self.store) as scores:
            advance(self.model, cache, int(cache.get_seq_length()), ids, positions, mask, self.chunk)
        return scores
