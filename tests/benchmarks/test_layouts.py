"""The benchmark of layouts: what it says of chance, of donors, and of a store with default settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmodules import load

layouts, models, common = load("layouts"), load("models"), load("common")
train, data = load("models.train"), load("peers.codecs.data")


def bench_of(name: str, recipes: Any = None) -> Any:
    """Of a model with chance weights, by default a tiny one."""
    recipe = recipes[name] if recipes else models.QUICK[f"{name}-quick"]
    model = train.new_model(recipe).to(torch.bfloat16).eval()
    return layouts.Bench(common.Rows("layouts"), name, model, tokenizer, None, 1)


def tokenizer(text: str, **_: Any) -> Any:
    """A token a character."""
    return type("Encoded", (), {"input_ids": [ord(letter) % 500 + 3 for letter in text]})


def ids(*shape: int) -> Any:
    return np.random.default_rng(0).integers(3, 500, shape).astype(np.uint32)


def cache_of(bench: Any, tokens: int) -> Any:
    return layouts.behind(bench, [], [ids(tokens)])


def figures(bench: Any) -> dict[tuple[str, str], float]:
    return {(row["case"], row["metric"]): row["value"] for row in bench.rows.rows}


@pytest.mark.parametrize("name", models.RECIPES)
def test_a_default_store_takes_no_more_than_the_caches_of_any_layout(name: str, tmp_path: Path) -> None:
    bench = bench_of(name, models.RECIPES)  # of a tiny one the catalog's pages would be the most
    bench.tokenizer = None
    assert layouts.stored(bench, tmp_path, ids(1, 320))
    found = figures(bench)
    assert found[f"{name}/store", "exact"] == 1
    assert 0 < found[f"{name}/store", "stored_bytes"] < found[f"{name}/store", "cache_bytes"]
    kept = {"llama3": 320 * 8192, "gemma3": 320 * 2 * 512 + 255 * 10 * 512, "deepseek3": 320 * 5120}[name]
    assert found[f"{name}/store", "cache_bytes"] == kept


@pytest.mark.parametrize(("name", "refused"), [("llama3", set()), ("gemma3", {"donor"}), ("deepseek3", {"donor"})])
def test_every_codec_has_its_figures_or_refuses_the_layout(
    name: str, refused: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench = bench_of(name)
    kv = cache_of(bench, 128)
    layouts.codecs(bench, kv, None)
    found = figures(bench)
    codecs = {"splitzip", "entropy", "donor"}
    assert {codec for codec in codecs if (f"{name}/{codec}/KV", "refused") in found} == refused
    for codec in codecs - refused:
        ratio, bits = (found[f"{name}/{codec}/KV", metric] for metric in ("ratio", "bits_per_value"))
        assert ratio > 1
        assert bits == pytest.approx(16 / ratio, rel=1e-4)  # rows have six digits
    assert all(f"{name}/{codec}/KV: " in capsys.readouterr().err for codec in refused)


def test_exponents_inside_of_channels_are_told_from_all() -> None:
    """Two channels with an exponent each: nothing is left to say inside of them, one bit of both together."""
    layout = data.KVLayout.uniform(num_layers=1, heads=1, head_dim=2)
    k = torch.tensor([1.0, 4.0]).expand(1, 64, 2).bfloat16()
    kv = data.assemble([(ids(64), [(k, k)])], 64 * layout.bytes_per_token, layout)
    assert layouts.exponent_bits(kv) == (0, 1)


def test_a_cache_in_another_order_has_its_values_and_not_its_channels() -> None:
    bench = bench_of("llama3")
    bench.name = "other"  # nothing untrained to compare with
    kv = cache_of(bench, 128)
    layouts.is_like_chance(bench, kv)
    found = figures(bench)
    inside, whole = (found["other/cache", metric] for metric in ("exponent_bits_in_channels", "exponent_bits"))
    assert 0 < inside < whole
    ratios = {row["case"]: row["ratio"] for row in bench.rows.rows if row["metric"] == "entropy_ratio"}
    assert set(ratios) == {"other/cache/shuffled", "other/cache/normal"}
    assert ratios["other/cache/shuffled"] < 1


@pytest.mark.parametrize(
    ("rates", "name"), [([1.1, 0.2], "0.7"), ([0.02, 0.01], "0.0198"), ([2, 1], "1.01"), ([], "0.7")]
)
def test_the_lossy_rate_is_one_that_the_profile_reaches(rates: list[float], name: str) -> None:
    ladder = [[1.0, 1.0, rate, 0.1, 0.1] for rate in rates]
    report = {"parts": {"lossy": {"ladder": ladder}} if rates else {}}
    assert layouts.lossy_name(SimpleNamespace(report=report)) == f"predictive@{name}"
