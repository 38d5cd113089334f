"""Log-probabilities of the tokens in a cache, read off the logits that a model computes anyway."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.core.cache_argument import given_cache, keeps_states_alone
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.around import around
from kvstore.integrations.transformers.head import Head
from kvstore.metrics import Metric
from kvstore.trie import UNIFORM_LOGPROB

if TYPE_CHECKING:
    from kvstore.store import KVStore

__all__ = ["Logprobs", "Scores", "prompt_scores", "scores_of"]

Logprobs = np.ndarray[tuple[int], np.dtype[np.float32]]

# Bytes of float32 logits that are normalised at a time. Of a whole prompt they would be gigabytes; on a CPU they should
# stay in its cache (measured: a third less time), on a GPU each piece costs a launch.
CPU_BYTES = 1 << 20
DEVICE_BYTES = 64 << 20


class Scores:
    """Reads the log-probabilities of tokens off the logits of the forward passes that fill one cache.

    `model.generate` computes logits of the answer, and of the prompt only if the model ignores `logits_to_keep`: those
    of a whole prompt may cost as much as several layers. With `StoreConfig.score_prompts` they are computed here, some
    tokens at a time (`Head`). A pass's logits of position i score the token at i + 1: of the same pass, or the first of
    the next one; so the first token behind a stored prefix has none. The rows of a batch are scored each by itself, as
    long as none takes another's place. Nothing waits for the device before `logprobs`, but the check of `Head`. A
    context manager. Passes with other caches, of other threads, are ignored.

    Args:
        model: a transformers model, whose passes are watched inside the `with` block.
        cache: the cache that the passes fill.
        store: of the cache; None scores no prompts. Passes whose prompt cannot be scored are counted there.
        known: float32 `[rows, tokens]`, those of the first columns, NaN where they are not known.

    Example:
        >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
        >>> with torch.no_grad(), Scores(model, cache) as scores:
        ...     output = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> found = scores.logprobs(3)
        >>> len(found), bool(found[1] < 0)
        (3, True)
    """

    def __init__(self, model: Any, cache: Any, store: KVStore | None = None, known: torch.Tensor | None = None) -> None:
        self._model = bare(model)
        self._cache = cache
        self._store = store
        self._head = Head(model, cache) if store is not None and store.config.score_prompts else None
        # column of the first token, float32 [rows, tokens]
        self._scored: list[tuple[int, torch.Tensor]] = [] if known is None else [(0, known)]
        self._last: tuple[int, torch.Tensor] | None = None  # column to be scored, its logits [rows, 1, vocabulary]

    def __enter__(self) -> Scores:
        with contextlib.ExitStack() as hooks:
            if self._head is not None:
                hooks.enter_context(self._head)
            # Before those of an attached store, which puts the prompt as soon as its pass has ended.
            hooks.enter_context(around(self._model, after=self._look, first=True))
            self._hooks = hooks.pop_all()
        _watching[id(self._cache)] = self
        return self

    def __exit__(self, *_: object) -> None:
        _watching.pop(id(self._cache), None)
        self._hooks.close()

    def _look(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if output is None:  # another thread's pass, while torch enters or removes this hook: it has no `kwargs` then
            return
        cache: Any = given_cache(kwargs)
        if cache is not self._cache or keeps_states_alone(cache):
            return
        ids = args[0] if args else kwargs.get("input_ids")
        logits = getattr(output, "logits", None)
        if ids is None or logits is None or not 0 < logits.shape[1] <= ids.shape[1]:
            self._last = None
            return
        logits = logits.detach()
        end, inner = int(cache.get_seq_length()), logits.shape[1] - 1
        begin, first = end - ids.shape[1], ids.shape[1] - 1 - inner  # columns; the first token that has logits
        if self._last is not None and self._last[0] == begin:
            self._score(begin, self._last[1], ids[:, :1])
        if first and self._head is not None:
            self._score_prompt(begin, first, logits, ids)
        self._score(begin + first + 1, logits[:, :inner], ids[:, first + 1 :])
        self._last = end, logits[:, -1:].clone() if inner else logits[:, -1:]  # not a view that keeps all of them

    @torch.no_grad()
    def _score_prompt(self, begin: int, count: int, last: torch.Tensor, ids: torch.Tensor) -> None:
        """Scores the tokens behind the first `count` ones of a pass, of which the model made no logits."""
        assert self._head is not None
        assert self._store is not None
        parts = self._head.take(last, count)
        if parts is None:
            self._store.metrics.add(Metric.FALLBACK_PROMPT_NOT_SCORED)
            return
        for at, logits in parts:
            self._score(begin + at + 1, logits, ids[:, at + 1 : at + 1 + logits.shape[1]])

    def _score(self, column: int, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Scores `ids`, which begin in `column`, by the logits of the tokens before them, a piece at a time."""
        row_bytes = 4 * logits.shape[0] * logits.shape[2]
        step = max(1, (CPU_BYTES if logits.device.type == "cpu" else DEVICE_BYTES) // row_bytes)
        for at in range(0, logits.shape[1], step):
            each = torch.log_softmax(logits[:, at : at + step], -1, dtype=torch.float32)
            taken = ids[:, at : at + step].to(each.device).unsqueeze(-1)
            self._scored.append((column + at, each.gather(-1, taken).squeeze(-1)))

    def logprobs(self, count: int, row: int = 0, begin: int = 0) -> Logprobs:
        """Return those of a row's tokens in the columns `begin` to `begin + count`.

        Returns:
            float32 `[count]`, natural logarithms <= 0; `UNIFORM_LOGPROB` for tokens that no pass scored.
        """
        out = np.full(count, UNIFORM_LOGPROB, np.float32)
        if self._scored:
            values = torch.cat([scored[row].to(self._scored[-1][1].device) for _, scored in self._scored]).cpu().numpy()
            at = np.concatenate([np.arange(first, first + scored.shape[1]) for first, scored in self._scored]) - begin
            usable = (at >= 0) & (at < count) & ~np.isnan(values)
            out[at[usable]] = np.minimum(values[usable], 0)
        return out


_watching: dict[int, Scores] = {}  # by the id of the cache, which `Scores` keeps alive


def scores_of(cache: Any) -> Scores | None:
    """Return what scores the passes that fill a cache, while they are watched."""
    return _watching.get(id(cache))


def prompt_scores(model: Any, cache: Any, store: KVStore) -> contextlib.AbstractContextManager[Scores | None]:
    """Return what scores the passes over a prompt; of nothing, unless the store is to have that (`score_prompts`)."""
    return Scores(model, cache, store) if store.config.score_prompts else contextlib.nullcontext()
