"""Tells the gate of a store how long passes of a model take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvstore.gate.gate import Gate
from kvstore.integrations.transformers.around import around
from kvstore.integrations.transformers.lazy_layer import LazyLayer


@contextmanager
def observed(gate: Gate, model: Any, start: int, tokens: int) -> Iterator[None]:
    """Tell what the block takes, which computes `tokens` tokens of one sequence behind `start` others."""
    begin = _now(model)
    yield
    if tokens:
        gate.observe_prefill(tokens, _now(model) - begin, start=start, device=model.device)


class FirstPasses:
    """Tells what the first two passes of `model.generate` take: what is missing of the prompt, and a single token.

    A context manager; passes with other caches, and those of several rows, tell nothing.

    Args:
        gate: whom to tell.
        model: a transformers model.
        given: its cache, by the name of the argument.
        held: of how many tokens that is.
    """

    def __init__(self, gate: Gate, model: Any, given: dict[str, Any], held: int) -> None:
        self._gate = gate
        self._model = model
        ((self._name, self._cache),) = given.items()
        self._held = held
        self._tokens = 0
        self._begin = 0.0
        self._left = 2
        self._waits = False

    def __enter__(self) -> FirstPasses:
        self._around = around(self._model, self._before, self._after)
        self._around.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._around.__exit__(None, None, None)

    def _is_waiting(self) -> bool:
        """Whether the pass waits for layers of its cache, so that it takes longer than computing does."""
        return any(isinstance(layer, LazyLayer) for layer in getattr(self._cache, "layers", ()))

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if not self._left or kwargs.get(self._name) is not self._cache or ids is None:
            return
        self._tokens = ids.shape[1] if ids.shape[0] == 1 else 0
        self._waits = self._is_waiting()
        self._begin = _now(self._model)

    def _after(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if not self._left or not self._begin or kwargs.get(self._name) is not self._cache:
            return
        self._left -= 1
        if self._tokens and not self._waits:
            seconds = _now(self._model) - self._begin
            self._gate.observe_prefill(self._tokens, seconds, start=self._held, device=self._model.device)
        self._held += self._tokens
        self._begin = 0.0


def _now(model: Any) -> float:
    """The time when everything is done that the model was asked for."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
