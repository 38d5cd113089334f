"""The benchmark of warm-ups: what stands in for a store."""

from __future__ import annotations

from benchmodules import load
from tiny_models import tiny

from kvstore import ModelIdentity
from kvstore.integrations.transformers import warmup


def test_the_same_passes_run_without_a_store() -> None:
    benchmark, model = load("warmup"), tiny("llama")
    memory = benchmark.Memory(ModelIdentity.from_transformers(model))
    stem = list(range(1, 25))
    report = warmup(memory, model, [[*stem, 30, 31], [*stem, 40], stem])
    assert (report.computed_tokens, report.repeated_tokens) == (len(stem) + 3, 0)
    assert (*stem, 40) in memory.held
