"""Moves keys to other positions: the rotary embedding of K, rotated on by a difference of positions."""

from __future__ import annotations

import torch

from kvstore.codecs.view import KVView
from kvstore.core.rope import ONE, angles_of, frequencies


@torch.inference_mode()  # the tensors may have been made in it, by another thread
def rotate_keys(view: KVView, shift: int) -> None:
    """Rotate the keys of a view to positions higher by `shift`, in place, rounding to their dtype once.

    This is for keys that are used as they come. The donor codec predicts in integers instead, which are exact.

    Args:
        view: made of tensors on the CPU; its keys are mutated.
        shift: how many positions further.

    Raises:
        ValueError: keys of this layout cannot be moved (`rope.can_rotate`).
    """
    if shift == 0 or view.layout.rope == "none":
        return
    half = len(frequencies(view.layout.rope, view.layout.layers[0].key_dim))  # what is behind 2 * half stands still
    angles = torch.from_numpy(angles_of(view.layout, shift)[:, :half]).float() / ONE
    cos, sin = angles[0], angles[1]
    for key in view.tensors()[::2]:
        a, b = key[..., :half].float(), key[..., half : 2 * half].float()
        first, second = a * cos - b * sin, b * cos + a * sin  # both before either is written: a may be a view
        key[..., :half], key[..., half : 2 * half] = first, second
