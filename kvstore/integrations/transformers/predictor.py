"""Predictors: models whose cache of the same tokens says most of what a model's cache holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash

from kvstore.calibration.speculative import fit
from kvstore.codecs.profile import Profile
from kvstore.codecs.speculative.codec import MOST_CHUNK, SECTION
from kvstore.core.layout import KVLayout
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.describe import layout_from_config
from kvstore.integrations.transformers.mode import check_mode
from kvstore.integrations.transformers.passes import empty_cache, run_pass
from kvstore.integrations.transformers.watch import identity_now

__all__ = ["Predictor"]

WEIGHTS = ("int8", "fp8", "float32")
_BLOCK = 128  # rows and columns of a matrix that share a scale (fp8)
_INT8, _FP8 = 127.0, 448.0  # the largest numbers

Chunk = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, `[heads, n, dim]`."""


class Predictor:
    """A model that runs tokens in passes of one length, to predict what another one's cache holds.

    What it predicts depends on the machine and its libraries to the last bit; archives compare checksums.

    Attributes:
        model: it, in evaluation mode.
        chunk: tokens of a pass.
        profile: carries what differs on from layer to layer (section "speculative"), or None.
        fingerprint: 16 bytes, of all numbers of its weights, its config, and `chunk`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(config).bfloat16().eval()
        >>> predictor = Predictor.of(model, "int8", chunk=64)
        >>> predictor.model.dtype, len(predictor.fingerprint)
        (torch.float32, 16)
    """

    def __init__(self, model: Any, chunk: int = 256, profile: Profile | None = None) -> None:
        """Take any model whose cache has the layout of the other's. Its weights must not be changed later.

        Args:
            model: a transformers model, in evaluation mode.
            chunk: tokens of a pass, 1 to 16,384.
            profile: see `Predictor`.

        Raises:
            ValueError: the chunk is out of range; see `mode.check_mode`.
        """
        check_mode(model)
        if not 1 <= chunk <= MOST_CHUNK:
            raise ValueError(f"chunk: expected 1 to {MOST_CHUNK} tokens, found {chunk}")
        self.model, self.chunk, self.profile = model, chunk, profile
        self.fingerprint = _fingerprint(model, chunk)

    @classmethod
    def of(cls, model: Any, weights: str = "int8", chunk: int = 256, profile: Profile | None = None) -> Predictor:
        """Make a copy of a model that computes in float32, with coarser weights.

        Matrices of linear layers are rounded; embeddings and the last layer stay. The copy takes float32's room in
        memory, whatever `weights` says: what they cost in bits is what this is for.

        Args:
            model: the one whose caches are to be predicted.
            weights: "int8" (a scale for each row), "fp8" (e4m3, a scale for each block of 128 x 128), or "float32" (the
                weights themselves: the best prediction, and the dearest).
            chunk, profile: see `Predictor`.

        Raises:
            ValueError: names the argument.
        """
        if weights not in WEIGHTS:
            raise ValueError(f"weights: expected one of {', '.join(WEIGHTS)}, found {weights!r}")
        made = copy.deepcopy(bare(model)).float()
        last = made.get_output_embeddings()
        for module in made.modules():
            if isinstance(module, torch.nn.Linear) and module is not last and weights != "float32":
                with torch.no_grad():
                    module.weight.copy_(_by_rows(module.weight) if weights == "int8" else _by_blocks(module.weight))
        return cls(made, chunk, profile)

    def counts(self, tokens: int) -> list[int]:
        """Return the tokens of each pass over so many."""
        return [min(self.chunk, tokens - begin) for begin in range(0, tokens, self.chunk)]

    @torch.no_grad()
    def fitted(self, model: Any, windows: Iterable[Sequence[int]]) -> Predictor:
        """Return the same predictor with a profile that carries what it misses on from layer to layer.

        Args:
            model: the one whose caches are predicted. Keep the profile (`profile.save`): archives name it.
            windows: token ids of texts like those to come, some thousand in all.

        Raises:
            LayoutMismatch: the two models have other layouts.
        """
        identity = identity_now(model)

        def pairs() -> Iterator[tuple[Chunk, Chunk]]:
            for ids in windows:
                cache = empty_cache(model)
                run_pass(model, torch.tensor(list(ids)), cache)
                layers, _ = identity.layout.layers_of(cache, len(ids))
                chunks = list(self.predictions(ids, identity.layout))
                joined = [
                    (torch.cat(ks, 1), torch.cat(vs, 1))
                    for ks, vs in (zip(*x, strict=True) for x in zip(*chunks, strict=True))
                ]
                yield joined, [(k.cpu(), v.cpu()) for k, v in layers]

        profile = Profile.new(identity, {SECTION: fit(identity.layout, pairs())})
        return Predictor(self.model, self.chunk, profile)

    @torch.no_grad()
    def predictions(self, tokens: Sequence[int], layout: KVLayout) -> Iterator[Chunk]:
        """Run the tokens, and yield what the cache holds of each pass, rounded to bfloat16.

        The last pass is as long as the others: it goes on with token 0.

        Raises:
            LayoutMismatch: the cache has another layout.
        """
        cache, own = empty_cache(self.model), layout_from_config(self.model.config, self.model.dtype)
        for begin in range(0, len(tokens), self.chunk):
            part = list(tokens[begin : begin + self.chunk])
            run_pass(self.model, torch.tensor(part + [0] * (self.chunk - len(part))), cache)
            layers, _ = own.layers_of(cache, begin + self.chunk)
            rounded = [(_rows(k, begin, len(part)), _rows(v, begin, len(part))) for k, v in layers]
            layout.layers_of(rounded, len(part))
            yield rounded


def _rows(tensor: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    return tensor[:, begin : begin + count].to(torch.bfloat16).cpu().contiguous()


def _by_rows(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to int8 with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / _INT8
    return (weight / scale).round() * scale


def _by_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3 with a scale for each block."""
    found = torch.empty_like(weight)
    for i in range(0, weight.shape[0], _BLOCK):
        for j in range(0, weight.shape[1], _BLOCK):
            part = weight[i : i + _BLOCK, j : j + _BLOCK]
            scale = part.abs().max().clamp_min(1e-12) / _FP8
            found[i : i + _BLOCK, j : j + _BLOCK] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    return found


def _fingerprint(model: Any, chunk: int) -> bytes:
    found = xxhash.xxh3_128()
    facts = {"chunk": chunk, "config": model.config.to_diff_dict(), "attention": model.config._attn_implementation}
    found.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, tensor in bare(model).state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.digest()
