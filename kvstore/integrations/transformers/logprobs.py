"""Log-probabilities of the tokens in a cache, read off the logits that a model computes anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore.integrations.transformers.adapters import bare
from kvstore.trie import UNIFORM_LOGPROB

__all__ = ["Scores"]

# Bytes of float32 logits that are normalised at a time. Of a whole prompt they would be gigabytes; on a CPU they should
# stay in its cache (measured: a third less time), on a GPU each piece costs a launch.
CPU_BYTES = 1 << 20
DEVICE_BYTES = 64 << 20


class Scores:
    """Reads the log-probabilities of tokens off the logits of the forward passes that fill one cache.

    `model.generate` computes logits of the answer, and of the prompt only if the model ignores `logits_to_keep`: those
    of a whole prompt may cost as much as several layers. A pass's logits of position i score the token at i + 1: of the
    same pass, or the first of the next one. The rows of a batch are scored each by itself, as long as none takes
    another's place. Nothing waits for the device before `logprobs`. A context manager. Passes with other caches, of
    other threads, are ignored.

    Args:
        model: a transformers model, whose passes are watched inside the `with` block.
        cache: the cache that the passes fill.

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

    def __init__(self, model: Any, cache: Any) -> None:
        self._model = bare(model)
        self._cache = cache
        self._scored: list[tuple[int, torch.Tensor]] = []  # column of the first token, float32 [rows, tokens]
        self._last: tuple[int, torch.Tensor] | None = None  # column to be scored, its logits [rows, 1, vocabulary]

    def __enter__(self) -> Scores:
        self._hook = self._model.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _look(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if output is None:  # another thread's pass, while torch enters or removes this hook: it has no `kwargs` then
            return
        cache: Any = kwargs.get("past_key_values")
        if cache is not self._cache:
            return
        ids = args[0] if args else kwargs.get("input_ids")
        logits = getattr(output, "logits", None)
        if ids is None or logits is None or not 0 < logits.shape[1] <= ids.shape[1]:
            self._last = None
            return
        logits = logits.detach()
        end = int(cache.get_seq_length())
        if self._last is not None and self._last[0] == end - ids.shape[1]:
            self._score(self._last[0], self._last[1], ids[:, :1])
        inner = logits.shape[1] - 1
        row_bytes = 4 * logits.shape[0] * logits.shape[2]
        step = max(1, (CPU_BYTES if logits.device.type == "cpu" else DEVICE_BYTES) // row_bytes)
        for at in range(0, inner, step):
            part = logits[:, at : min(at + step, inner)]
            behind = ids.shape[1] - inner + at
            self._score(end - inner + at, part, ids[:, behind : behind + part.shape[1]])
        self._last = end, logits[:, -1:].clone() if inner else logits[:, -1:]  # not a view that keeps all of them

    def _score(self, first: int, logits: torch.Tensor, ids: torch.Tensor) -> None:
        each = torch.log_softmax(logits, -1, dtype=torch.float32)
        self._scored.append((first, each.gather(-1, ids.to(each.device).unsqueeze(-1)).squeeze(-1)))

    def logprobs(self, count: int, row: int = 0, begin: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Return those of a row's tokens in the columns `begin` to `begin + count`.

        Returns:
            float32 `[count]`, natural logarithms <= 0; `UNIFORM_LOGPROB` for tokens that no pass scored.
        """
        out = np.full(count, UNIFORM_LOGPROB, np.float32)
        if self._scored:
            values = torch.cat([scored[row] for _, scored in self._scored]).cpu().numpy()
            at = np.concatenate([np.arange(first, first + scored.shape[1]) for first, scored in self._scored]) - begin
            usable = (at >= 0) & (at < count) & ~np.isnan(values)
            out[at[usable]] = np.minimum(values[usable], 0)
        return out
