"""A model with latents, like DeepSeek's, taken apart as far as the exact predictor needs it: its caches and layer 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.model_probe import STEP, Bits, Floats, bits_of, layout_of, name_of, rows_of, submodule
from kvstore.core.cache_argument import cache_of
from kvstore.core.rope_types import SHORT


class LatentProbe:
    """model, regime: as of `ModelProbe`, whose methods this has.

    Raises `UnsupportedModel` naming what is missing: a known dtype, or one of the parts that make a latent. What errors
    cost is not known, so no codec with loss can be fitted to it.
    """

    def __init__(self, model: Any, regime: str = SHORT) -> None:
        name = name_of(model)
        self.layout = layout_of(model, regime)
        self._base = getattr(model, "base_model", model)
        self._embed = submodule(self._base, "embed_tokens", name)
        self._first = submodule(self._base, "layers", name)[0]
        submodule(self._first, "input_layernorm", f"{name}: layer 0")
        self._attention = submodule(self._first, "self_attn", f"{name}: layer 0")
        for part in ("kv_a_proj_with_mqa", "kv_a_layernorm"):
            submodule(self._attention, part, f"{name}: layer 0: self_attn")

    @torch.inference_mode()
    def run(self, tokens: npt.NDArray[np.int64]) -> tuple[list[tuple[Bits, Bits]], npt.NDArray[np.float64]]:
        """Prefills one window, `[tokens]`: per layer the latents and the rotated keys, words `[tokens, dim]`, and no
        statistics."""
        ids = torch.from_numpy(tokens)[None].to(self._base.device)
        cache = cache_of(self._base(input_ids=ids, use_cache=True))
        return [(rows_of(layer.keys[0]), rows_of(layer.values[0])) for layer in cache.layers], np.zeros(1)

    @torch.inference_mode()
    def first_layer(self) -> Bits:
        """What `KVDump.first_layer` holds; of the rotated key, which the token alone does not say, zeros."""
        embedding, attention, found = self._embed.weight, self._attention, []
        shape = self.layout.layers[0]
        for begin in range(0, len(embedding), STEP):
            x = self._first.input_layernorm(embedding[begin : begin + STEP])
            latents = bits_of(attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(x)[:, : shape.key_dim]))
            found.append(np.concatenate([latents, np.zeros((len(latents), shape.value_dim), np.uint16)], 1))
        return np.concatenate(found)

    def embedding(self) -> Bits:
        """`[vocabulary, hidden]`."""
        return bits_of(self._embed.weight)

    def value_costs(self) -> Floats:
        """None are known."""
        return np.zeros(0, np.float32)
