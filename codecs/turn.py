"""Moves keys to other positions: the rotary embedding of K, turned by a difference of positions."""

from __future__ import annotations

import torch

from kvstore.codecs.donor_spans import angles_of
from kvstore.codecs.view import KVView


@torch.inference_mode()  # the tensors may have been made in it, by another thread
def turn_keys(view: KVView, shift: int) -> None:
    """Turns the keys of a view to positions higher by `shift`, in place, rounding to their dtype once.

    Raises `ValueError` for a rotary embedding whose frequencies are not known (`donor_spans.can_turn`). Not what the
    donor codec predicts by, which is exact in integers: this is for keys that are used as they come.
    """
    if shift == 0 or view.layout.rope == "none":
        return
    angles = torch.from_numpy(angles_of(view.layout, shift)).float() / 16384
    cos, sin = angles[0], angles[1]
    half = len(cos)
    for key in view.tensors()[::2]:
        a, b = key[..., :half].float(), key[..., half:].float()
        first, second = a * cos - b * sin, b * cos + a * sin  # both before either is written: a may be a view
        key[..., :half], key[..., half:] = first, second
