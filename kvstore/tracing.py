"""OpenTelemetry spans of a store's calls. Needs the extra `kvstore-lm[otel]`; nothing else imports this module.

Off unless `trace` is called for a store. Then each get, put, delete and flush is a span, with what it returned as
attributes, and each block that a get decodes is one below it; docs/metrics.md has the list.
"""

from __future__ import annotations

import time
from typing import Any

try:
    from opentelemetry import context
    from opentelemetry.trace import Span, Status, StatusCode, Tracer, TracerProvider, get_tracer, set_span_in_context
except ModuleNotFoundError as error:
    what = "kvstore.tracing needs opentelemetry-api; pip install 'kvstore-lm[otel]'"
    raise ModuleNotFoundError(what, name=error.name) from None

from kvstore.core.results import EraseResult, FlushResult, Hit, PutResult
from kvstore.store import KVStore
from kvstore.timing import Where

Attributes = dict[str, str | bool | int | float]


def trace(store: KVStore, tracer_provider: TracerProvider | None = None) -> None:
    """Tell OpenTelemetry of the calls of a store from now on.

    Spans hold counts, tiers and codecs, and no tokens, namespaces or names of sessions.

    Args:
        store: an open store.
        tracer_provider: whose tracer to use; default is the one of the process.
    """
    store.metrics.spans = StoreSpans(get_tracer("kvstore", tracer_provider=tracer_provider), store.path)


def untrace(store: KVStore) -> None:
    """Tell nothing of the calls of a store any more; those under way are still told."""
    store.metrics.spans = None


class StoreSpans:
    """What `trace` hands to a store: see `kvstore.spans.Spans`. Thread-safe.

    Args:
        tracer: makes the spans.
        path: of the store; an attribute of every span.
    """

    def __init__(self, tracer: Tracer, path: str) -> None:
        self._tracer = tracer
        self._path = path

    def begin(self, call: str) -> StoreSpan:
        """Begin a span, which is the current one of this thread until it ends."""
        span = self._tracer.start_span(f"kvstore.{call}", attributes={"kvstore.store": self._path})
        return StoreSpan(call, span)

    def here(self) -> object:
        """Return the context of this thread."""
        return context.get_current()

    def done(self, part: str, seconds: float, tokens: int, where: Where, within: Any) -> None:
        """Make a span that ends now."""
        end = time.time_ns()
        attributes: Attributes = {
            "kvstore.store": self._path,
            "kvstore.tokens": tokens,
            "kvstore.tier": where.tier,
            "kvstore.codec": where.codec,
        }
        begin = end - int(seconds * 1e9)
        self._tracer.start_span(f"kvstore.{part}", within, attributes=attributes, start_time=begin).end(end)


class StoreSpan:
    """The span of one call; see `kvstore.spans.CallSpan`.

    Args:
        call: its name.
        span: begun; it becomes the current one of this thread.
    """

    def __init__(self, call: str, span: Span) -> None:
        self._call = call
        self._span = span
        self._before = context.attach(set_span_in_context(span))

    def end(self, result: object, error: BaseException | None) -> None:
        """End the span, and make the one before the current one again."""
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        else:
            found = _attributes(self._call, result)
            self._span.set_attributes({f"kvstore.{name}": value for name, value in found.items()})
        context.detach(self._before)
        self._span.end()


def _attributes(call: str, result: object) -> Attributes:
    """What a call returned, as numbers and short words."""
    if isinstance(result, Hit):
        tiers: Attributes = {f"tokens.{tier}": count for tier, count in result.tiers.items()}
        where = result._where
        known: Attributes = {"hit": True, "tokens": result.tokens, "exact_tokens": result.exact_tokens}
        return {**known, "tier": where.tier, "codec": where.codec, "reason": result.reason.value, **tiers}
    if isinstance(result, PutResult):
        names = ("tokens", "new_tokens", "new_blocks", "dropped_blocks", "waited_s", "pinned")
        return {name: getattr(result, name) for name in names}
    if isinstance(result, FlushResult):
        return {"durable_blocks": result.durable_blocks, "dropped_blocks": result.dropped_blocks}
    if isinstance(result, EraseResult):
        return {"removed_blocks": result.removed_blocks}
    if isinstance(result, int):
        return {"removed_blocks": result}
    return {"hit": False} if call == "get" else {}
