"""Every property of a model that changes its caches changes the identity, and nothing else does."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import layouts_of_kinds, refused_configs, tiny

from kvstore import KVLayout, ModelIdentity
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.transformers import layout_from_config, tokenizer_fingerprint, weights_fingerprint

NAMES = ["llama", "qwen3", "gpt2", "gemma3-full"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_model_built_twice_has_the_same_identity(name: str) -> None:
    assert ModelIdentity.from_transformers(tiny(name)).digest == ModelIdentity.from_transformers(tiny(name)).digest


@pytest.mark.parametrize("name", NAMES)
def test_other_weights_give_another_identity(name: str) -> None:
    first, second = (ModelIdentity.from_transformers(tiny(name, seed)) for seed in (0, 1))
    assert first.weights != second.weights
    assert first.digest != second.digest
    assert first.layout == second.layout


@pytest.mark.parametrize("given", ["path/to/model", Path("path"), None, torch.nn.Linear(1, 1)], ids=repr)
def test_what_is_no_loaded_model_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"model: expected a loaded transformers model, found .*AutoModelForCausalLM"):
        ModelIdentity.from_transformers(given)


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: expected a loaded tokenizer, found 'path'; .*AutoTokenizer"):
        ModelIdentity.from_transformers(tiny("llama"), "path")


def _edit(parameter: str, place: int) -> Any:
    def change(model: Any) -> None:
        with torch.no_grad():
            dict(model.named_parameters())[parameter].view(-1)[place] += 1

    return change


def _rename(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj2 = model.model.layers[0].self_attn.k_proj
    del model.model.layers[0].self_attn.k_proj


def _reshape(model: Any) -> None:
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().reshape(1, -1))


def _buffer(model: Any) -> None:
    model.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_edit("model.layers.0.self_attn.k_proj.weight", 0), id="first element"),
        pytest.param(_edit("model.layers.2.mlp.down_proj.weight", -1), id="last element"),
        pytest.param(_edit("model.norm.weight", 7), id="small tensor"),
        pytest.param(_rename, id="name"),
        pytest.param(_reshape, id="shape"),
        pytest.param(_buffer, id="buffer"),
        pytest.param(lambda model: model.to(torch.bfloat16), id="dtype"),
        pytest.param(lambda model: setattr(model.config, "rms_norm_eps", 1e-3), id="epsilon"),
        pytest.param(lambda model: setattr(model.config, "hidden_act", "gelu"), id="activation"),
    ],
)
def test_what_changes_the_computation_changes_the_fingerprint(change: Any) -> None:
    model = tiny("llama")
    before = weights_fingerprint(model)
    change(model)
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_of_an_embedding_changes_the_fingerprint_wherever_it_is(name: str) -> None:
    """As where only the tokens were trained that were added: a sample of the tensor misses them."""
    model = tiny(name)
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    for embedding in embeddings:
        for row in (0, 1, embedding.weight.shape[0] // 2, embedding.weight.shape[0] - 2):
            before = weights_fingerprint(model)
            with torch.no_grad():
                embedding.weight[row] += 0.5
            assert weights_fingerprint(model) != before


def _quantised(seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(tiny("llama", seed), {torch.nn.Linear}, dtype=torch.qint8)


def test_packed_weights_count() -> None:
    other = tiny("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = torch.ao.quantization.quantize_dynamic(other, {torch.nn.Linear}, dtype=torch.qint8)
    assert weights_fingerprint(_quantised(0)) == weights_fingerprint(_quantised(0))
    assert weights_fingerprint(changed) != weights_fingerprint(_quantised(0))


def _looped(pattern: list[int]) -> Any:
    """A model that goes through some layers more than once."""
    model = tiny("llama")
    layers = [copy.copy(model.model.layers[number]) for number in pattern]
    for number, layer in enumerate(layers):
        layer._modules = dict(layer._modules)
        attention = layer._modules["self_attn"] = copy.copy(layer.self_attn)
        attention.layer_idx = number
    model.model.layers = torch.nn.ModuleList(layers)
    return model


def test_the_order_in_which_layers_are_used_again_counts() -> None:
    assert weights_fingerprint(_looped([0, 1, 1, 0])) != weights_fingerprint(_looped([0, 1, 0, 1]))
    assert weights_fingerprint(_looped([0, 1, 1, 0])) == weights_fingerprint(_looped([0, 1, 1, 0]))


class _Odd(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scales": [1.5, None], "odd": object()}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_state_of_which_nothing_is_known_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.odd = _Odd(1, 1)
    with pytest.raises(UnsupportedModel, match=r"mlp.odd._extra_state.odd: holds a builtins.object"):
        weights_fingerprint(model)


def test_what_does_not_change_the_computation_does_not_change_the_fingerprint() -> None:
    model = tiny("llama")
    before = weights_fingerprint(model)
    model.config.use_cache = False
    model.config._name_or_path = "elsewhere"
    model.requires_grad_(False)
    model(torch.arange(8)[None])
    assert weights_fingerprint(model) == before


def test_a_strided_parameter_has_the_fingerprint_of_its_values() -> None:
    plain, strided = tiny("llama"), tiny("llama")
    for parameter in strided.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.T.contiguous().T
    assert not strided.model.layers[0].self_attn.k_proj.weight.is_contiguous()
    assert weights_fingerprint(strided) == weights_fingerprint(plain)


def test_weights_that_are_not_loaded_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="meta device"):
        weights_fingerprint(tiny("llama").to("meta"))


def test_the_fingerprint_reads_a_sample_of_a_tensor_whatever_its_size() -> None:
    """Counted in bytes read, which no loaded machine changes: 256 elements a tensor, not the tensor."""
    from kvstore.integrations.transformers import fingerprint

    model = tiny("llama")
    parameter = model.model.layers[0].self_attn.k_proj.weight
    assert fingerprint._sample(parameter.detach()).numel() == 256 * parameter.element_size()
    huge = torch.zeros(1, dtype=torch.bfloat16).expand(1 << 40)  # 2 TiB if it were read or copied
    assert fingerprint._sample(huge).numel() == 512


IDENTITY = ModelIdentity("model", "revision", "weights", "tokenizer", KVLayout.uniform(2, 2, 8))
CHANGES: dict[str, Any] = {
    "model": "other",
    "revision": "other",
    "weights": "other",
    "tokenizer": "other",
    "codec_family": "lossy",
    "shard": "0/2",
    "layout": KVLayout.uniform(3, 2, 8),
}
LAYOUTS = {
    "layers": KVLayout.uniform(3, 2, 8),
    "heads": KVLayout.uniform(2, 4, 8),
    "dim": KVLayout.uniform(2, 2, 16),
    "dtype": KVLayout.uniform(2, 2, 8, dtype="float16"),
    "rope": KVLayout.uniform(2, 2, 8, rope='{"rope_theta": 10000.0}'),
}


def test_equal_fields_give_an_equal_digest() -> None:
    again = ModelIdentity("model", "revision", "weights", "tokenizer", KVLayout.uniform(2, 2, 8))
    assert again.digest == IDENTITY.digest
    assert len(IDENTITY.digest) == 32


@pytest.mark.parametrize("field", list(CHANGES))
def test_every_field_changes_the_digest(field: str) -> None:
    from dataclasses import fields, replace

    assert set(CHANGES) == {item.name for item in fields(ModelIdentity)}
    assert replace(IDENTITY, **{field: CHANGES[field]}).digest != IDENTITY.digest


@pytest.mark.parametrize("part", list(LAYOUTS))
def test_every_part_of_the_layout_changes_the_digest(part: str) -> None:
    from dataclasses import replace

    assert replace(IDENTITY, layout=LAYOUTS[part]).digest != IDENTITY.digest


def test_moving_text_from_one_field_to_the_next_changes_the_digest() -> None:
    from dataclasses import replace

    assert replace(IDENTITY, model="modelr", revision="evision").digest != IDENTITY.digest


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_from_the_config_is_that_of_the_cache(name: str) -> None:
    model = tiny(name)
    layout = layout_from_config(model.config, torch.float32)
    cache = model(torch.arange(5)[None], use_cache=True).past_key_values
    found = [(k.shape[1], k.shape[3], v.shape[3]) for k, v in ((x.keys, x.values) for x in cache.layers)]
    assert [(x.heads, x.key_dim, x.value_dim) for x in layout.layers] == found
    assert layout.dtype == "float32"
    assert (layout.rope == "none") == (name == "gpt2")


def test_another_rotary_base_is_another_layout() -> None:
    first, second = (
        tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": theta}) for theta in (1e4, 5e5)
    )
    assert layout_from_config(first.config, "float32") != layout_from_config(second.config, "float32")


@pytest.mark.parametrize("word", list(refused_configs()))
def test_what_cannot_be_stored_is_refused_by_name(word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word.split(",")[0]):
        layout_from_config(refused_configs()[word], "bfloat16")


def test_windows_chunks_latents_and_shared_layers_are_in_the_layout() -> None:
    gemma = layout_from_config(tiny("gemma3").config, "float32")
    kinds = [(layer.kind, layer.window) for layer in gemma.layers]
    assert kinds == [("sliding", 32), ("full", 0), ("sliding", 32)]
    configs = layouts_of_kinds()
    llama = layout_from_config(configs["chunked"], "float32")
    assert {(layer.kind, layer.window) for layer in llama.layers} == {("chunked", 64), ("full", 0)}
    latent = layout_from_config(configs["latent"], "float32").layers[0]
    assert (latent.heads, latent.key_dim, latent.value_dim) == (1, 512, 64)
    shared = layout_from_config(configs["shared"], "float32")
    assert shared.model_layers > len(shared.layers)


def _tokenizer(words: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0], pad_token=words[0])


def test_the_tokenizer_s_fingerprint_follows_its_vocabulary_only() -> None:
    first, same, other = _tokenizer(["a", "b", "c"]), _tokenizer(["a", "b", "c"]), _tokenizer(["a", "c", "b"])
    same(["a b", "a"], padding=True, truncation=True, max_length=2)  # leaves its traces in the backend
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(same)
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(other)
    model = tiny("llama")
    with_one = ModelIdentity.from_transformers(model, first)
    assert with_one.digest != ModelIdentity.from_transformers(model, other).digest
    assert with_one.digest == ModelIdentity.from_transformers(model, same).digest


def test_the_revision_is_part_of_the_identity() -> None:
    model = tiny("llama")
    first, second = (ModelIdentity.from_transformers(model, revision=name) for name in ("main", "dev"))
    assert first.digest != second.digest
