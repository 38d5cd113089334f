"""`generate` around a store: starts from the longest stored prefix, stores what was computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from kvstore.core.arguments import check_integer
from kvstore.core.cache_argument import cache_of
from kvstore.core.fingerprints import SAMPLED, differing_parts
from kvstore.core.given_store import check_store
from kvstore.core.identity import ModelIdentity, layout_difference
from kvstore.core.layout import KVLayout
from kvstore.core.media import check_text, text_end
from kvstore.core.rope import check_length, lengths, regime_of
from kvstore.core.rope_types import LONG
from kvstore.errors import IdentityMismatch, UnsupportedModel
from kvstore.integrations.transformers.answers import Held, answered, ends, prompts, setting
from kvstore.integrations.transformers.around import is_compiled
from kvstore.integrations.transformers.cache import cache_from_layers, cache_layers, plain_cache
from kvstore.integrations.transformers.describe import check_loaded
from kvstore.integrations.transformers.feeding import Feed, advance_by_token, forget_positions
from kvstore.integrations.transformers.later import Repair, pays
from kvstore.integrations.transformers.logprobs import Scores
from kvstore.integrations.transformers.observed import FirstPasses
from kvstore.integrations.transformers.padding import Rows, row_of
from kvstore.integrations.transformers.prefill import prefill
from kvstore.integrations.transformers.recompute import recompute
from kvstore.integrations.transformers.refusals import check_call, without_caches
from kvstore.integrations.transformers.request import HOW_TO_OPEN, Request, RequestStore
from kvstore.integrations.transformers.snapshots import needs_places, store_places
from kvstore.integrations.transformers.watch import identity_now
from kvstore.metrics import Metric

if TYPE_CHECKING:
    from kvstore.core.approximate import Approximate
    from kvstore.store import KVStore

# Before this version of transformers a prompt in pieces is computed from its beginning, whatever a cache holds of it.
_CHUNKS_BEHIND_CACHES = Version("5.21")

_WORDS = {
    "rows": "rows of its embeddings, packed weights or shared layers",
    "adapters": "active adapters",
    "config": "settings in its config",
}


def generate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    store: KVStore,
    session: str | Sequence[str] | None = None,
    namespace: str | bytes = b"",
    approximate: Approximate | None = None,
    **kwargs: Any,
) -> Any:
    """Run `model.generate(input_ids, **kwargs)` from the longest stored prefix of each row, and store the result.

    Durable as the store's `put` is. The model's log-probabilities are stored with the tokens as far as `model.generate`
    computes logits anyway (`Scores`), and of what is computed of the prompt with `StoreConfig.score_prompts`; tokens
    without one count 16 bits each. Every call looks whether the model is still the one that the store was opened for:
    its weights, their dtype, the config, and the adapters that are active. If it changes during the call, nothing is
    stored (counted as `fallback_model_changed`).

    Of a batch every row is looked up and stored by itself, without padding (docs/batches.md). What is stored of a row
    is a cache of exactly its tokens. Its last bits depend on what was computed beside it, as in any batch: a batch
    equals the one that goes on from the same caches in memory in the same groups of rows, bit for bit.
    `store.last_request` says what was reused. A store that is attached to the model is left alone, if it is another.

    Args:
        model: a transformers model in evaluation mode; one wrapped by `torch.compile` or peft is fine.
        input_ids: integers `[rows, n]`, n >= 1, padded on the left. At least each row's last token is computed.
        store: each row's prompt and answer, without the last token and what is too long, are put here. Of beams only
            the prompt is.
        session: store them as the state of this session, the last token with it; of a batch, a name a row.
        namespace: see `KVStore.put`.
        approximate: start from tokens that were computed behind another prefix, too (see `KVStore.get`); the positions
            that `Hit` names are computed anew. The answer may differ from the model's own; nothing is stored then. Not
            for batches.
        kwargs: arguments of `model.generate`; of a batch also the tokenizer's `attention_mask`, `[rows, n]`.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: names what does not fit: padding that is not on the left, inputs other than tokens, training mode.
        IdentityMismatch: the store is one of another model, or of other adapters, weights or settings; it says which.
        UnsupportedModel, UnsupportedLength: caches of the model, of such a prompt or of a batch, cannot be stored here.
        UnsupportedTokens: a prompt has tokens for images or sound.

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
        ...         store.contains(answer[0]), store.last_request.computed_tokens
        (6, 4)
    """
    call = _Call.of(model, input_ids, session, approximate, kwargs)
    with _request(store, namespace, call) as request:
        return _run(call, model, input_ids, request, namespace, approximate, kwargs)


@dataclass(frozen=True)
class _Call:
    """What a call of `generate` asks for. names: of the sessions, one a row, or none; copies: rows of the cache for
    each prompt; chunk: compute at most so many tokens of a prompt at a time."""

    rows: Rows
    names: Sequence[str]
    beams: int
    copies: int
    chunk: int | None

    @property
    def is_batch(self) -> bool:
        return len(self.rows.tokens) > 1 or self.rows.is_padded or self.copies > 1

    @classmethod
    def of(cls, model: Any, input_ids: Any, session: Any, approximate: Any, kwargs: dict[str, Any]) -> _Call:
        """Check everything that the store is not needed for. Raises `ValueError`."""
        check_loaded(model)
        rows = Rows.of(input_ids, kwargs.get("attention_mask"))
        check_call(model, kwargs)
        beams, returned, chunk = (
            check_integer(name, setting(model, kwargs, name), 1)
            for name in ("num_beams", "num_return_sequences", "prefill_chunk_size")
        )
        if chunk is not None and Version(transformers.__version__) < _CHUNKS_BEHIND_CACHES:
            raise ValueError(
                f"prefill_chunk_size: transformers {transformers.__version__} computes once more what a cache holds; "
                f"update it to {_CHUNKS_BEHIND_CACHES} or later, or remove the argument"
            )
        copies = max(beams or 1, returned or 1)
        call = cls(rows, _names(session, rows, copies), beams or 1, copies, chunk)
        if call.is_batch and approximate is not None:
            raise ValueError("approximate: a batch has no approximate caches; call generate for each row by itself")
        return call


@contextlib.contextmanager
def _request(store: Any, namespace: str | bytes, call: _Call) -> Iterator[Request]:
    """The request that the block serves; reported when it ends, if the model began."""
    if isinstance(store, RequestStore):  # of an attached model, which reports by itself
        yield store.request
        return
    check_store(store, HOW_TO_OPEN)
    request = Request(store, namespace, raises=True)
    request.asks(call.rows, call.copies)
    try:
        yield request
    finally:
        if request.began:
            store.last_request = request.report(None)


def _run(
    call: _Call,
    model: Any,
    input_ids: torch.Tensor,
    request: Request,
    namespace: str | bytes,
    approximate: Approximate | None,
    kwargs: dict[str, Any],
) -> Any:
    store = cast("KVStore", RequestStore(request))
    identity, layout = _checked_identity(model, store), store.identity.layout
    forget_positions(model)
    _check_prompts(layout, call)
    if call.is_batch:
        cache, scored = prefill(model, call.rows, store, namespace, call.copies, call.chunk)
        known = call.rows.columns - 1
    else:
        prompt = call.rows.tokens[0]
        cache, known = _stored_cache(model, prompt, request, namespace, approximate)
        scored = None
    cache = plain_cache(cache, model.config) if is_compiled(model) else cache
    in_pieces = not call.is_batch and needs_places(layout, _most_tokens(model, kwargs, call.rows.columns))
    scoring = Scores(model, cache, store, scored) if call.beams == 1 else contextlib.nullcontext()
    with scoring as scores:
        if in_pieces:
            known = store_places(model, prompt, cache, known, store, namespace, call.chunk, scores)
        if not call.is_batch:
            known = advance_by_token(model, cache, known, prompt)
        with Feed(model, cache, known) as feed, FirstPasses(store.gate, model, feed.given, known):
            # Of a prompt in pieces the place before its last token is put.
            request.begins(None if in_pieces or not layout.layers else cache)
            output, made = _generated(model, input_ids, feed, layout, kwargs)
    if _is_to_be_stored(model, identity, cache, store):
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if call.beams > 1:
            held = prompts(call.rows, call.copies)
        else:
            held = answered(call.rows, sequences, *ends(model, kwargs))
        count = int(made.get_seq_length()) if layout.layers else feed.tokens
        _store(held, made, count, scores, store, namespace, call)
    return output


def _most_tokens(model: Any, kwargs: dict[str, Any], prompt: int) -> int | None:
    """How many tokens a prompt of so many and its answer have at most; None if that is not known."""
    new, most = (setting(model, kwargs, name) for name in ("max_new_tokens", "max_length"))
    if new is not None:
        return prompt + int(new)
    return int(most) if most is not None and most > prompt else None


def _check_prompts(layout: KVLayout, call: _Call) -> None:
    """Refuse prompts whose keys the store does not hold, and such as are computed in pieces or beside other lengths."""
    for tokens in call.rows.tokens:
        check_length(layout, len(tokens))
        check_text(layout, tokens)
    if regime_of(layout) == LONG and call.chunk is not None:
        raise ValueError("prefill_chunk_size: the first pieces would have the keys of short sequences; remove it")
    if regime_of(layout) == LONG and call.is_batch:
        raise UnsupportedModel(
            "batches: keys of long sequences depend on the longest row of a pass; call generate for each row by itself"
        )


def _generated(
    model: Any, input_ids: torch.Tensor, feed: Feed, layout: KVLayout, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """(what `model.generate` returns, the cache to be stored).

    Models that rotate keys by the length of the sequence may leave the cache that they were given for one that they
    compute anew. In the long regime that is the one to store; in the short one what was given holds the short keys.
    """
    kwargs = without_caches(kwargs)
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.ones_like(input_ids)
    if regime_of(layout) != LONG:
        return model.generate(input_ids, **feed.given, **kwargs), *feed.given.values()
    asked = kwargs.get("return_dict_in_generate")
    config = kwargs.get("generation_config") or model.generation_config
    output = model.generate(input_ids, **feed.given, **kwargs | {"return_dict_in_generate": True})
    wanted = getattr(config, "return_dict_in_generate", None) if asked is None else asked
    return output if wanted else output.sequences, cache_of(output)


def _stored_cache(
    model: Any, prompt: list[int], request: Request, namespace: str | bytes, approximate: Approximate | None
) -> tuple[Any, int]:
    """The cache to start from: of the longest stored prefix that leaves a token to compute, or an empty one; and of how
    many tokens it is."""
    store = cast("KVStore", RequestStore(request))
    hit = None
    wanted = None if approximate is None else replace(approximate, probe=True)
    if len(prompt) > 1:
        last = len(prompt) - 1
        lazy = wanted is None and pays(model, store, last)
        how = {"device": model.device, "approximate": wanted, "lazy": lazy}
        hit = store.get(prompt, namespace=namespace, max_tokens=last, **how)
    if hit is None:
        return DynamicCache(config=model.config), 0
    if not hit.approximate or approximate is None:
        Repair.watch(model, store, namespace, prompt, hit)
        return hit.cache(), hit.tokens
    found = recompute(model, hit.cache(), prompt[: hit.tokens], hit.recompute, hit.spans, hit.estimates)
    if found.deviation.kl is not None and found.deviation.kl <= approximate.max_kl:
        request.lost(len(hit.recompute))
        return found.cache, hit.tokens
    store.metrics.add(Metric.APPROXIMATE_REFUSED)
    request.left(hit)
    return _stored_cache(model, prompt, request, namespace, None)


def _is_to_be_stored(model: Any, identity: ModelIdentity, cache: Any, store: KVStore) -> bool:
    """Whether the cache is what the model computes. A model that changed since its `identity` was taken is counted."""
    if identity_now(model, regime_of(identity.layout)) != identity:
        store.metrics.add(Metric.FALLBACK_MODEL_CHANGED)
        return False
    return not getattr(cache, "is_approximate", False)


def _store(
    held: list[Held], cache: Any, found: int, scores: Scores | None, store: KVStore, namespace: str | bytes, call: _Call
) -> None:
    """Puts the rows of a cache of `found` columns, or saves them as the sessions.

    What was computed when the longest row had become too long for the store's keys is left out, and so is what follows
    a token for an image or sound in an answer.
    """
    layout = store.identity.layout
    columns = found
    most = lengths(layout.rope)[1]
    if most is not None:
        columns = min(columns, min(call.rows.begins) + most)
    kept = [row.tokens[: columns - row.begin] for row in held]
    text = [tokens[: text_end(layout, tokens)] for tokens in kept]
    is_whole = columns == found and not call.is_batch and text == kept
    if not is_whole and (layout.is_grouped or layout.indexed):
        return  # of windows and states only the end is there, and keys of indexers belong to whole caches
    layers = () if is_whole else cache_layers(cache)
    for number, (row, tokens) in enumerate(zip(held, text, strict=True)):
        kv = cache
        if not is_whole:
            kv = row_of(layers, row.row, row.begin, row.begin + len(tokens))
            kv = cache_from_layers(kv) if call.is_batch else kv  # no row of a batch is ever written again
        logprobs = None if scores is None else scores.logprobs(len(tokens), row.row, row.begin)
        if call.names:
            then = row.then[: text_end(layout, row.then)] if len(tokens) == len(row.tokens) else []
            session = store.session(call.names[number], namespace=namespace)
            session.save(tokens, kv, then=then or None, logprobs=logprobs)
        else:
            store.put(tokens, kv, namespace=namespace, logprobs=logprobs)


def _names(session: str | Sequence[str] | None, rows: Rows, copies: int) -> Sequence[str]:
    """The names of the rows' sessions; none, if they are not to be sessions."""
    if session is None:
        return ()
    names = [session] if isinstance(session, str) else list(session) if isinstance(session, Sequence) else []
    if copies > 1:
        raise ValueError("session: a session has one answer; save it yourself if there are beams or several sequences")
    are_names = all(isinstance(name, str) for name in names)
    if not are_names or len(names) != len(rows.tokens) or len(set(names)) != len(names):
        raise ValueError(f"session: expected a name of its own for each of {len(rows.tokens)} rows, found {session!r}")
    return names


def _checked_identity(model: Any, store: KVStore) -> ModelIdentity:
    """Refuses a store made for another model. Weights are compared where both fingerprints were made here."""
    mine, theirs = identity_now(model, regime_of(store.identity.layout)), store.identity
    if mine.layout != theirs.layout:
        raise IdentityMismatch(
            f"the store holds caches of another layout ({layout_difference(theirs.layout, mine.layout)}); open a store "
            "with ModelIdentity.from_transformers(model)"
        )
    differ = differing_parts(theirs.weights, mine.weights) if theirs.weights.startswith(SAMPLED) else {}
    if differ:
        what = " and ".join(_WORDS.get(part, part) for part in differ)
        whose = f"{theirs.model} {theirs.revision}".strip()
        raise IdentityMismatch(
            f"the store holds caches that the model computed with other {what} ({whose}); "
            "set the model back, or open another store with ModelIdentity.from_transformers(model)"
        )
    return mine
