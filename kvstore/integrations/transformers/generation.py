"""Hugging Face transformers 5.17 to 5.23: identity and layout of a model, and `generate` around a store.

Only caches whose every layer holds all keys and values of all tokens can be cut at any token and put together
again. Everything else (sliding windows, recurrent states, quantised or shared layers, latents) is refused by
name.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from kvstore.errors import IdentityMismatch, UnsupportedCache, UnsupportedModel
from kvstore.identity import ModelIdentity
from kvstore.integrations.growing import GrowingLayer
from kvstore.integrations.scores import Scores
from kvstore.layout import KVLayers, KVLayout, LayerLayout

if TYPE_CHECKING:
    from kvstore.approximate import Approximate
    from kvstore.hit import Hit
    from kvstore.store import KVStore

# Models that turn, in every layer, each value of the first half of a head with the one half a head behind it.
HALVES = ("gemma", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3")
SAMPLES = 256  # elements of every tensor that the fingerprint reads
SAMPLED = "sampled-sha256:"  # marks fingerprints made here; others are a caller's own and are not compared
# Rotary variants whose keys depend on the length of the sequence they were computed in, not on the position
# alone.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Numbers of a config that the forward pass uses and that neither the weights nor the layout show. A list, not
# the whole config: new fields of newer versions must not change the identity of an old model.
COMPUTED_WITH = (
    "activation_function",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "model_type",
    "norm_eps",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts_per_tok",
    "query_pre_attn_scalar",
    "reorder_and_upcast_attn",
    "residual_multiplier",
    "rms_norm_eps",
    "routed_scaling_factor",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
)
# Arguments of `generate` that feed the model something the token ids do not show, bring a cache of their own,
# or leave tokens in the cache that are not in the text.
REFUSED_ARGUMENTS = (
    "assistant_model",
    "cache_implementation",
    "custom_generate",
    "past_key_values",
    "position_ids",
    "prompt_lookup_num_tokens",
    "token_type_ids",
)


def layout_from_config(config: Any, dtype: torch.dtype | str) -> KVLayout:
    """The layout of the caches of a model with this config, held in `dtype` ("bfloat16", or a torch.dtype).

    Raises `UnsupportedModel` naming what cannot be stored: an encoder-decoder, images or audio, latent
    attention, or the layer types other than full attention.
    """
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported (cross-attention cache)")
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(f"{name}: {part}: what its tokens stand for is not in the token ids")
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(f"{name}: multi-head latent attention (kv_lora_rank) is not supported")
    if getattr(config, "multi_query", False):
        raise UnsupportedModel(f"{name}: the multi_query head layout is not supported")
    kinds = _layer_kinds(config)
    refused = sorted({kind for kind in kinds if kind != "full_attention"})
    if refused:
        kinds_text = ", ".join(refused)
        raise UnsupportedModel(f"{name}: layers of type {kinds_text} are not supported, only full_attention")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = LayerLayout(int(heads), int(dim), int(dim))
    return KVLayout((layer,) * len(kinds), str(dtype).removeprefix("torch."), _rope(config, name))


def _layer_kinds(config: Any) -> list[str]:
    """The type of every layer, as transformers itself would build the cache: by class, and by the config's
    word."""
    layers = DynamicCache(config=config).layers
    words = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = []
    for layer, word in zip(layers, words, strict=True):
        if type(layer) is DynamicLayer:
            kinds.append("full_attention")
        elif getattr(layer, "is_sliding", False) and word is None:
            kinds.append("sliding_attention")
        else:
            kinds.append(word if word not in (None, "full_attention") else type(layer).__name__)
    return kinds


def _rope(config: Any, name: str) -> str:
    """Canonical JSON of the rotary parameters; "none" for learned or absolute positions."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return "none"
    kind = parameters.get("rope_type", "default")
    if kind in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(f"{name}: with rope type {kind} keys depend on the whole length")
    facts = {key: value for key, value in parameters.items() if value is not None}
    if name not in HALVES:
        # Nobody moves such keys to other positions: which pairs are turned, and in which layers, is not known.
        facts["pairs"] = name
    if kind != "default":
        facts["max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    return json.dumps(facts, sort_keys=True)


def identity_from_model(model: Any, tokenizer: Any = None, revision: str = "") -> ModelIdentity:
    """Identity of a loaded model: name and revision, layout, fingerprints of weights and tokenizer.

    Raises `UnsupportedModel` (see `layout_from_config`; also for weights that are not loaded). Reads a sample
    of every tensor, not all of it: an edit of single values may go unnoticed, another checkpoint never does.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps; the weights are the same
    config = model.config
    name = str(getattr(config, "_name_or_path", "") or type(model).__name__)
    if os.path.isdir(name):  # where a checkpoint lies does not change it
        name = os.path.basename(os.path.abspath(name))
    return ModelIdentity(
        model=name,
        revision=revision or str(getattr(config, "_commit_hash", None) or ""),
        weights=weights_fingerprint(model),
        tokenizer="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        layout=layout_from_config(config, model.dtype),
    )


def weights_fingerprint(model: Any) -> str:
    """SHA-256 over name, shape, dtype and 256 evenly spread elements (first and last included) of every
    parameter and persistent buffer, and over the numbers in `COMPUTED_WITH`. Changes nothing. Thread-safe."""
    hasher = hashlib.sha256()
    config = model.config.get_text_config(decoder=True)
    numbers = {key: getattr(config, key, None) for key in COMPUTED_WITH}
    hasher.update(json.dumps({k: v for k, v in numbers.items() if v is not None}, sort_keys=True).encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise UnsupportedModel(f"{name}: not loaded (meta device), so there is nothing to fingerprint")
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel():
            samples.setdefault(tensor.device, []).append(_sample(tensor))
    for parts in samples.values():  # one transfer per device, not one per tensor
        hasher.update(torch.cat(parts).cpu().numpy().tobytes())
    return SAMPLED + hasher.hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name; tied tensors once. Non-persistent buffers are derived
    values."""
    seen: set[int] = set()
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value.detach()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[bytes]`: evenly spread elements of `tensor`, without copying all of it even where it is
    strided."""
    places = _places(tensor.numel(), tensor.device)
    flat = tensor.is_contiguous()
    values = tensor.view(-1)[places] if flat else tensor[torch.unravel_index(places, tensor.shape)]
    return values.view(torch.uint8)


@lru_cache(maxsize=4096)
def _places(count: int, device: torch.device) -> torch.Tensor:
    steps = torch.arange(min(SAMPLES, count), dtype=torch.int64)
    return (steps * (count - 1) // max(1, len(steps) - 1)).to(device)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what maps text to ids: the whole fast tokenizer except its truncation and padding, which
    callers switch; vocabulary and special tokens of a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()  # {"version", "truncation", "padding", "added_tokens", ...} in this order
        text = text[text.index('"added_tokens"') :]
    else:
        text = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def cache_layers(cache: Any) -> KVLayers:
    """Per layer (K, V), each `[batch, heads, tokens, dim]`, views of a transformers cache.

    A static cache is cut to the tokens it holds. Raises `UnsupportedCache` naming the class of a layer that
    does not hold every key and value as the model computed it.
    """
    pairs = []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        kind = type(layer)
        if kind not in (DynamicLayer, GrowingLayer, StaticLayer):
            raise UnsupportedCache(f"layer {number} of the cache is a {kind.__name__}: not supported")
        if layer.keys is None or layer.values is None or not layer.is_initialized:
            raise UnsupportedCache(f"layer {number} of the cache is an empty {kind.__name__}")
        length = int(layer.get_seq_length())
        pairs.append((layer.keys[..., :length, :], layer.values[..., :length, :]))
    if not pairs:
        raise UnsupportedCache(f"{type(cache).__name__} has no layers that can be stored")
    return tuple(pairs)


# Fingerprints of the models seen by `generate`: one look per model object, not one per call.
_identities: weakref.WeakKeyDictionary[Any, ModelIdentity] = weakref.WeakKeyDictionary()


def generate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    store: KVStore,
    session: str | None = None,
    namespace: bytes = b"",
    approximate: Approximate | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(input_ids, **kwargs)`, starting from the longest stored prefix and storing the result.

    input_ids: integers `[1, n]`, n >= 1; at least the last one is computed. All tokens that end up in the
    cache (prompt and answer but the last new token) are put into `store`; with `session`, as the state of
    that session, which replaces the former one. Returns what `model.generate` returns. Durable as the store's
    `put` is.

    approximate: where the prompt's prefix was not computed before but what follows was, behind another, start from
    that (see `KVStore.get`): the positions that `Hit` names are computed anew, the others are not, and the answer may
    differ from the model's own. Nothing is stored then.

    The model's log-probabilities of the tokens go into the store with them, as far as `model.generate` computes
    logits anyway: of every token of the answer, and of the prompt only where the model ignores `logits_to_keep`,
    which asks for those of the last position alone. Logits of a whole prompt are not asked for, they may cost as
    much as several layers; tokens without any count 16 bits each.

    Raises `ValueError` naming an argument that does not fit (batches, beams, several sequences, inputs other
    than tokens, a model in training mode), `IdentityMismatch` if the store holds the caches of another model.
    """
    _check_arguments(model, input_ids, kwargs)
    _check_identity(model, store)
    prompt = input_ids[0].tolist()
    cache = None
    if len(prompt) > 1:
        hit = store.get(prompt[:-1], namespace=namespace, device=model.device, approximate=approximate)
        cache = None if hit is None else hit.cache()
        if hit is not None and hit.approximate:
            cache = _mended(model, hit, cache, prompt)
    if cache is None:
        cache = DynamicCache(config=model.config)
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
    with Scores(model, cache) as scores:
        output = model.generate(input_ids, past_key_values=cache, **kwargs)
    if getattr(cache, "is_approximate", False):
        return output
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    held = sequences[0, : cache_layers(cache)[0][0].shape[-2]].tolist()
    logprobs = scores.logprobs(len(held))
    if session is None:
        store.put(held, cache, namespace=namespace, logprobs=logprobs)
    else:
        store.session(session, namespace=namespace).save(held, cache, logprobs=logprobs)
    return output


def _mended(model: Any, hit: Hit, cache: Any, prompt: list[int]) -> Any:
    """The cache of an approximate hit, with those positions computed anew that it names."""
    from kvstore.integrations.seams import recompute

    return recompute(model, cache, prompt[: hit.tokens], hit.recompute, hit.spans).cache


def _check_arguments(model: Any, input_ids: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        found = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids: expected an integer tensor [1, tokens], found {found}")
    if input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected one sequence [1, tokens], found {list(input_ids.shape)}")
    if model.training:
        raise ValueError("model: is in training mode, where dropout changes the cache; call model.eval()")
    config = kwargs.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        value = kwargs.get(name, getattr(config, name, None))
        if value is not None and value != 1:
            raise ValueError(f"{name}: only 1 is supported, found {value!r}")
    if kwargs.get("use_cache", getattr(config, "use_cache", True)) is False:
        raise ValueError("use_cache: must not be False, the cache is what is stored")
    for name in REFUSED_ARGUMENTS:
        if kwargs.get(name, getattr(config, name, None)) is not None:
            raise ValueError(f"{name}: cannot be combined with a store")
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError("attention_mask: must be all ones; padding cannot be stored")
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name != "attention_mask":
            raise ValueError(f"{name}: input that the token ids do not show cannot be stored")


def _check_identity(model: Any, store: KVStore) -> None:
    """Refuses a store made for another model. Weights are compared where both fingerprints were made here."""
    mine = _identities.get(model)
    if mine is None:
        mine = _identities[model] = identity_from_model(model)
    theirs = store.identity
    if mine.layout != theirs.layout:
        raise IdentityMismatch(
            f"the model's cache layout is {mine.layout.canonical()}, the store holds "
            f"{theirs.layout.canonical()}; open a store with ModelIdentity.from_transformers(model)"
        )
    if theirs.weights.startswith(SAMPLED) and mine.weights != theirs.weights:
        raise IdentityMismatch(
            f"the store holds caches of other weights ({theirs.model} {theirs.revision}); open a store with "
            "ModelIdentity.from_transformers(model)"
        )
