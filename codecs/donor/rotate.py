"""Moves rows to other positions: their rotated keys, rotated on by a difference of positions."""

from __future__ import annotations

import numpy as np
import torch

from kvstore.codecs.view import KVView
from kvstore.core.rope import rotated_part


@torch.inference_mode()  # the tensors may have been made in it, by another thread
def rotate_keys(view: KVView, shift: int) -> None:
    """Rotate the keys of a view to positions higher by `shift`, in place, rounding to their dtype once.

    Layers with latents have the rotated key as V; the latent, which has no position, is left as it is. This is for keys
    that are used as they come. The donor codec predicts in integers instead, which are exact.

    Args:
        view: made of tensors on the CPU; its keys are mutated.
        shift: how many positions further.

    Raises:
        ValueError: keys of this layout cannot be moved (`rope.can_move`).
    """
    if shift == 0 or view.layout.rope == "none":
        return
    part = rotated_part(view.layout)
    cos, sin = (torch.from_numpy(function(shift * part.frequencies)).float() for function in (np.cos, np.sin))
    for key in view.tensors()[part.place :: 2]:
        a, b = key[..., part.first].float(), key[..., part.second].float()
        first, second = a * cos - b * sin, b * cos + a * sin  # both before either is written: a may be a view
        key[..., part.first], key[..., part.second] = first, second
