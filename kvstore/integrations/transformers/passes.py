"""Which passes of a model a cache was computed in, and the same passes again.

The same tokens give the same bits only in passes of the same lengths: kernels choose their order of sums by shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.codecs.tokens.archive import Pass, passes_of
from kvstore.core.cache_argument import cache_of, keeps_states_alone, pass_arguments
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.around import around

__all__ = ["Passes"]


class Passes:
    """Notes the passes of a model that fill a cache of one sequence, however many calls they are spread over.

    A context manager, which can be entered again for the next turn. What is noted is the last sequence that began with
    an empty cache, or with one of as many tokens as were noted so far. Passes of several rows make it forget all. For
    one thread at a time.

    Args:
        model: a transformers model, whose passes are watched inside the `with` block.

    Example:
        >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
        >>> with torch.no_grad(), Passes(model) as passes:
        ...     output = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        ...     output = model(torch.tensor([[4]]), past_key_values=cache)
        >>> passes.found
        (Pass(kept=3, given=3), Pass(kept=1, given=1))
    """

    def __init__(self, model: Any) -> None:
        self._model = bare(model)
        self._starts: list[tuple[int, int]] = []

    def __enter__(self) -> Passes:
        self._around = around(self._model, after=self._look)
        self._around.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._around.__exit__(None, None, None)

    @property
    def found(self) -> tuple[Pass, ...]:
        """The passes so far; () where they do not make up a sequence from its first token on."""
        return passes_of(self._starts)

    def _look(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        cache = cache_of(output)
        if ids is None or cache is None or keeps_states_alone(cache):
            return
        given = int(ids.shape[1])
        start = int(cache.get_seq_length()) - given
        if start == 0:
            self._starts = []
        end = sum(each.kept for each in self.found)
        if ids.shape[0] != 1 or start > end or start < 0:
            self._starts = []
            return
        self._starts.append((start, given))


def empty_cache(model: Any) -> Any:
    """Return a DynamicCache of a model, without tokens."""
    return DynamicCache(config=bare(model).config)


def run_pass(model: Any, ids: torch.Tensor, cache: Any, *, logits: bool = False) -> torch.Tensor | None:
    """Run the model over `ids`, int64 `[n]`, behind a cache, which grows. Returns the logits of the last token if they
    are asked for."""
    output = model(ids[None].to(model.device), **pass_arguments(bare(model), cache))
    return output.logits[0, -1] if logits else None


@torch.no_grad()
def replay(model: Any, tokens: Sequence[int], passes: Sequence[Pass]) -> Any:
    """Return the cache of tokens, a DynamicCache, computed in these passes from nothing."""
    cache, begin = empty_cache(model), 0
    for kept, given in passes:
        part = list(tokens[begin : begin + given])
        run_pass(model, torch.tensor(part + [0] * (given - len(part))), cache)
        if given > kept:
            cache.crop(kept - given)
        begin += kept
    return cache


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Compute with so many threads inside the block, as all of the process does then; 0: with as many as now.

    Of one float32 row the sums are split among the threads, and so the last bits follow their number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
