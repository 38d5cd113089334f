"""Whose caches they are: the model that vLLM loaded, with its files, its config, and vLLM itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from kvstore import ConfigError, KVLayout, UnsupportedModel
from kvstore.integrations.vllm.checkpoint import checkpoint_fingerprint, checkpoint_folder
from kvstore.integrations.vllm.identity import check_supported, identity_of, layer_names, layout_of


class FullAttentionSpec(SimpleNamespace):
    """As vLLM's, by its name and fields."""


class MambaSpec(SimpleNamespace):
    pass


def group(**changes: Any) -> Any:
    fields = {
        "block_size": 128,
        "num_kv_heads": 2,
        "head_size": 16,
        "head_size_v": 16,
        "dtype": torch.bfloat16,
        "kv_quant_mode": 0,
        "num_head_slots": None,
        "state_content_bytes": None,
        "tokens_per_state": 1,
    }
    names = [f"model.layers.{i}.self_attn.attn" for i in (0, 1, 10, 2)]
    return SimpleNamespace(kv_cache_spec=FullAttentionSpec(**{**fields, **changes}), layer_names=names)


def config(folder: Path, **changes: Any) -> Any:
    model = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), revision=None, quantization=None, hf_config=LlamaConfig(**model, **changes)
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.arange(1000.0), "b": torch.ones(2, 3)}, str(tmp_path / "model" / "model.safetensors"))
    return tmp_path / "model"


def differs(
    folder: Path, stored: dict[str, str], version: str = "0.32.0", backend: str = "CPU_ATTN", **changes: Any
) -> str:
    return identity_of(config(folder, **changes), group(), version, backend).difference(stored)


def test_the_same_model_is_the_same_wherever_its_files_lie(folder: Path, tmp_path: Path) -> None:
    stored = identity_of(config(folder), group(), "0.32.0", "CPU_ATTN").fields()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    save_file({"b": torch.ones(2, 3)}, str(moved / "model-00001-of-00002.safetensors"))
    save_file({"a": torch.arange(1000.0)}, str(moved / "model-00002-of-00002.safetensors"))
    assert differs(moved, stored) == ""
    assert KVLayout.from_canonical(stored["layout"]).bytes_per_token == 4 * 2 * 2 * 16 * 2


def test_another_model_is_refused_by_name(folder: Path) -> None:
    stored = identity_of(config(folder), group(), "0.32.0", "CPU_ATTN").fields()
    assert differs(folder, stored, version="0.33.0").startswith("engine: stored 'vllm 0.32.0 cpu CPU_ATTN unquantised'")
    assert differs(folder, stored, backend="FLASH_ATTN").startswith("engine: stored")
    assert differs(folder, stored, rms_norm_eps=1e-3).startswith("config: stored")
    assert "layout.rope.rope_theta: stored" in differs(
        folder, stored, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )
    save_file({"a": torch.arange(1000.0), "b": torch.zeros(2, 3)}, str(folder / "model.safetensors"))
    assert differs(folder, stored).startswith("weights: stored")


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no \*\.safetensors"):
        checkpoint_fingerprint(tmp_path)
    with pytest.raises(UnsupportedModel, match="not found on this machine"):
        checkpoint_folder("nobody/no-such-model", None, str(tmp_path))


def test_a_model_of_the_hub_is_looked_for_where_vllm_put_it(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--some--model"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert checkpoint_folder("some/model", None, str(tmp_path)) == cached / "snapshots" / commit


def test_layers_are_in_the_order_of_their_numbers() -> None:
    assert [name.split(".")[2] for name in layer_names(group())] == ["0", "1", "2", "10"]
    for names in (["model.layers.0.attn", "draft.layers.0.attn"], ["attn"], ["a.1.b.2.c"]):
        with pytest.raises(UnsupportedModel, match="not numbered"):
            layer_names(SimpleNamespace(layer_names=names))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("parallel_config", "world_size", 2), "world_size is 2"),
        (("parallel_config", "data_parallel_size", 2), "data_parallel_size is 2"),
        (("load_config", "load_format", "dummy"), "load_format is 'dummy'"),
        (("kv_transfer_config", "kv_role", "kv_consumer"), "kv_role is 'kv_consumer'"),
        (("kv_transfer_config", "kv_load_failure_policy", "fail"), "kv_load_failure_policy"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(folder: Path, change: tuple[str, str, Any], message: str) -> None:
    part, name, value = change
    given = config(folder)
    setattr(getattr(given, part), name, value)
    with pytest.raises(ConfigError, match=message):
        check_supported(given, [group()])


def test_draft_models_are_refused(folder: Path) -> None:
    given = config(folder)
    check_supported(given, [group()])
    given.speculative_config = object()
    with pytest.raises(ConfigError, match="speculative_config"):
        check_supported(given, [group()])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group(), group()], r"2 groups of caches \(FullAttentionSpec, FullAttentionSpec\)"),
        ([SimpleNamespace(kv_cache_spec=MambaSpec())], "keeps a MambaSpec"),
        ([group(kv_quant_mode=1)], "a form that is not stored"),
        ([group(head_size_v=8)], "a form that is not stored"),
    ],
)
def test_caches_that_cannot_be_stored_are_refused(folder: Path, groups: list[Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check_supported(config(folder), groups)


def test_keys_that_depend_on_the_servers_longest_sequence_are_refused(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="rope type dynamic"):
        layout_of(config(folder, rope_parameters=rope), group())
