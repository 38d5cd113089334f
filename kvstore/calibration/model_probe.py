"""A model like Llama, taken apart as far as calibration needs it: its caches, its weights, its queries and norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.words import words_of
from kvstore.core.cache_argument import cache_of
from kvstore.core.layout import SINKS, KVLayout
from kvstore.core.rope import attention_scaling, frequencies, in_pairs
from kvstore.core.rope_types import SHORT
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.describe import layout_from_config

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
STEP = 4096  # tokens of the vocabulary at a time
Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


class ModelProbe:
    """model: of transformers, in one of `DTYPES` and evaluation mode; it is not changed. regime: of
    `layout_from_config`.

    Raises `UnsupportedModel` naming what is missing: such a dtype, layers that are alike, the rotary embedding, or one
    of the projections that a layer of Llama has.
    """

    def __init__(self, model: Any, regime: str = SHORT) -> None:
        name = name_of(model)
        self.layout: KVLayout = layout_of(model, regime)
        if not self.layout.is_uniform:
            raise UnsupportedModel(
                f"{name}: calibration needs layers that are alike and keep keys and values of one width of all tokens"
            )
        shape = self.layout.layers[0]
        self._factors = key_factors(name, self.layout.rope, shape.key_dim)
        self._base = getattr(model, "base_model", model)
        self._layers = list(submodule(self._base, "layers", name))
        self._embed = submodule(self._base, "embed_tokens", name)
        for number, layer in enumerate(self._layers):
            attention = submodule(layer, "self_attn", f"{name}: layer {number}")
            for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
                submodule(attention, projection, f"{name}: layer {number}: self_attn")
        submodule(self._layers[0], "input_layernorm", f"{name}: layer 0")
        self._heads, self._dim = shape.heads, shape.key_dim
        self._group = model.config.get_text_config(decoder=True).num_attention_heads // shape.heads

    @torch.inference_mode()
    def run(self, tokens: npt.NDArray[np.int64]) -> tuple[list[tuple[Bits, Bits]], npt.NDArray[np.float64]]:
        """Prefills one window, `[tokens]`.

        Returns per layer K (as cached) and V, words `[tokens, heads * dim]`, and `[layers, heads * dim + 1]`: mean
        square of the queries that meet each dimension of K, in `rope.pair_order`, then the RMS norm of the residual
        stream behind the layer.
        """
        statistics = np.zeros((len(self._layers), self._heads * self._dim + 1))
        with self._hooks(statistics):
            ids = torch.from_numpy(tokens)[None].to(self._base.device)
            cache = cache_of(self._base(input_ids=ids, use_cache=True))
        return [(rows_of(layer.keys[0]), rows_of(layer.values[0])) for layer in cache.layers], statistics

    @torch.inference_mode()
    def first_layer(self) -> Bits:
        """What `KVDump.first_layer` holds: `[vocabulary, 2 * heads * dim]`."""
        return first_rows(self._embed, self._layers[0], self.layout.rope, self._factors)

    def embedding(self) -> Bits:
        """`[vocabulary, hidden]`."""
        return bits_of(self._embed.weight)

    def value_costs(self) -> Floats:
        """`[layers, heads, dim, dim]`: see `KVDump.sensitivity_v`."""
        factors = []
        for layer in self._layers:
            weight = layer.self_attn.o_proj.weight.detach().float().cpu()
            o = weight.view(-1, self._heads, self._group, self._dim)
            gram = torch.einsum("ohgd,ohge->hde", o, o) / self._group
            # Enough that a projection that ignores a direction still has a factor.
            gram += 1e-6 * gram.diagonal(dim1=1, dim2=2).mean() * torch.eye(self._dim)
            factors.append(torch.linalg.cholesky(gram).numpy())
        return np.stack(factors)

    @contextmanager
    def _hooks(self, statistics: npt.NDArray[np.float64]) -> Iterator[None]:
        hooks = []
        for number, layer in enumerate(self._layers):

            def keep_queries(_module: Any, _inputs: Any, out: Any, number: int = number) -> None:
                square = out.detach().float().view(-1, self._heads, self._group, self._dim).pow(2)
                energy = square.mean((0, 2)).cpu().numpy() * np.square(self._factors)
                statistics[number, :-1] = in_pairs(energy, self.layout.rope, self._dim).flatten()

            def keep_norm(_module: Any, _inputs: Any, out: Any, number: int = number) -> None:
                stream = (out[0] if isinstance(out, tuple) else out).detach().float().flatten(0, -2)[SINKS:]
                statistics[number, -1] = stream.norm(dim=-1).pow(2).mean().sqrt().item()

            attention = layer.self_attn
            queries = getattr(attention, "q_norm", None) or attention.q_proj
            hooks += [queries.register_forward_hook(keep_queries), layer.register_forward_hook(keep_norm)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def name_of(model: Any) -> str:
    """What errors call a model."""
    return str(getattr(model.config, "model_type", type(model).__name__))


def layout_of(model: Any, regime: str) -> KVLayout:
    """The layout of a model's caches. Raises `UnsupportedModel` if calibration does not know its dtype."""
    if model.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise UnsupportedModel(f"{name_of(model)}: calibration needs the model in one of {known}, found {model.dtype}")
    layout = layout_from_config(model.config, model.dtype, regime)
    if layout.indexed:
        raise UnsupportedModel(f"{name_of(model)}: calibration does not know the keys of an indexer")
    return layout


def first_rows(embed: Any, layer: Any, rope: str, factors: Floats) -> Bits:
    """What `KVDump.first_layer` holds, by the first layer of a model. factors: see `key_factors`."""
    attention, found, count = layer.self_attn, [], len(embed.weight)
    for begin in range(0, count, STEP):
        ids = torch.arange(begin, min(count, begin + STEP), device=embed.weight.device)
        x = layer.input_layernorm(embed(ids))
        keys, values = attention.k_proj(x), attention.v_proj(x)
        norm = getattr(attention, "k_norm", None)
        if norm is not None:
            keys = norm(keys.view(*keys.shape[:-1], -1, norm.weight.numel())).view(keys.shape)
        scaled = keys * torch.from_numpy(np.tile(factors, keys.shape[1] // len(factors))).to(keys)
        rotated = in_pairs(bits_of(scaled), rope, len(factors))
        found.append(np.concatenate([rotated, bits_of(values)], 1))
    return np.concatenate(found)


def key_factors(name: str, rope: str, dim: int) -> Floats:
    """What the rotary embedding multiplies keys and queries by besides rotating them, float32 `[dim]`."""
    if rope == "none":
        raise UnsupportedModel(f"{name}: calibration needs a rotary embedding, the model has none")
    try:
        rotated, scaling = 2 * len(frequencies(rope, dim)), attention_scaling(rope)
    except ValueError as error:
        raise UnsupportedModel(
            f"{name}: calibration does not know the rotary embedding of all layers: {error}"
        ) from error
    factors = np.ones(dim, np.float32)
    factors[:rotated] = scaling
    return factors


def submodule(module: Any, name: str, where: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise UnsupportedModel(f"{where}: has no {name}; calibration needs a model like Llama")
    return found


def rows_of(tensor: torch.Tensor) -> Bits:
    """`[heads, tokens, dim]` -> bits `[tokens, heads * dim]`."""
    return bits_of(tensor.transpose(0, 1).flatten(1))


def bits_of(tensor: torch.Tensor) -> Bits:
    return words_of(tensor.detach().contiguous().cpu())
