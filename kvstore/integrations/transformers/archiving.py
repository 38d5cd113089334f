"""Sequences as their tokens, and what it takes to have their cache again, bit for bit: the model's own passes, or what
the cache differs in from that of a predictor.

An archive is for what is seldom asked for and should go on as it was: a conversation of last year. The model or the
predictor, the libraries and the machine have to be those that made it; it says so where they are not.
docs/codecs/tokens.md and docs/codecs/speculative.md have figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.codecs.speculative.codec import SPECULATIVE, SpeculativeCodec, sum_of_prediction
from kvstore.codecs.tokens.archive import (
    MOST_TOKENS,
    TOKENS,
    Archive,
    Pass,
    cut_passes,
    sum_of_cache,
    sum_of_tokens,
)
from kvstore.codecs.tokens.text import Distribution, Likely, Reader, Uniform, encode
from kvstore.core.identity import digest_of
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.errors import CodecError, IdentityMismatch, KVStoreError, UnsupportedModel
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.cache import cache_from_layers
from kvstore.integrations.transformers.feeding import forget_positions
from kvstore.integrations.transformers.mode import check_mode
from kvstore.integrations.transformers.passes import empty_cache, replay, run_pass, threads_of
from kvstore.integrations.transformers.predictor import Predictor
from kvstore.integrations.transformers.watch import identity_now
from kvstore.metrics import Metric

if TYPE_CHECKING:
    from kvstore.store import KVStore

__all__ = ["Restored", "archive", "restore", "restore_session"]

_IDENTITY_BYTES = 16


@dataclass(frozen=True)
class Restored:
    """What an archive gave back.

    Attributes:
        tokens: the ids, uint32 `[n]`.
        cache: their cache, a DynamicCache, bit for bit what was archived. The caller owns it.
    """

    tokens: Tokens
    cache: Any


def archive(
    model: Any,
    tokens: Any,
    kv: Any,
    passes: Sequence[Pass] | None = None,
    *,
    by_model: bool = True,
    predictor: Predictor | None = None,
) -> bytes:
    """Return a sequence as bytes that hold its tokens, and how its cache comes back.

    Without a predictor the model computes the cache again, in `restore` and here, so it is known to come back. With
    one, the archive has what the cache differs in from the predictor's.

    Args:
        model: the transformers model that computed the cache, in evaluation mode.
        tokens: token ids, `[n]`.
        kv: their cache, as `KVStore.put` takes it.
        passes: in which passes it was computed (`Passes.found`); default is one pass over all tokens.
        by_model: code the tokens by the model's probabilities (with a predictor, by that one's), which takes a pass for
            each of them here and in `restore`. Otherwise they take as many bits as the vocabulary needs.
        predictor: codes the cache against what it predicts, bfloat16 only, in whatever passes the cache was computed.
            Chunks that it does not predict twice alike are coded without it.

    Returns:
        The archive, for this model alone. Keep it where you like.

    Raises:
        ValueError: tokens or passes are malformed, see `mode.check_mode`, or a predicted cache not bfloat16.
        LayoutMismatch, UnsupportedCache: the cache is not one of the model and of these tokens.
        UnsupportedModel: the model keeps windows or states, which are not archived.
        CodecError: the passes do not give this cache again. Give the ones that it was computed in.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with torch.no_grad():
        ...     cache = model(torch.tensor([[1, 2, 3]])).past_key_values
        >>> restore(model, archive(model, [1, 2, 3], cache)).tokens
        array([1, 2, 3], dtype=uint32)
    """
    identity, layout = _checked(model)
    runs = model if predictor is None else predictor.model
    ids = _token_ids(runs, tokens)
    layers, _ = layout.layers_of(kv, len(ids))
    codec, body, cache_sum = TOKENS, b"", sum_of_cache(layers)
    if predictor is None:
        taken = (Pass(len(ids), len(ids)),) if passes is None else cut_passes(passes, len(ids))
        _check_passes(model, layout, ids, taken, cache_sum)
    elif passes is not None:
        raise ValueError("passes: a predictor has passes of its own; leave this argument out")
    else:
        codec, (taken, body) = SPECULATIVE, _predicted(predictor, layout, ids, layers)
    listed = ids.tolist()
    text = encode([each.interval(token) for token, each in zip(listed, _guesses(runs, by_model, listed), strict=False)])
    facts = _vocabulary(runs), by_model, _threads(runs), sum_of_tokens(ids), cache_sum
    return Archive(codec, identity, taken, *facts, text, body).pack()


def restore(model: Any, data: bytes, *, predictor: Predictor | None = None) -> Restored:
    """Return the tokens and the cache of an archive.

    Args:
        model: the one that the archive was made with. It computes the cache again, if there was no predictor.
        data: what `archive` returned; any bytes are safe to give.
        predictor: the one that the archive was made with.

    Raises:
        IdentityMismatch: the archive is another model's.
        CodecError: the bytes are damaged, the predictor is another one or missing, or this machine computes other bits
            than the one that archived.
        UnsupportedModel, ValueError: see `archive`.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"data: expected the bytes of an archive, found {type(data).__name__}")
    identity, layout = _checked(model)
    found = Archive.parse(data)
    if found.codec not in (TOKENS, SPECULATIVE) or (found.codec == TOKENS and found.body):
        raise CodecError(f"archive: codec {found.codec} is not known here; a newer kvstore may have written it")
    if found.identity != identity:
        raise IdentityMismatch("archive: another model, dtype, adapter or layout computed it; load that one")
    if found.codec == TOKENS:
        predictor = None
    elif predictor is None:
        raise CodecError("archive: it was made with a predictor; pass that one")
    runs = model if predictor is None else predictor.model
    with threads_of(found.threads):
        ids = _tokens(runs, found)
        if predictor is None:
            cache, layers = _computed(model, layout, ids, found.passes)
        else:
            cache, layers = _corrected(predictor, layout, ids, found.body)
    if sum_of_cache(layers) != found.cache_sum:
        raise CodecError("archive: this machine, or its libraries, computes other bits than those that were archived")
    return Restored(ids, cache)


def restore_session(
    model: Any,
    store: KVStore,
    name: str,
    data: bytes,
    *,
    namespace: str | bytes = b"",
    predictor: Predictor | None = None,
) -> Restored | None:
    """Put what an archive gives back into a store, as a session that `generate` goes on with.

    Args:
        model, data, predictor: see `restore`.
        store: of this model.
        name, namespace: of the session; one with that name is replaced.

    Returns:
        What was restored; None if nothing was, which is counted (`archive_misses`) and changes nothing.

    Raises:
        The errors of `Session.save`.
    """
    try:
        found = restore(model, data, predictor=predictor)
    except KVStoreError as error:
        store.metrics.add(Metric.ARCHIVE_MISSES, because=error)
        return None
    store.session(name, namespace=namespace).save(found.tokens, found.cache)
    store.metrics.add(Metric.ARCHIVE_HITS)
    return found


def _checked(model: Any) -> tuple[bytes, KVLayout]:
    """The identity that archives of a model have, and its layout."""
    check_mode(model)
    forget_positions(model)
    identity = identity_now(model)
    layout = identity.layout
    if layout.is_grouped or layout.model_layers or layout.states or layout.indexed:
        raise UnsupportedModel("archive: layers with windows, states or indexers cannot be archived")
    fields = {"layout": layout.canonical(), "weights": identity.weights}  # its name and where it lies may change
    return digest_of(fields)[:_IDENTITY_BYTES], layout


def _token_ids(model: Any, tokens: Any) -> Tokens:
    ids = as_tokens(tokens)
    if not len(ids):
        raise ValueError("tokens: expected at least one")
    if int(ids.max()) >= _vocabulary(model):
        raise ValueError(f"tokens: the model has a vocabulary of {_vocabulary(model)}, found token {int(ids.max())}")
    return ids


def _vocabulary(model: Any) -> int:
    return int(bare(model).get_output_embeddings().weight.shape[0])


def _computed(model: Any, layout: KVLayout, ids: Tokens, passes: Sequence[Pass]) -> tuple[Any, Any]:
    """The cache of tokens, computed in these passes, and its layers."""
    cache = replay(model, ids.tolist(), passes)
    return cache, layout.layers_of(cache, len(ids))[0]


def _check_passes(model: Any, layout: KVLayout, ids: Tokens, passes: Sequence[Pass], cache_sum: bytes) -> None:
    """Raises `CodecError` unless the model gives the cache of this sum in these passes."""
    if sum_of_cache(_computed(model, layout, ids, passes)[1]) != cache_sum:
        raise CodecError(
            "archive: the model does not give this cache again in these passes; note them with `Passes` while it is "
            "computed and pass what it found, or pass a predictor"
        )


def _predicted(predictor: Predictor, layout: KVLayout, ids: Tokens, layers: KVLayers) -> tuple[tuple[Pass, ...], bytes]:
    """The passes of a predictor, and what the cache differs in from its predictions."""
    codec, counts, listed = _speculative(predictor, layout), predictor.counts(len(ids)), ids.tolist()
    predictions = list(predictor.predictions(listed, layout))
    again = map(sum_of_prediction, predictor.predictions(listed, layout))
    sure = [sum_of_prediction(one) == other for one, other in zip(predictions, again, strict=True)]
    on_cpu = tuple((k.cpu(), v.cpu()) for k, v in layers)
    body = codec.encode(ids, on_cpu, counts, predictions, sure)
    return tuple(Pass(count, predictor.chunk) for count in counts), body


def _corrected(predictor: Predictor, layout: KVLayout, ids: Tokens, body: bytes) -> tuple[Any, KVLayers]:
    """The cache of tokens, by what it differs in from a predictor's, and its layers. Raises `CodecError`."""
    shapes = [(x.heads, len(ids), dim) for x in layout.layers for dim in (x.key_dim, x.value_dim)]
    made = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    layers = tuple(zip(made[::2], made[1::2], strict=True))
    predictions = predictor.predictions(ids.tolist(), layout)
    _speculative(predictor, layout).decode(ids, body, predictor.counts(len(ids)), predictions, layers)
    return cache_from_layers(tuple((k[None], v[None]) for k, v in layers)), layers


def _speculative(predictor: Predictor, layout: KVLayout) -> SpeculativeCodec:
    return SpeculativeCodec(layout, predictor.fingerprint, predictor.profile)


def _threads(model: Any) -> int:
    return min(torch.get_num_threads(), 255) if model.device.type == "cpu" else 0


def _tokens(model: Any, found: Archive) -> Tokens:
    """The tokens of an archive. Raises `CodecError`."""
    if found.vocabulary != _vocabulary(model):
        raise CodecError(f"archive: the model has a vocabulary of {_vocabulary(model)}, found {found.vocabulary}")
    most = getattr(model.config, "max_position_embeddings", None) or MOST_TOKENS
    if max(found.count, *(each.given for each in found.passes)) > most:
        raise CodecError(f"archive: the model has {most} positions, and a pass or the sequence has more")
    reader, ids = Reader(found.text), list[int]()
    for likely in islice(_guesses(model, found.by_model, ids), found.count):
        ids.append(reader.take(likely))
    reader.finish()
    tokens = np.array(ids, np.uint32)
    if sum_of_tokens(tokens) != found.tokens_sum:
        raise CodecError("archive: this machine, or its libraries, reads other tokens than those that were archived")
    return tokens


def _guesses(model: Any, by_model: bool, ids: Sequence[int]) -> Iterator[Distribution]:
    """How likely each token of a sequence is, one after the other, by those before it in `ids`, which may grow.

    By the model: one pass for each token, so that reading can do what writing did.
    """
    even = Uniform(_vocabulary(model))
    yield even
    cache, at = empty_cache(model), 0
    while True:
        yield _next(model, ids[at], cache) if by_model else even
        at += 1


@torch.no_grad()
def _next(model: Any, token: int, cache: Any) -> Distribution:
    logits = run_pass(model, torch.tensor([token]), cache, logits=True)
    assert logits is not None  # they were asked for
    return Likely(logits.double().log_softmax(-1).cpu().numpy())
