"""The calls that change a store, as the owner makes them, for itself and for others; and their results as messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from kvstore import errors
from kvstore.core.arguments import as_numbers
from kvstore.core.keys import NamespaceDigest
from kvstore.core.learning_status import LearningStatus
from kvstore.core.prepared import PreparedCache
from kvstore.core.results import CompactResult, EraseResult, FlushResult, PutResult
from kvstore.core.session_note import pack_metadata, unpack_metadata
from kvstore.core.tokens import Tokens
from kvstore.errors import KVStoreError
from kvstore.session import Session
from kvstore.store import KVStore

_RESULTS: dict[str, Any] = {
    kind.__name__: kind for kind in (CompactResult, EraseResult, FlushResult, LearningStatus, PutResult)
}
_ERRORS: dict[str, type[Exception]] = {
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KVStoreError)},
    **{kind.__name__: kind for kind in (ValueError, TypeError, KeyError)},
}

_DIGEST = "namespace"
_KINDS = ("<u4", "<f4", "<f8", _DIGEST)


class PrefixMissing(Exception):
    """A put was given the last blocks of a sequence alone, and some before are not stored; users never see it.

    Attributes:
        begin: from which token on.
    """

    def __init__(self, begin: int) -> None:
        super().__init__(begin)
        self.begin = begin


def perform(store: KVStore, call: str, arguments: dict[str, Any]) -> Any:
    """Make a call of the store that this process owns.

    Args:
        call: a name in `CALLS`.
        arguments: of the call; tokens as uint32 `[n]`, the cache of a put as `PreparedCache`.

    Raises:
        The errors of the call; ValueError: there is no such call, or its arguments are others.
        PrefixMissing: a put was given too few of its blocks.
    """
    function = CALLS.get(call)
    if function is None:
        raise ValueError(f"call: there is no {call!r}")
    return function(store, **arguments)


def _put(store: KVStore, tokens: Tokens, kv: PreparedCache, start: int = 0, **options: Any) -> PutResult:
    return _checked(store.put(tokens, kv, start=start, **options))


def _look(store: KVStore, tokens: Tokens, namespace: str | bytes) -> None:
    """Another process could not decode what is stored of a sequence: a put of it stores it anew if this one cannot,
    either."""
    store.get(tokens, namespace=namespace)


def _checked(done: PutResult) -> PutResult:
    """What a put returned, if what is before its start was there."""
    if done.missing_from is not None:
        raise PrefixMissing(done.missing_from)
    return done


def _save(
    store: KVStore,
    name: str,
    namespace: str | bytes,
    tokens: Tokens,
    kv: PreparedCache,
    metadata: bytes | None,
    start: int = 0,
    **options: Any,
) -> PutResult:
    session = store.session(name, namespace=namespace)
    return _checked(session._save(tokens, kv, start, metadata=_unpacked(metadata), **options))


def _session(store: KVStore, name: str, namespace: str | bytes, use: bool) -> dict[str, Any] | None:
    session = store.session(name, namespace=namespace)
    if not session.exists:
        return None
    if use:
        session.touch()
    return {"tokens": session.tokens, "metadata": pack_metadata(session.metadata)}


def _delete_session(store: KVStore, name: str, namespace: str | bytes, blocks: bool, erase: bool) -> bool | EraseResult:
    delete: Callable[..., bool | EraseResult] = store.session(name, namespace=namespace).delete
    return delete(blocks=blocks, erase=erase)


def _fork(store: KVStore, name: str, namespace: str | bytes, new_id: str) -> None:
    store.session(name, namespace=namespace).fork(new_id)


def _point_to(
    store: KVStore, name: str, namespace: str | bytes, tokens: Tokens, ttl: float | None, metadata: bytes | None
) -> int:
    session: Session = store.session(name, namespace=namespace)
    return session.point_to(tokens, ttl=ttl, metadata=_unpacked(metadata))


def _unpacked(metadata: bytes | None) -> dict[str, Any] | None:
    return None if metadata is None else unpack_metadata(metadata)


def _delete(store: KVStore, tokens: Tokens, namespace: str | bytes, erase: bool) -> int | EraseResult:
    delete: Callable[..., int | EraseResult] = store.delete
    return delete(tokens, namespace=namespace, erase=erase)


def _delete_namespace(store: KVStore, namespace: str | bytes, erase: bool) -> int | EraseResult:
    delete: Callable[..., int | EraseResult] = store.delete_namespace
    return delete(namespace, erase=erase)


CALLS: dict[str, Callable[..., Any]] = {
    "put": _put,
    "touch": KVStore.touch,
    "look": _look,
    "delete": _delete,
    "delete_namespace": _delete_namespace,
    "unpin": KVStore.unpin,
    "flush": KVStore.flush,
    "compact": KVStore.compact,
    "learn": KVStore.learn,
    "session": _session,
    "session_save": _save,
    "session_point_to": _point_to,
    "session_fork": _fork,
    "session_delete": _delete_session,
}


def pack_result(result: Any) -> dict[str, Any]:
    """Return the result of a call as a message."""
    kind = type(result).__name__
    return {"result": asdict(result), "kind": kind} if kind in _RESULTS else {"result": to_wire(result)}


def pack_error(error: Exception) -> dict[str, Any]:
    """Return an error of a call as a message."""
    if isinstance(error, PrefixMissing):
        return {"missing": error.begin}
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS), "KVStoreError")
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"error": kind, "text": text or type(error).__name__}


def result_of(message: dict[str, Any]) -> Any:
    """Return the result that a message brings, or raise the error that it brings."""
    if "missing" in message:
        raise PrefixMissing(int(message["missing"]))
    if "error" in message:
        raise _ERRORS.get(str(message["error"]), KVStoreError)(str(message.get("text", "")))
    result: Any = message.get("result")
    if "kind" not in message:
        return from_wire(result)
    kind = _RESULTS[message["kind"]]
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in result.items()})


def as_plain(logprobs: Any) -> Any:
    """Return log-probabilities as numbers that can be sent; None stays None.

    Raises:
        ValueError: they are no numbers.
    """
    return None if logprobs is None else np.asarray(as_numbers("logprobs", logprobs), "<f8")


def to_wire(value: Any) -> Any:
    """Return plain values of the arguments, or of a result: arrays become their bytes."""
    if isinstance(value, np.ndarray):
        return {"": value.dtype.str, "data": np.ascontiguousarray(value).tobytes()}
    if isinstance(value, NamespaceDigest):
        return {"": _DIGEST, "data": bytes(value)}
    if isinstance(value, dict):
        return {name: to_wire(x) for name, x in value.items()}
    return value


def from_wire(value: Any) -> Any:
    """Return what `to_wire` made plain.

    Raises:
        ValueError: an array is of a kind that is not sent.
    """
    if not isinstance(value, dict):
        return value
    if "" not in value:
        return {name: from_wire(x) for name, x in value.items()}
    if value[""] not in _KINDS or not isinstance(value.get("data"), bytes):
        raise ValueError("array: expected numbers of a known kind")
    return NamespaceDigest(value["data"]) if value[""] == _DIGEST else np.frombuffer(value["data"], value[""])
