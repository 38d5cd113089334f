"""Tokens that stand for images or sound. Their ids are the same whatever is seen or heard: they tell no caches apart.

Thread-safe: nothing here has a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.core.layout import KVLayout
from kvstore.errors import UnsupportedTokens


def text_end(layout: KVLayout, tokens: Any) -> int:
    """Return how many leading tokens are text.

    Args:
        layout: of the model's caches; `KVLayout.media` names the tokens that are not text.
        tokens: ids, 1-D.

    Example:
        >>> from dataclasses import replace
        >>> layout = replace(KVLayout.uniform(1, 2, 8), media=(("image_token_id", 9),))
        >>> text_end(layout, [1, 2, 9, 3])
        2
    """
    if not layout.media:
        return len(tokens)
    places = np.flatnonzero(np.isin(np.asarray(tokens), [token for _, token in layout.media]))
    return int(places[0]) if len(places) else len(tokens)


def check_text(layout: KVLayout, tokens: Any) -> None:
    """Check that a sequence is text alone.

    Raises:
        UnsupportedTokens: names the first token that stands for an image or for sound.
    """
    end = text_end(layout, tokens)
    if end < len(tokens):
        token = int(tokens[end])
        name = next(name for name, media in layout.media if media == token)
        raise UnsupportedTokens(
            f"tokens: position {end} has the {name} {token}: ids do not show images or sound, so their caches are "
            "not stored; use the store for prompts of text alone, or for the text before this position"
        )
