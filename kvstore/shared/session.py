"""Sessions of a store that several processes write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from kvstore.core.arguments import end_of_life
from kvstore.core.keys import namespace_digest
from kvstore.core.results import EraseResult, Hit, PutResult
from kvstore.core.session_note import pack_metadata, unpack_metadata
from kvstore.core.session_record import session_key
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.shared.calls import as_plain


class SharedSession:
    """A handle on a session, made by `SharedKVStore.session`; the methods are those of `Session`. Thread-safe.

    The owner of the store says what the session stands for; the cache is read directly.
    """

    def __init__(
        self,
        name: str,
        namespace: str | bytes,
        change: Callable[..., Any],
        store_cache: Callable[..., PutResult],
        get: Callable[..., Hit | None],
        forget: Callable[[str | bytes, Tokens], None],
    ) -> None:
        session_key(namespace_digest(namespace), name)  # raises ValueError where one of them is malformed
        self.id = name
        self._namespace = namespace
        self._change = change
        self._store_cache = store_cache
        self._get = get
        self._forget = forget

    @property
    def exists(self) -> bool:
        """See `Session.exists`."""
        return self._found(use=False) is not None

    @property
    def tokens(self) -> Tokens:
        """See `Session.tokens`."""
        found = self._found(use=False)
        return found["tokens"] if found else as_tokens([0])[:0]

    @property
    def metadata(self) -> dict[str, Any]:
        """See `Session.metadata`."""
        found = self._found(use=False)
        return (unpack_metadata(found["metadata"]) or {}) if found else {}

    def save(
        self,
        tokens: Any,
        kv: Any,
        *,
        then: Any = None,
        logprobs: Any = None,
        ttl: float | None = None,
        pin: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> PutResult:
        """See `Session.save`."""
        end_of_life(ttl)
        options = {"logprobs": as_plain(logprobs), "ttl": ttl, "pin": bool(pin), "metadata": _packed(metadata)}
        if then is not None:
            options["then"] = as_tokens(then)
        return self._store_cache("session_save", as_tokens(tokens), kv, self._namespace, name=self.id, **options)

    def point_to(self, tokens: Any, *, ttl: float | None = None, metadata: Mapping[str, Any] | None = None) -> int:
        """See `Session.point_to`."""
        end_of_life(ttl)
        return int(self._session("point_to", tokens=as_tokens(tokens), ttl=ttl, metadata=_packed(metadata)))

    def resume(
        self, *, max_tokens: int | None = None, device: Any = None, reserve: int | None = None, lazy: bool = False
    ) -> Hit | None:
        """See `Session.resume`."""
        found = self._found(use=True)
        if found is None:
            return None
        options = {"max_tokens": max_tokens, "device": device, "reserve": reserve}
        return self._get(found["tokens"], namespace=self._namespace, gate=False, lazy=lazy, **options)

    def touch(self) -> None:
        """See `Session.touch`."""
        self._found(use=True)

    def fork(self, new_id: str) -> SharedSession:
        """See `Session.fork`."""
        self._session("fork", new_id=new_id)
        return SharedSession(new_id, self._namespace, self._change, self._store_cache, self._get, self._forget)

    @overload
    def delete(self, *, blocks: bool = False, erase: Literal[False] = False) -> bool: ...

    @overload
    def delete(self, *, blocks: bool = False, erase: Literal[True]) -> EraseResult: ...

    def delete(self, *, blocks: bool = False, erase: bool = False) -> bool | EraseResult:
        """See `Session.delete`."""
        gone = self.tokens if blocks else as_tokens([0])[:0]
        done: bool | EraseResult = self._session("delete", blocks=bool(blocks), erase=bool(erase))
        if len(gone):
            self._forget(self._namespace, gone)  # what other sequences share comes back from the catalog
        return done

    def _found(self, use: bool) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._change("session", name=self.id, namespace=self._namespace, use=use)
        return found

    def _session(self, call: str, **arguments: Any) -> Any:
        return self._change(f"session_{call}", name=self.id, namespace=self._namespace, **arguments)


def _packed(metadata: Mapping[str, Any] | None) -> bytes | None:
    return None if metadata is None else pack_metadata(metadata)
