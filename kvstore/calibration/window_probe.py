"""A model with windows, like Gemma 3, taken apart as far as the exact predictor needs it: its caches and layer 0."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.model_probe import (
    Bits,
    Floats,
    bits_of,
    first_rows,
    key_factors,
    layout_of,
    name_of,
    rows_of,
    submodule,
)
from kvstore.core.cache_argument import cache_name
from kvstore.core.rope_types import SHORT
from kvstore.errors import UnsupportedModel


class WindowProbe:
    """model, regime: as of `ModelProbe`, whose methods this has. Its layers may differ in shape and rotary embedding.

    Raises `UnsupportedModel` naming what is missing: a known dtype, a rotary embedding that is the same for all layers
    of a window, or one of the projections of layer 0. What errors cost is not known, so no codec with loss can be
    fitted to it.
    """

    def __init__(self, model: Any, regime: str = SHORT) -> None:
        name = name_of(model)
        self.layout = layout_of(model, regime)
        if self.layout.states:
            raise UnsupportedModel(f"{name}: calibration does not know layers with states; use a codec without profile")
        if self.layout.place_of[0]:
            raise UnsupportedModel(f"{name}: calibration needs a first layer that keeps keys and values")
        factors = [key_factors(name, group.layout.rope, group.layout.layers[0].key_dim) for group in self.layout.groups]
        number = next(i for i, group in enumerate(self.layout.groups) if 0 in group.layers)
        self._rope, self._factors = self.layout.groups[number].layout.rope, factors[number]
        bodies = [model.get_decoder(), getattr(model, "model", model)]  # Llama 4 says that it is its own decoder
        self._base = next((body for body in bodies if hasattr(body, "embed_tokens")), model)
        self._embed = submodule(self._base, "embed_tokens", name)
        self._first = submodule(self._base, "layers", name)[0]
        submodule(self._first, "input_layernorm", f"{name}: layer 0")
        attention = submodule(self._first, "self_attn", f"{name}: layer 0")
        for projection in ("k_proj", "v_proj"):
            submodule(attention, projection, f"{name}: layer 0: self_attn")

    @torch.inference_mode()
    def run(self, tokens: npt.NDArray[np.int64]) -> tuple[list[tuple[Bits, Bits]], npt.NDArray[np.float64]]:
        """Prefills one window, `[tokens]`: per layer K (as cached) and V of all tokens, words `[tokens, heads * dim]`,
        and no statistics."""
        ids = torch.from_numpy(tokens)[None].to(self._base.device)
        cache = import_module("transformers").DynamicCache()  # without a config every layer keeps all tokens
        self._base(input_ids=ids, **{cache_name(self._base): cache}, use_cache=True)
        layers = [cache.layers[place] for place in self.layout.place_of]
        return [(rows_of(layer.keys[0]), rows_of(layer.values[0])) for layer in layers], np.zeros(1)

    @torch.inference_mode()
    def first_layer(self) -> Bits:
        """What `KVDump.first_layer` holds."""
        return first_rows(self._embed, self._first, self._rope, self._factors)

    def embedding(self) -> Bits:
        """`[vocabulary, hidden]`."""
        return bits_of(self._embed.weight)

    def value_costs(self) -> Floats:
        """None are known."""
        return np.zeros(0, np.float32)
