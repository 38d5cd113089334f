"""Spans: off unless asked, one for each call with what it returned, decoding below the get that needs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span
from small_stores import config, identity, put, stored, tokens_of

from kvstore import BlocksLost, KVStore, tracing


class Traced:
    """A provider of tracers that keeps what it is told."""

    def __init__(self) -> None:
        self.provider, self._kept = TracerProvider(), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def take(self) -> list[ReadableSpan]:
        """The spans since the last call, in the order in which they ended."""
        found = list(self._kept.get_finished_spans())
        self._kept.clear()
        return found


def said(span: ReadableSpan) -> dict[str, object]:
    """Its attributes without the prefix, but for the store's path."""
    found = {name.removeprefix("kvstore."): value for name, value in (span.attributes or {}).items()}
    assert found.pop("store")
    return found


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.provider.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path, identity(), config(host=0, threads=2, learn="off")) as store:
        yield store


def test_nothing_is_told_unless_asked(store: KVStore, traced: Traced) -> None:
    put(store, tokens_of(1, 20))
    assert traced.take() == []
    tracing.trace(store, traced.provider)
    put(store, tokens_of(2, 20))
    assert [span.name for span in traced.take()] == ["kvstore.put"]
    tracing.untrace(store)
    stored(store, tokens_of(2, 20))
    assert traced.take() == []


def test_every_call_is_a_span_with_what_it_returned(store: KVStore, traced: Traced) -> None:
    tracing.trace(store, traced.provider)
    tokens = tokens_of(1, 20)
    put(store, tokens)
    store.flush()
    assert stored(store, tokens[:10]) == 10
    assert store.get(tokens_of(2, 4)) is None
    store.delete(tokens)
    spans = traced.take()
    calls = [span for span in spans if span.name != "kvstore.decode"]
    assert [span.name for span in calls] == [f"kvstore.{each}" for each in ("put", "flush", "get", "get", "delete")]
    first, flushed, hit, miss, deleted = map(said, calls)
    assert first.pop("waited_s") >= 0  # type: ignore[operator]
    assert first == {"tokens": 20, "new_tokens": 20, "new_blocks": 5, "dropped_blocks": 0, "pinned": False}
    assert flushed == {"durable_blocks": 5, "dropped_blocks": 0}
    place = {"tier": "disk", "codec": "raw", "tokens.disk": 10}
    assert hit == {"hit": True, "tokens": 10, "exact_tokens": 10, "reason": "stored", **place}
    assert miss == {"hit": False}
    assert deleted == {"removed_blocks": 5}
    assert all(span.parent is None and span.status.status_code is not StatusCode.ERROR for span in calls)
    assert not get_current_span().get_span_context().is_valid  # nothing stays current


def test_blocks_are_decoded_below_their_get_and_that_below_the_caller_s_span(store: KVStore, traced: Traced) -> None:
    tokens = tokens_of(1, 64)
    put(store, tokens)
    store.flush()
    tracing.trace(store, traced.provider)
    with traced.provider.get_tracer("program").start_as_current_span("request"):
        assert stored(store, tokens) == 64
    *decoded, get, request = traced.take()
    assert get.parent is not None
    assert request.context is not None
    assert get.parent.span_id == request.context.span_id
    assert len(decoded) == 16
    for span in decoded:
        assert span.name == "kvstore.decode"
        assert span.parent is not None
        assert get.context is not None
        assert span.parent.span_id == get.context.span_id
        assert said(span) == {"tokens": 4, "tier": "disk", "codec": "raw"}
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def test_a_call_that_raises_says_so(store: KVStore, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BlocksLost("a thread died")

    tracing.trace(store, traced.provider)
    with monkeypatch.context() as broken:
        broken.setattr(store._engine.put_path, "flush", fail, raising=False)
        with pytest.raises(BlocksLost):
            store.flush()
    (span,) = traced.take()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "BlocksLost"
    assert [event.name for event in span.events] == ["exception"]
    assert said(span) == {}


def test_without_opentelemetry_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "kvstore.tracing")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kvstore-lm\[otel\]'"):
        importlib.import_module("kvstore.tracing")
