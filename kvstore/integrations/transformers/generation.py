"""`generate` around a store: starts from the longest stored prefix, stores what was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvstore.core.fingerprints import SAMPLED, differing_parts
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.rope import check_length, lengths, regime_of
from kvstore.core.rope_types import LONG
from kvstore.errors import IdentityMismatch
from kvstore.integrations.transformers.cache import cache_layers
from kvstore.integrations.transformers.logprobs import Scores
from kvstore.integrations.transformers.recompute import recompute
from kvstore.integrations.transformers.watch import identity_now
from kvstore.metrics import Metric

if TYPE_CHECKING:
    from kvstore.core.approximate import Approximate
    from kvstore.store import KVStore

# Arguments of `generate` that feed the model something the token ids do not show, bring a cache of their own,
# or leave tokens in the cache that are not in the text.
REFUSED_ARGUMENTS = (
    "adapter_names",
    "assistant_model",
    "cache_implementation",
    "custom_generate",
    "past_key_values",
    "position_ids",
    "prompt_lookup_num_tokens",
    "token_type_ids",
)

_WORDS = {"adapters": "active adapters", "config": "settings in its config"}


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
    """Run `model.generate(input_ids, **kwargs)` from the longest stored prefix, and store the result.

    Durable as the store's `put` is. The model's log-probabilities are stored with the tokens as far as `model.generate`
    computes logits anyway: of the answer, and of the prompt only if the model ignores `logits_to_keep`; logits of a
    whole prompt may cost as much as several layers. Tokens without a log-probability count 16 bits each.

    Every call looks whether the model is still the one that the store was opened for: its weights, their dtype, the
    config, and the adapters that are active. If it changes during the call, nothing is stored (counted as
    `fallback_model_changed`).

    Args:
        model: a transformers model in evaluation mode; one wrapped by `torch.compile` or peft is fine.
        input_ids: integers `[1, n]`, n >= 1. At least the last one is computed.
        store: what ends up in the cache (prompt and answer without the last token, nor what is too long) is put here.
        session: store them as the state of this session, which replaces the former one.
        namespace: see `KVStore.put`.
        approximate: start from tokens that were computed behind another prefix, too (see `KVStore.get`); the positions
            that `Hit` names are computed anew. The answer may differ from the model's own; nothing is stored then.
        kwargs: arguments of `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: names what does not fit: batches, beams, several sequences, inputs other than tokens, training mode.
        IdentityMismatch: the store is one of another model, or of other adapters, weights or settings; it says which.
        UnsupportedModel, UnsupportedLength: caches of the model, or of such a prompt, cannot be stored here.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from kvstore import KVStore, ModelIdentity
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> prompt = torch.tensor([[1, 2, 3, 4]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with KVStore(folder, ModelIdentity.from_transformers(model)) as store:
        ...         answer = generate(model, prompt, store=store, do_sample=False, max_new_tokens=3, min_new_tokens=3)
        ...         store.contains(answer[0])
        6
    """
    _check_arguments(model, input_ids, kwargs)
    identity = _checked_identity(model, store)
    _check_regime(store.identity.layout, input_ids.shape[1], kwargs)
    cache = _stored_cache(model, input_ids[0].tolist(), store, namespace, approximate)
    with Scores(model, cache) as scores:
        output, made = _generated(model, input_ids, cache, store.identity.layout, kwargs)
    if _is_to_be_stored(model, identity, cache, store):
        _store(output, made, scores, store, namespace, session)
    return output


def _check_regime(layout: KVLayout, length: int, kwargs: dict[str, Any]) -> None:
    """Refuse prompts whose keys the store does not hold, and such as are computed in pieces of another length."""
    check_length(layout, length)
    config = kwargs.get("generation_config")
    piece = kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
    if piece is not None and regime_of(layout) == LONG:
        raise ValueError("prefill_chunk_size: the first pieces would have the keys of short sequences; remove it")


def _generated(
    model: Any, input_ids: torch.Tensor, cache: Any, layout: KVLayout, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """(what `model.generate` returns, the cache to be stored).

    Models that rotate keys by the length of the sequence may leave the cache that they were given for one that they
    compute anew. In the long regime that is the one to store; in the short one what was given holds the short keys.
    """
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
    if regime_of(layout) != LONG:
        return model.generate(input_ids, past_key_values=cache, **kwargs), cache
    asked = kwargs.get("return_dict_in_generate")
    config = kwargs.get("generation_config") or model.generation_config
    output = model.generate(input_ids, past_key_values=cache, **kwargs | {"return_dict_in_generate": True})
    wanted = getattr(config, "return_dict_in_generate", None) if asked is None else asked
    return output if wanted else output.sequences, output.past_key_values


def _stored_cache(
    model: Any, prompt: list[int], store: KVStore, namespace: bytes, approximate: Approximate | None
) -> Any:
    """The cache to start from: of the longest stored prefix that leaves a token to compute, or an empty one."""
    hit = None
    if len(prompt) > 1:
        last = len(prompt) - 1
        hit = store.get(prompt, namespace=namespace, max_tokens=last, device=model.device, approximate=approximate)
    if hit is None:
        return DynamicCache(config=model.config)
    cache = hit.cache()
    if hit.approximate:
        cache = recompute(model, cache, prompt[: hit.tokens], hit.recompute, hit.spans).cache
    return cache


def _is_to_be_stored(model: Any, identity: ModelIdentity, cache: Any, store: KVStore) -> bool:
    """Whether the cache is what the model computes. A model that changed since its `identity` was taken is counted."""
    if identity_now(model, regime_of(identity.layout)) != identity:
        store.metrics.add(Metric.FALLBACK_MODEL_CHANGED)
        return False
    return not getattr(cache, "is_approximate", False)


def _store(output: Any, cache: Any, scores: Scores, store: KVStore, namespace: bytes, session: str | None) -> None:
    """Puts what the cache holds of the sequence that `generate` returned, or saves it as the session.

    What was computed when the sequence had become too long for the store's keys is left out.
    """
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    layers = cache_layers(cache)
    held = layers[0][0].shape[-2]
    most = lengths(store.identity.layout.rope)[1]
    if most is not None and held > most:
        held, cache = most, [(k[..., :most, :], v[..., :most, :]) for k, v in layers]
    tokens = sequences[0, :held].tolist()
    logprobs = scores.logprobs(held)
    if session is None:
        store.put(tokens, cache, namespace=namespace, logprobs=logprobs)
    else:
        store.session(session, namespace=namespace).save(tokens, cache, logprobs=logprobs)


def _check_arguments(model: Any, input_ids: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        found = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids: expected an integer tensor [1, tokens], found {found}")
    if input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected one sequence [1, tokens], found {list(input_ids.shape)}")
    if model.training:
        raise ValueError("model: the model is in training mode, where dropout changes the cache; call model.eval()")
    config = kwargs.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        value = kwargs.get(name, getattr(config, name, None))
        if value is not None and value != 1:
            raise ValueError(f"{name}: only 1 is supported, found {value!r}")
    if kwargs.get("use_cache", getattr(config, "use_cache", True)) is False:
        raise ValueError("use_cache: False leaves nothing to store; remove this argument")
    for name in REFUSED_ARGUMENTS:
        if kwargs.get(name, getattr(config, name, None)) is not None:
            raise ValueError(f"{name}: a store does not support this argument; remove it")
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError("attention_mask: padding cannot be stored; pass a sequence without padding, or a mask of ones")
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name != "attention_mask":
            raise ValueError(f"{name}: the store knows a cache by its token ids alone; remove this input")


def _checked_identity(model: Any, store: KVStore) -> ModelIdentity:
    """Refuses a store made for another model. Weights are compared where both fingerprints were made here."""
    mine, theirs = identity_now(model, regime_of(store.identity.layout)), store.identity
    if mine.layout != theirs.layout:
        raise IdentityMismatch(
            f"the model's cache layout is {mine.layout.canonical()}, the store holds "
            f"{theirs.layout.canonical()}; open a store with ModelIdentity.from_transformers(model)"
        )
    differ = differing_parts(theirs.weights, mine.weights) if theirs.weights.startswith(SAMPLED) else {}
    if differ:
        what = " and ".join(_WORDS.get(part, part) for part in differ)
        raise IdentityMismatch(
            f"the store holds caches that the model computed with other {what} ({theirs.model} {theirs.revision}); "
            "set the model back, or open another store with ModelIdentity.from_transformers(model)"
        )
    return mine
