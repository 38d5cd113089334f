"""Sequences of a llama.cpp context that are saved to a store and restored from it."""

from __future__ import annotations

import struct
from typing import Any

from kvstore.core.arguments import check_integer
from kvstore.core.results import PutResult
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.errors import ConfigError, IdentityMismatch, LayoutMismatch, MalformedState
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.library import Library
from kvstore.integrations.llama_cpp.slot_file import wrong_version
from kvstore.integrations.llama_cpp.state import build_state, parse_state
from kvstore.metrics import Metric
from kvstore.store import KVStore

_STATE_MAGIC = 0xAF143CD8


class LlamaCache:
    """The sequences of one llama.cpp context, in a store whose identity `identity_from_gguf` made.

    Not thread-safe, as the context: calls for one context must not overlap, nor with its `llama_decode`. Any number of
    contexts may share a store. A context whose positions were shifted (context shift, self-extend) must not be saved:
    its keys and values are no longer those of its tokens, and nothing shows that.

    Args:
        store: an open store.
        context: `llama_context *` as an integer or a `ctypes.c_void_p`; of llama-cpp-python `llm.ctx`.
        library: see `Library`.

    Raises:
        ConfigError: the store is not one of llama.cpp's, or the library does not do.

    Example:
        A whole program is in docs/llama_cpp.md.

        >>> LlamaCache(store, context)  # doctest: +SKIP
    """

    def __init__(self, store: KVStore, context: Any, library: Any = None) -> None:
        self._store, self._form, self._layout = store, StateForm.of(store.identity), store.identity.layout
        address = getattr(context, "value", context)
        if isinstance(address, bool) or not isinstance(address, int) or address <= 0:
            raise ConfigError(f"context: expected the address of a llama_context, found {context!r}")
        self._context, self._library = address, library if isinstance(library, Library) else Library(library)

    def restore(
        self, sequence: int, tokens: Any, *, namespace: str | bytes = b"", max_tokens: int | None = None
    ) -> int:
        """Replace a sequence by the longest stored prefix of `tokens`; by nothing if there is none.

        At least the last token is left to be decoded, for a state has no logits.

        Args:
            sequence: its number in the context.
            tokens: ids of all tokens that the model is to see.
            namespace: that of `save`.
            max_tokens: restore at most this many.

        Returns:
            How many tokens the sequence holds now; decode `tokens[n:]`. 0 also if llama.cpp does not take them, for
            want of room or because the context has other settings than the identity says: `stats()` counts that as
            "fallback_engine_refused".

        Raises:
            ValueError: an argument is malformed.
            IdentityMismatch: the library has states of another version than the store.
        """
        ids = as_tokens(tokens)
        self._check(sequence)
        most = most_tokens(ids, max_tokens, self._library.room(self._context))
        hit = self._store.get(ids, namespace=namespace, max_tokens=most, reserve=0) if most else None
        self._library.clear(self._context, sequence)
        if hit is None:
            return 0
        head = struct.pack("<Ii", _STATE_MAGIC, sequence)
        streams = self._streams(sequence)
        state = build_state(hit.layers, hit.tokens, self._form, self._layout, streams=streams, head=head)
        if self._library.set_state(self._context, sequence, state):
            return hit.tokens
        self._library.clear(self._context, sequence)
        self._store.metrics.add(Metric.FALLBACK_ENGINE_REFUSED)
        return 0

    def save(
        self, sequence: int, tokens: Any, *, namespace: str | bytes = b"", ttl: float | None = None, pin: bool = False
    ) -> PutResult:
        """Store what a sequence holds; nothing is copied if all of it is stored.

        Args:
            sequence: its number in the context.
            tokens: ids of its tokens; those behind what was decoded are left out, as the last one that was sampled.
            namespace, ttl, pin: as of `KVStore.put`, and so is what is durable on return.

        Returns:
            What was new.

        Raises:
            ValueError: an argument is malformed.
            LayoutMismatch: the sequence has more tokens than `tokens`, or the context has another cache type or flash
                attention than the identity says.
            UnsupportedCache: the context keeps something that is not stored; the message names it.
            MalformedState: the state is not one of the version that the identity says.
        """
        ids = as_tokens(tokens)
        self._check(sequence)
        length = self._library.length(self._context, sequence)
        if length > len(ids):
            raise LayoutMismatch(f"tokens: the sequence holds {length} tokens, {len(ids)} are given")
        if not length:
            return PutResult(0, 0, 0, 0, 0.0)
        ids = ids[:length]
        if not pin and ttl is None and self._store.contains(ids, namespace=namespace) == length:
            return PutResult(length, 0, 0, 0, 0.0)
        state = self._library.state(self._context, sequence)
        if len(state) < 8 or struct.unpack_from("<I", state.data)[0] != _STATE_MAGIC:
            raise MalformedState("llama.cpp's states begin with another magic than those that are known")
        found = parse_state(state[8:], self._form, self._layout)
        if found.tokens != length:
            raise MalformedState(f"the sequence has {length} positions and {found.tokens} tokens")
        return self._store.put(ids, found.layers, namespace=namespace, ttl=ttl, pin=pin)

    def _check(self, sequence: int) -> None:
        most = self._library.sequences(self._context)
        if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence < most:
            raise ValueError(f"sequence: expected an integer from 0 to {most - 1}, found {sequence!r}")

    def _streams(self, sequence: int) -> int:
        """Of the context, whose sequence is empty."""
        head = self._library.file_head(self._context, sequence)
        if len(head) < 16:
            raise MalformedState("llama.cpp wrote no file of an empty sequence; its log says why")
        _, version, _, streams = struct.unpack_from("<4I", head)
        if version != self._form.version:
            raise IdentityMismatch(wrong_version(version, self._form.version))
        return int(streams)


def most_tokens(ids: Tokens, max_tokens: int | None, room: int) -> int:
    """Return how many tokens to restore at most: the last one is left to be decoded.

    Raises:
        ValueError: `max_tokens` is malformed.
    """
    check_integer("max_tokens", max_tokens, 0)
    return min(len(ids) - 1, room, room if max_tokens is None else max_tokens)
