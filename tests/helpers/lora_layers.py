"""Layers with adapters, made as peft makes them: for tests that run where peft is not installed."""

from __future__ import annotations

from typing import Any

import torch


class LoraLinear(torch.nn.Module):
    """A linear layer with low-rank adapters by name."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "scaling")

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = torch.nn.ModuleDict(), torch.nn.ModuleDict()
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    def add(self, name: str, seed: int, rank: int = 2) -> None:
        chance = torch.Generator().manual_seed(seed)
        down = torch.nn.Linear(self.base_layer.in_features, rank, bias=False)
        up = torch.nn.Linear(rank, self.base_layer.out_features, bias=False)
        with torch.no_grad():
            for layer in (down, up):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=chance) * 0.3)
        self.lora_A[name], self.lora_B[name], self.r[name], self.scaling[name] = down, up, rank, 1.0

    def delta(self, name: str) -> torch.Tensor:
        return self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]

    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += self.delta(name)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            self.base_layer.weight.data -= self.delta(self.merged_adapters.pop())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.disable_adapters and self.merged_adapters:
            self.unmerge()
        result = self.base_layer(x)
        if not self.disable_adapters and not self.merged_adapters:
            for name in self.active_adapters:
                result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


def with_adapters(model: Any, **seeds: int) -> list[LoraLinear]:
    """Puts adapters, by name and seed, around every query and value projection of a llama; none is active yet."""
    layers = []
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            wrapped = getattr(layer.self_attn, name)
            if not isinstance(wrapped, LoraLinear):
                wrapped = LoraLinear(wrapped)
                setattr(layer.self_attn, name, wrapped)
            for adapter, seed in seeds.items():
                wrapped.add(adapter, seed + len(layers))
            layers.append(wrapped)
    return layers


def activate(layers: list[LoraLinear], *names: str) -> None:
    for layer in layers:
        layer._active_adapter = list(names)
