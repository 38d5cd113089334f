"""Logits that a model does not compute by itself: of the hidden states of a prompt, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.around import is_compiled

__all__ = ["Head"]

# Bytes of the logits that are made at a time: so many tokens that the output embedding is read seldom.
_LOGITS_BYTES = 16 << 20
_SURE = 0.02  # of the largest logit: what rounding in bfloat16 does


class Head:
    """Makes logits of hidden states as a model does of the last ones, where it is asked for no more (`logits_to_keep`).

    Watches the part of the model below the output embedding, whose output are the hidden states of all tokens of a
    pass. Nothing that the model computes changes. A context manager; passes with other caches are ignored. Of a
    compiled model, whose parts are not seen, it makes none.

    Args:
        model: a transformers model.
        cache: of the passes that are watched.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        is_traced = is_compiled(model)  # a hook in the middle of a graph would break it
        model = bare(model)
        below = getattr(model, "base_model", model)
        self._cache = cache
        self._below = None if below is model or is_traced else below
        self._embedding = _output_embedding(model)
        self._finish = _finish(model.config)
        self._hidden: torch.Tensor | None = None

    def __enter__(self) -> Head:
        below = self._below
        self._hook = None if below is None else below.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._hidden = None
        if self._hook is not None:
            self._hook.remove()

    def _look(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if any(value is self._cache for value in kwargs.values()):
            self._hidden = getattr(output, "last_hidden_state", None)

    def take(self, last: torch.Tensor, count: int) -> Iterator[tuple[int, torch.Tensor]] | None:
        """Return the logits of the first tokens of the pass that has just ended, made as they are taken.

        Args:
            last: logits that the model itself made of the pass's last tokens, `[rows, kept, vocabulary]`.
            count: of how many tokens.

        Returns:
            Yields the first place of each part, and its logits, `[rows, part, vocabulary]`. None if they cannot be
            made: the model's own do not follow from hidden states in one of the ways known here.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is None or self._embedding is None or hidden.shape[0] != last.shape[0] or hidden.shape[1] < count:
            return None
        if not _alike(self._logits(hidden[:, -1:]), last[:, -1:]):
            return None
        step = max(1, _LOGITS_BYTES // (last.shape[0] * last.shape[2] * last.element_size()))
        return ((at, self._logits(hidden[:, at : min(at + step, count)])) for at in range(0, count, step))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._embedding(hidden)
        return self._finish(logits)


def _output_embedding(model: Any) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def _finish(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What models do to the product with the output embedding: Cohere and Granite scale it, Gemma bounds it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = float(getattr(text, "logit_scale", None) or 1) / float(getattr(text, "logits_scaling", None) or 1)
    most = getattr(text, "final_logit_softcapping", None)

    def finished(logits: torch.Tensor) -> torch.Tensor:
        logits = logits * scale if scale != 1 else logits
        return torch.tanh(logits / most) * most if most else logits

    return finished


def _alike(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether logits differ by rounding alone."""
    mine, theirs = mine.float(), theirs.float()
    return mine.shape == theirs.shape and bool(
        ((mine - theirs).abs() <= _SURE * theirs.abs().amax().clamp_min(1e-6)).all()
    )
