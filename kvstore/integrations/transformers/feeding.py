"""How a model takes its cache: under which name, and which tokens of a sequence it still computes."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch

from kvstore.core.cache_argument import cache_name, given_cache, keeps_states_alone, pass_arguments
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.around import around


@torch.no_grad()
def advance(
    model: Any,
    cache: Any,
    held: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None = None,
    chunk: int | None = None,
) -> None:
    """Run a model over new tokens; the cache grows by them.

    Args:
        model: in evaluation mode.
        cache: of the tokens before. Mutated.
        held: how many columns it has.
        ids, positions: `[rows, new]`.
        mask: `[rows, held + new]`, 1 where a token is; None for ones.
        chunk: at most so many columns at a time.
    """
    new, device = ids.shape[1], model.device
    parameters = inspect.signature(bare(model).forward).parameters
    given = pass_arguments(bare(model), cache)
    begin, step = 0, chunk or max(1, new)
    while begin < new:
        end = begin + 1 if held + begin and _goes_by_token(model) else min(new, begin + step)
        if mask is not None:
            given["attention_mask"] = mask[:, : held + end].to(device)
        if "position_ids" in parameters:
            given["position_ids"] = positions[:, begin:end].to(device)
        model(ids[:, begin:end].to(device), **given)
        begin = end


def advance_by_token(model: Any, cache: Any, held: int, prompt: list[int]) -> int:
    """Run a model over a prompt up to its last token, if it is one that must see tokens behind a cache one by one;
    nothing is done for others, nor where nothing is in the cache.

    Args:
        model: in evaluation mode.
        cache: of the first `held` tokens. Mutated.

    Returns:
        How many tokens the cache has now.
    """
    last = len(prompt) - 1
    if not held or held >= last or not _goes_by_token(model):
        return held
    advance(model, cache, held, torch.tensor([prompt[held:last]]), torch.arange(held, last)[None])
    return last


def forget_positions(model: Any) -> None:
    """Forget what models for images keep of the positions of the last call (`rope_deltas`): they take it for that of
    the next one where that goes on from a cache. Each call finds its own anew."""
    for module in bare(model).modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def _goes_by_token(model: Any) -> bool:
    """Whether a pass over several tokens begins with no state, whatever the cache holds: so the first Mamba in
    transformers, and what is made of it."""
    config = getattr(bare(model), "config", None)
    return getattr(config, "model_type", None) in _BY_TOKEN


_BY_TOKEN = ("falcon_mamba", "jamba", "mamba", "zamba")


class _Fed(threading.local):
    def __init__(self) -> None:
        self.caches: list[Any] = []


_fed = _Fed()  # what the feeds of this thread go on from, those of calls inside calls last


def is_fed(kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `model.generate` in this thread goes on from the cache of a `Feed`: it is `generate` of
    this package then that calls, and no one else need look into a store for it.

    Args:
        kwargs: arguments of the call.
    """
    given = given_cache(kwargs)
    return any(cache is given for cache in _fed.caches)


class Feed:
    """Lets `model.generate` go on from a cache that does not know its length, as one of states alone.

    `model.generate` cuts what is computed off the prompt where a cache knows its length. For the others, the first pass
    that takes the cache is given only what is missing. A context manager; passes with other caches are left alone.

    Args:
        model: a transformers model.
        cache: what it goes on from.
        held: of how many tokens that is.

    Attributes:
        tokens: of how many tokens the cache is now.
    """

    def __init__(self, model: Any, cache: Any, held: int) -> None:
        self._model = bare(model)
        self._name = cache_name(self._model)
        self._cache = cache
        self._skipped = held if keeps_states_alone(cache) else 0
        self.tokens = held

    @property
    def given(self) -> dict[str, Any]:
        """The cache as an argument of `model.generate`."""
        return {self._name: self._cache}

    def __enter__(self) -> Feed:
        self._around = around(self._model, before=self._feed)
        self._around.__enter__()
        _fed.caches.append(self._cache)
        return self

    def __exit__(self, *_: object) -> None:
        _fed.caches.pop()
        self._around.__exit__(None, None, None)

    def _feed(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = kwargs.get("input_ids")
        if kwargs.get(self._name) is not self._cache or ids is None:
            return args, kwargs
        if self._skipped:
            begin, self._skipped = self._skipped, 0
            kwargs = kwargs | {"input_ids": ids[:, begin:]}
            if kwargs.get("attention_mask") is not None:
                kwargs["attention_mask"] = kwargs["attention_mask"][:, begin:]
        self.tokens += kwargs["input_ids"].shape[1]
        return args, kwargs
