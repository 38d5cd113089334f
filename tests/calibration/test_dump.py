"""A dump holds what the model's cache holds, and an interrupted one is continued."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from calibrated import LENGTH, WINDOWS

from kvstore.calibration.dump import KVDump, floats
from kvstore.calibration.model_probe import ModelProbe
from kvstore.errors import ConfigError, ProfileError, UnsupportedModel

MODEL, TOKENIZER = calibrated.model(), calibrated.tokenizer()
HEADS, DIM = 2, 16


def make(folder: Path, **changes: Any) -> KVDump:
    settings = {"model": MODEL, "tokenizer": TOKENIZER, "text": calibrated.text(), "windows": WINDOWS, "length": LENGTH}
    return KVDump.make(**{**settings, "folder": folder, **changes})


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> KVDump:
    return make(tmp_path_factory.mktemp("dump"))


def prefilled(tokens: np.ndarray, model: Any = MODEL) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer K and V, bits `[tokens, heads * dim]`."""
    with torch.inference_mode():
        cache = model(torch.from_numpy(tokens)[None], use_cache=True).past_key_values

    def rows(tensor: torch.Tensor) -> np.ndarray:
        return tensor[0].transpose(0, 1).flatten(1).contiguous().view(torch.int16).numpy().view(np.uint16)

    return [(rows(layer.keys), rows(layer.values)) for layer in cache.layers]


def unrotated(keys: np.ndarray) -> np.ndarray:
    """float32 `[tokens, heads * dim]` without the rotary embedding of positions 0, 1, ..."""
    x = keys.reshape(len(keys), HEADS, 2, DIM // 2)
    angle = np.arange(len(keys))[:, None, None] * 10000.0 ** -(np.arange(DIM // 2) / (DIM // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([x[:, :, 0] * cos + x[:, :, 1] * sin, x[:, :, 1] * cos - x[:, :, 0] * sin], 2).reshape(keys.shape)


def test_every_layer_of_every_window_is_what_the_cache_holds(dump: KVDump) -> None:
    for window in range(dump.windows):
        tokens = dump.tokens(window)
        for number, (k, v) in enumerate(prefilled(tokens)):
            found = dump.layer(number, window)
            assert np.array_equal(found[0], k)
            assert np.array_equal(found[1], v)
            assert not found[0].flags.writeable


def test_the_windows_are_the_text_from_its_start(dump: KVDump) -> None:
    ids = TOKENIZER(calibrated.text()).input_ids
    assert [dump.tokens(w).tolist() for w in (0, 1)] == [ids[:LENGTH], ids[LENGTH : 2 * LENGTH]]
    assert dump.tokens(0).dtype == np.int64


def test_an_eighth_is_held_out_and_the_rest_can_be_limited(dump: KVDump) -> None:
    assert (dump.fit_windows, dump.held_out) == (range(8), range(8, 9))
    assert (dump.first(3).fit_windows, dump.first(3).held_out) == (range(3), range(8, 9))
    assert dump.first(99).fit_windows == dump.fit_windows


def test_the_first_layer_of_every_token_follows_from_the_weights(dump: KVDump) -> None:
    tokens = dump.tokens(2)
    k, v = dump.layer(0, 2)
    said = floats(dump.first_layer[tokens])
    assert np.array_equal(said[:, HEADS * DIM :], floats(v))
    assert np.abs(said[:, : HEADS * DIM] - unrotated(floats(k))).max() < 0.01
    assert dump.first_layer.shape == (256, 2 * HEADS * DIM)
    assert np.array_equal(floats(dump.embedding), MODEL.model.embed_tokens.weight.detach().float().numpy())


def test_key_costs_are_the_query_energies_of_rotary_pairs(dump: KVDump) -> None:
    layer, expected = MODEL.model.layers[1], []
    for window in dump.first(3).fit_windows:
        with torch.inference_mode():
            tokens = torch.from_numpy(dump.tokens(window))[None]
            hidden = MODEL.model(tokens, output_hidden_states=True).hidden_states[1]
            q = layer.self_attn.q_proj(layer.input_layernorm(hidden)).float().view(LENGTH, HEADS, 2, 2, DIM // 2)
        expected.append(q.square().mean((0, 2, 3)))  # positions, query heads of a group, both of a pair
    cost = (torch.stack(expected).mean(0) / DIM).sqrt().repeat(1, 2).flatten().numpy()
    found = dump.first(3).sensitivity_k
    assert (found.shape, found.dtype) == ((3, HEADS * DIM), np.float32)
    np.testing.assert_allclose(found[1], cost, rtol=1e-4)
    assert not np.allclose(dump.sensitivity_k, found, rtol=1e-4)


def test_value_costs_are_what_the_output_projection_makes_of_an_error(dump: KVDump) -> None:
    found = dump.sensitivity_v
    assert (found.shape, found.dtype) == ((3, HEADS, DIM, DIM), np.float32)
    error = np.random.default_rng(0).standard_normal(DIM).astype(np.float32)
    weight = MODEL.model.layers[2].self_attn.o_proj.weight.detach().float().numpy().reshape(-1, 4, DIM)
    through = [np.square(weight[:, head] @ error).sum() for head in (2, 3)]  # the query heads of key/value head 1
    np.testing.assert_allclose(np.square(error @ found[2, 1]).sum(), np.mean(through), rtol=1e-3)
    assert np.array_equal(found[0, 0], np.tril(found[0, 0]))


def test_norms_are_of_the_residual_stream_without_the_first_tokens(dump: KVDump) -> None:
    expected = []
    for window in dump.fit_windows:
        with torch.inference_mode():
            found = MODEL.model(torch.from_numpy(dump.tokens(window))[None], output_hidden_states=True).hidden_states
        expected.append([found[1][0, 4:].float().norm(dim=-1).square().mean().sqrt()])
    np.testing.assert_allclose(dump.norm[0], np.mean(expected), rtol=1e-4)
    assert dump.norm.shape == (3,)


def test_query_norms_are_part_of_the_queries(tmp_path: Path) -> None:
    model = calibrated.model("qwen3")
    found = make(tmp_path, model=model, windows=2)
    assert found.sensitivity_k.shape == (3, 2 * 24)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_norm.weight *= 2
    twice = make(tmp_path, model=model, windows=2).sensitivity_k
    np.testing.assert_allclose(twice[0], 2 * found.sensitivity_k[0], rtol=1e-2)


# ---- continuing ------------------------------------------------------------------------------------------------------


def runs(monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> list[int]:
    """Counts the windows that the model runs over; more than `limit` are an interruption."""
    counted: list[int] = []
    run = ModelProbe.run

    def counting(self: ModelProbe, tokens: Any) -> Any:
        if len(counted) == limit:
            raise KeyboardInterrupt
        counted.append(1)
        return run(self, tokens)

    monkeypatch.setattr(ModelProbe, "run", counting)
    return counted


def test_an_interrupted_run_continues(dump: KVDump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        runs(patch, limit=4)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    with pytest.raises(ProfileError, match="5 of 9 windows are missing"):
        KVDump.open(tmp_path)
    counted = runs(monkeypatch)
    told: list[tuple[str, int, int]] = []
    again = make(tmp_path, progress=lambda *step: told.append(step))
    assert len(counted) == WINDOWS - 4
    assert told == [("running the model", done, WINDOWS) for done in range(WINDOWS + 1)]
    for name in [path.name for path in dump.folder.iterdir()]:
        assert (again.folder / name).read_bytes() == (dump.folder / name).read_bytes()
    assert KVDump.open(tmp_path) == again


def test_a_window_that_was_cut_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, windows=3)
    whole = (tmp_path / "00001.kv").read_bytes()
    (tmp_path / "00001.kv").write_bytes(whole[:-1])
    counted = runs(monkeypatch)
    make(tmp_path, windows=3)
    assert len(counted) == 1
    assert (tmp_path / "00001.kv").read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [
        {"length": LENGTH - 1},
        {"windows": 2},
        {"text": "A" + calibrated.text()},
        {"model": calibrated.model(seed=1)},
    ],
    ids=["length", "windows", "text", "model"],
)
def test_another_model_text_or_size_starts_anew_and_says_so(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, windows=3)
    (tmp_path / "mine.txt").write_text("not of the dump")
    counted = runs(monkeypatch)
    told: list[str] = []
    made = make(tmp_path, **{"windows": 3, **change}, progress=lambda what, *_: told.append(what))
    assert len(counted) == made.windows
    assert told[0] == "another model, text or size: starting anew"
    assert (tmp_path / "mine.txt").exists()
    assert len(list(tmp_path.glob("*.kv"))) == made.windows


def test_removing_leaves_other_files(tmp_path: Path) -> None:
    (folder := tmp_path / "work").mkdir()
    (folder / "mine.txt").touch()
    made = make(folder, windows=2)
    made.remove()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    make(folder, windows=2).remove()
    assert not folder.exists()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_short_text_gives_fewer_windows_and_at_least_two(tmp_path: Path) -> None:
    assert make(tmp_path, text=calibrated.text(3 * LENGTH + 5)).windows == 3
    with pytest.raises(ConfigError, match=f"text: {LENGTH} tokens are less than two windows of {LENGTH}"):
        make(tmp_path, text=calibrated.text(LENGTH))


@pytest.mark.parametrize(("change", "message"), [({"windows": 1}, "windows: "), ({"length": 7}, "length: ")])
def test_bad_sizes_are_refused(change: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **change)


def _without(name: str) -> Any:
    model = calibrated.model()
    model.model.layers[2].self_attn.__dict__["_modules"].pop(name)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: calibrated.tiny("gpt2").bfloat16(), "gpt2: calibration needs a rotary embedding"),
        (lambda: _without("v_proj"), "llama: layer 2: self_attn: has no v_proj"),
        (lambda: calibrated.model("gemma3-full"), "rotary embedding of all layers"),
    ],
    ids=["gpt2", "no projection", "rope"],
)
def test_a_model_that_is_not_like_llama_is_refused_by_name(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        make(tmp_path, model=model())
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_dtype_is_refused_by_name() -> None:
    model = calibrated.model()
    stub = SimpleNamespace(config=model.config, dtype=torch.float8_e5m2)
    with pytest.raises(UnsupportedModel, match=r"torch\.float16, found torch\.float8_e5m2"):
        ModelProbe(stub)


def test_a_model_that_changes_the_embedding_first_is_refused(tmp_path: Path) -> None:
    model = calibrated.model()
    model.model.layers[0].register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1, *inputs[1:]))
    with pytest.raises(UnsupportedModel, match="embedding of the token alone"):
        make(tmp_path, model=model)


def test_a_folder_without_a_dump_is_refused(tmp_path: Path) -> None:
    for content in (None, b"[1]", b"{", b'{"version": 2}'):
        if content is not None:
            (tmp_path / "dump.json").write_bytes(content)
        with pytest.raises(ProfileError, match="no dump"):
            KVDump.open(tmp_path)
