"""One call of an attached model or of `generate`: what it took from the store, and what it gave; the store as that call
sees it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from kvstore.config import StoreConfig
from kvstore.core.explanation import Reason, why_short
from kvstore.core.identity import ModelIdentity
from kvstore.core.results import Hit, PutResult, RequestReport
from kvstore.errors import KVStoreError
from kvstore.gate.gate import Gate
from kvstore.integrations.transformers.cache import cache_from_layers, cache_layers
from kvstore.integrations.transformers.logprobs import scores_of
from kvstore.integrations.transformers.padding import Rows, row_of
from kvstore.metrics import Metric, Metrics
from kvstore.store import KVStore

HOW_TO_OPEN = "open one with KVStore(path, ModelIdentity.from_transformers(model, tokenizer))"


class Request:
    """One call, and what is to be said of it. For one thread.

    Attributes:
        store: where.
        identity: of the store.
        began: whether the model's own `generate` was called.
        raises: whether the caller hears of the store's errors; else they are misses and counted losses.
    """

    def __init__(
        self,
        store: KVStore,
        namespace: str | bytes,
        ttl: float | None = None,
        pin: bool = False,
        *,
        raises: bool = False,
    ) -> None:
        self.store = store
        self.raises = raises
        self.identity: ModelIdentity | None = store.identity
        self.began = False
        self.options: dict[str, Any] = {"ttl": ttl, "pin": pin}
        self._namespace = namespace
        self._prompts: tuple[list[int], ...] = ()
        self._begins: tuple[int, ...] = ()
        self._cache: Any = None  # of the prompt that is not stored yet
        self._copies = 1
        self._begin = time.perf_counter()
        self._seconds = 0.0
        self._tiers: Counter[str] = Counter()
        self._why = ""
        self._error = ""  # the first of the store's
        self._reused = self._new_tokens = 0

    @property
    def keeps_nothing(self) -> bool:
        """Whether nothing is to be stored, and nobody need hear of it: the store is only read."""
        return self.store.read_only and not self.raises

    def asks(self, rows: Rows, copies: int) -> None:
        """Note the prompts, and how many rows of the cache each has."""
        self._prompts, self._begins, self._copies = rows.tokens, rows.begins, copies

    def begins(self, cache: Any) -> None:
        """The model's own `generate` goes on from this cache."""
        self.began = True
        self._cache = cache

    def is_prompt_done(self, cache: Any) -> bool:
        """Return whether a pass of the model has just completed the cache of the prompts."""
        if self._cache is None or cache is not self._cache or not self._prompts:
            return False
        columns = len(self._prompts[0]) + self._begins[0]
        return int(cache.get_seq_length()) == columns

    def save_prompt(self) -> None:
        """Store the prompts. What the store cannot take is counted."""
        cache, self._cache = self._cache, None
        if self.keeps_nothing:
            return
        scores = scores_of(cache) if self.store.config.score_prompts else None
        if self._copies == 1 and len(self._prompts) == 1 and not self._begins[0]:
            tokens = self._prompts[0]
            self.put(tokens, cache, None if scores is None else scores.logprobs(len(tokens)))
            return
        try:
            layers = cache_layers(cache)
        except KVStoreError as error:
            self.store.metrics.add(Metric.FALLBACK_ANSWER_NOT_STORED, because=error)
            return
        for number, (tokens, begin) in enumerate(zip(self._prompts, self._begins, strict=True)):
            # No row of a batch is ever written again.
            row = number * self._copies
            kv = cache_from_layers(row_of(layers, row, begin, begin + len(tokens)))
            self.put(tokens, kv, None if scores is None else scores.logprobs(len(tokens), row, begin))

    def got(self, hit: Hit | None, wanted: int, tokens: Any) -> None:
        """Note what a get returned of `wanted` tokens."""
        if hit is not None:
            self._reused += hit.tokens
            self._tiers.update(hit.tiers)
            self._seconds += hit.seconds
        tokens_there, reason = (0, Reason.NEVER_PUT) if hit is None else (hit.tokens, hit.reason)
        if tokens_there < wanted and not self._why:
            self._why = self._explained(tokens[:wanted], tokens_there, reason)

    def lost(self, tokens: int) -> None:
        """Note that tokens which a get returned had to be computed after all."""
        self._reused -= tokens

    def left(self, hit: Hit) -> None:
        """Note that a hit was not used after all."""
        self._reused -= hit.tokens
        self._tiers -= Counter(hit.tiers)
        self._why = ""

    def put(self, tokens: Any, kv: Any, logprobs: Any = None) -> PutResult:
        """Put, with the options of the call. What the store cannot take is counted, unless the request raises."""
        return self._kept(
            lambda: self.store.put(tokens, kv, namespace=self._namespace, logprobs=logprobs, **self.options), tokens
        )

    def save(self, name: str, tokens: Any, kv: Any, then: Any, logprobs: Any = None) -> PutResult:
        """Save a session, with the options of the call. See `put`."""
        return self._kept(
            lambda: self.store.session(name, namespace=self._namespace).save(
                tokens, kv, then=then, logprobs=logprobs, **self.options
            ),
            tokens,
        )

    def failed(self, error: KVStoreError) -> None:
        """Note that a call of the store raised. Raises it again if the caller is to hear of it."""
        if self.raises:
            raise error
        self._error = self._error or str(error)

    def report(self, reason: str | None, prompt: int = 0) -> RequestReport:
        """Say what was reused.

        Args:
            reason: why the call ran without the store; None if it did not.
            prompt: its tokens, if `asks` could not be told of them.
        """
        prompt = sum(map(len, self._prompts)) or prompt
        if reason is None and self._error and not (self._reused or self._new_tokens):
            reason = self._error  # it was asked, and gave and took nothing
        why = reason if reason is not None else self._why
        return RequestReport(
            prompt_tokens=prompt,
            reused_tokens=self._reused,
            computed_tokens=prompt - self._reused,
            new_tokens=self._new_tokens,
            tiers=dict(self._tiers),
            get_seconds=self._seconds,
            seconds=time.perf_counter() - self._begin,
            served=reason is None,
            why=why,
        )

    def _kept(self, put: Any, tokens: Any) -> PutResult:
        if self.keeps_nothing:
            return PutResult(len(tokens), 0, 0, 0, 0.0)
        try:
            done: PutResult = put()
        except KVStoreError as error:
            self.failed(error)
            self.store.metrics.add(Metric.FALLBACK_ANSWER_NOT_STORED, because=error)
            return PutResult(len(tokens), 0, 0, 0, 0.0)
        self._new_tokens += done.new_tokens
        return done

    def _explained(self, tokens: Any, start: int, reason: Reason) -> str:
        """Why a get returned `start` of these tokens. reason: what it says itself, which is not all where that is
        `NEVER_PUT`."""
        if reason not in (Reason.NEVER_PUT, Reason.STORED):
            return why_short(start, len(tokens), reason.words)
        try:
            return self.store.explain(tokens, namespace=self._namespace, start=start).why
        except KVStoreError as error:
            return str(error)


class RequestStore:
    """What `generate` asks of a store, for one request: an error of the store is a miss, or a counted loss, unless the
    request raises.

    Attributes:
        request: whose view of the store this is.
    """

    read_only = False

    def __init__(self, request: Request) -> None:
        self.request = request

    @property
    def identity(self) -> ModelIdentity:
        return self.request.store.identity

    @property
    def config(self) -> StoreConfig:
        return self.request.store.config

    @property
    def gate(self) -> Gate:
        return self.request.store.gate

    @property
    def metrics(self) -> Metrics:
        return self.request.store.metrics

    def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        try:
            return self.request.store.contains(tokens, namespace=namespace)
        except KVStoreError as error:
            self.request.failed(error)
            return 0

    def get(self, tokens: Any, *, namespace: str | bytes = b"", **options: Any) -> Hit | None:
        try:
            hit = self.request.store.get(tokens, namespace=namespace, **options)
        except KVStoreError as error:
            self.request.failed(error)
            hit = None
        self.request.got(hit, min(len(tokens), options.get("max_tokens") or len(tokens)), tokens)
        return hit

    def put(self, tokens: Any, kv: Any, *, namespace: str | bytes = b"", logprobs: Any = None) -> PutResult:
        return self.request.put(tokens, kv, logprobs)

    def session(self, name: str, *, namespace: str | bytes = b"") -> RequestSession:
        return RequestSession(self.request, name)


class RequestSession:
    """A session as one request sees it."""

    def __init__(self, request: Request, name: str) -> None:
        self._request = request
        self._name = name

    def save(self, tokens: Any, kv: Any, *, then: Any = None, logprobs: Any = None) -> PutResult:
        return self._request.save(self._name, tokens, kv, then, logprobs)
