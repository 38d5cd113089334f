"""The models to measure on: what a recipe is, what they learn from, and that a training can be left and taken up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmodules import load
from transformers import DynamicCache

models = load("models")
conversations, train, text, vocabulary = (
    load(name) for name in ("conversations", "models.train", "models.text", "models.vocabulary")
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [["a", "b"], ["ab", "c"], ["b", "c"]]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def document() -> dict[str, Any]:
    """A tokenizer.json: three special tokens, 26 letters, and one id a merge."""
    tokens = [*SPECIAL, *LETTERS, *("".join(pair) for pair in MERGES)]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    rows = [{"id": i, "content": token} | added for i, token in enumerate(SPECIAL)]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": MERGES}
    plain = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": rows, "model": model} | plain


def fast(file: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    ends = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2]}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(file)), **ends)


def small(name: str = "llama3", **changes: Any) -> Any:
    return replace(models.QUICK[f"{name}-quick"], vocabulary=32, length=16, **changes)


def ids(count: int) -> Any:
    """Text that is made up: few words, so that it can be learnt."""
    return np.random.default_rng(1).integers(3, 6, count).astype(np.uint16)


def run_of(recipe: Any) -> Any:
    return train.Run(recipe, ids(400), ids(2 * 17).reshape(2, 17))


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_a_recipe_is_known_by_all_that_the_model_follows_from() -> None:
    recipe = models.RECIPES["llama3"]
    assert replace(recipe, config=dict(recipe.config)).digest == recipe.digest
    other = {
        key: "x" if isinstance(value, str) else value + 1 for key, value in asdict(recipe).items() if key != "config"
    }
    digests = [replace(recipe, **{key: value}).digest for key, value in other.items()]
    digests.append(replace(recipe, config=recipe.config | {"hidden_size": 8}).digest)
    assert len({recipe.digest, *digests}) == len(asdict(recipe)) + 1
    assert recipe.folder == Path("build/models/llama3") / recipe.digest


@pytest.mark.parametrize("name", models.RECIPES)
def test_a_model_is_of_its_family_and_small(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(train.config_of(models.RECIPES[name]))
    assert 9_900_000 < sum(x.numel() for x in model.parameters()) < 20_000_000
    config = model.config
    assert {
        "llama3": lambda: (config.rope_parameters["rope_type"], config.num_key_value_heads, config.head_dim),
        "gemma3": lambda: (set(config.layer_types), config.sliding_window),
        "deepseek3": lambda: (config.kv_lora_rank, config.qk_rope_head_dim, config.first_k_dense_replace),
    }[name]() == {
        "llama3": ("llama3", 4, 64),
        "gemma3": ({"sliding_attention", "full_attention"}, 256),
        "deepseek3": (256, 64, config.num_hidden_layers),
    }[name]


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    recipe = models.RECIPES["llama3"]
    rates = [train.rate_at(recipe, step) for step in range(recipe.steps + 1)]
    assert rates[0] == pytest.approx(recipe.rate / recipe.warmup, rel=1e-3)
    assert max(rates) == pytest.approx(recipe.rate, rel=0.02)
    assert rates[-1] == pytest.approx(recipe.rate / 10)


# -- vocabulary and text -----------------------------------------------------------------------------------------------


def test_a_cut_vocabulary_keeps_the_ids_and_splits_what_it_no_longer_has() -> None:
    whole, first = document(), fast(document())
    cut = vocabulary.cut(whole, 31)
    assert whole == document()
    second = fast(cut)
    assert len(second) == 31
    assert first("abcbc").input_ids == [30, 31]
    assert second("abcbc").input_ids == [30, 4, 5]
    assert second("<|im_start|>abcbc").input_ids == [1, 30, 4, 5]


def test_a_vocabulary_without_all_letters_or_in_another_order_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 29 ids, found 28"):
        vocabulary.cut(document(), 28)
    mixed = document()
    mixed["model"]["merges"] = MERGES[::-1]
    with pytest.raises(ValueError, match="in the order of their merges"):
        vocabulary.cut(mixed, 31)


def turns(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": x} for role, x in zip(["user", "assistant"] * 2, said, strict=False)]


def test_nothing_is_trained_on_that_is_measured_on() -> None:
    long = "x" * text.TELLING
    tests = [turns("thank you", long)]
    source = [turns("a", "b"), turns("c", long), turns("thank you", "d"), turns(long + "y", "e")]
    assert list(text.for_training(source, tests)) == [source[0], source[2], source[3]]


def test_a_conversation_is_written_with_markup_or_without() -> None:
    assert text.written(turns("a", "b"), True) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert text.written(turns("a", "b"), False) == "a\n\nb\n\n"


def test_every_window_comes_once_a_pass_in_an_order_of_its_own() -> None:
    stream = np.arange(10 * 16 + 1).astype(np.uint16)
    passes = [
        [int(row[0]) for step in range(at, at + 5) for row in text.batch_of(stream, step, 2, 16, 7)] for at in (0, 5)
    ]
    assert [sorted(found) for found in passes] == [list(range(0, 160, 16))] * 2
    assert passes[0] != passes[1]
    assert np.array_equal(text.batch_of(stream, 3, 2, 16, 7), text.batch_of(stream, 3, 2, 16, 7))
    assert text.batch_of(stream, 0, 2, 16, 7).shape == (2, 17)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.RECIPES)
def test_a_training_that_was_left_gives_the_same_model(name: str, tmp_path: Path) -> None:
    recipe = small(name, steps=6)
    straight = run_of(recipe)
    while not straight.is_done:
        straight.advance()
    left = run_of(recipe)
    for _ in range(3):
        left.advance()
    left.save(tmp_path / "state")
    again = run_of(replace(recipe, seed=0))
    again.restore(tmp_path / "state")
    while not again.is_done:
        again.advance()
    losses = [[(point["step"], point["loss"]) for point in run.curve] for run in (straight, again)]
    assert losses[0] == losses[1]
    assert losses[0][-1][1] < losses[0][0][1]
    pairs = zip(straight.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def little_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Runs in an empty folder, on text that is made up; a function that gives a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "token_stream", lambda *_: ids(400))
    monkeypatch.setattr(train, "held_out", lambda *_: ids(2 * 17).reshape(2, 17))
    return lambda: fast(document())


def test_training_stops_at_its_bound_goes_on_and_is_kept(
    little_text: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(steps=4)
    monkeypatch.setitem(models.QUICK, recipe.name, recipe)
    with pytest.raises(SystemExit, match=r"llama3-quick is not trained yet; run .*benchmarks.models llama3 --quick"):
        models.load(recipe.name)
    notes: list[str] = []
    assert not train.train(recipe, little_text(), minutes=0, note=notes.append)
    assert "step 0 of 4" in notes[-1]
    assert train.train(recipe, little_text(), note=notes.append)
    assert any("goes on at step 0" in note for note in notes)
    assert sorted(path.name for path in recipe.folder.parent.iterdir()) == [recipe.digest]
    notes.clear()
    assert train.train(recipe, little_text(), note=notes.append)
    assert notes == []
    model, tokenizer = models.load(recipe.name)
    assert model.dtype == torch.bfloat16
    assert tokenizer("abcbc").input_ids == [30, 31]
    assert json.loads((recipe.folder / "recipe.json").read_text())["steps"] == 4
    assert len(json.loads((recipe.folder / "curve.json").read_text())) == 4
    assert conversations.load_model(Path(recipe.name))[0].config.rope_parameters["rope_type"] == "llama3"


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(SystemExit, match=r"expected a folder or one of smollm2, llama3, .*, found 'llama4'"):
        models.load("llama4")


def test_a_cache_without_windows_has_what_every_layer_computed() -> None:
    """What the ratios are measured on: all tokens in every layer, the last ones as a cache with windows has them."""
    model = train.new_model(small("gemma3")).eval()
    tokens = torch.from_numpy(ids(80).astype(np.int64))[None]
    whole, windows = DynamicCache(), DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = [model(tokens, past_key_values=cache, use_cache=True).logits for cache in (whole, windows)]
    assert torch.equal(*logits)
    for full, kept in zip(whole.layers, windows.layers, strict=True):
        assert full.keys.shape[-2] == 80
        assert torch.equal(full.keys[..., -kept.keys.shape[-2] :, :], kept.keys)
    assert windows.layers[0].keys.shape[-2] < 80
