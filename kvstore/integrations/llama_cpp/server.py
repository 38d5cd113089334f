"""Slots of a llama.cpp server that are saved to a store and restored from it, by the server's own files.

The server is one of llama.cpp (`llama-server --slot-save-path FOLDER`) or of xllamacpp (`params.slot_save_path`), on
this machine.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import numpy as np

from kvstore.core.results import PutResult
from kvstore.core.tokens import as_tokens
from kvstore.errors import ConfigError, LayoutMismatch, UnsupportedCache
from kvstore.integrations.llama_cpp.cache import most_tokens
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.slot_file import SlotFile, build_slot_file, read_slot_file
from kvstore.integrations.llama_cpp.state import Bytes, parse_state
from kvstore.metrics import Metric
from kvstore.store import KVStore

_BAD_REQUEST = 400


class LlamaServer:
    """The slots of a llama.cpp server, in a store whose identity `identity_from_gguf` made.

    Thread-safe for different slots. The server must not shift contexts (`--no-context-shift`, which is its default):
    keys and values of a shifted context are no longer those of its tokens.

    Args:
        store: an open store.
        url: of the server; of xllamacpp `server.listening_address`.
        folder: the server's `slot_save_path`. A file of each save and restore is there as long as that takes; a folder
            in memory (`/dev/shm/...`) is faster.
        api_key: that the server asks for.
        timeout_s: of a request to it, in seconds.

    Raises:
        ConfigError: the store is not one of llama.cpp's, or there is no such folder.

    Example:
        >>> LlamaServer(store, "http://127.0.0.1:8080", "/dev/shm/slots")  # doctest: +SKIP
    """

    def __init__(
        self,
        store: KVStore,
        url: str,
        folder: str | os.PathLike[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._store, self._form, self._layout = store, StateForm.of(store.identity), store.identity.layout
        self._url, self._folder, self._timeout_s = url.rstrip("/"), os.fspath(folder), timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if not os.path.isdir(self._folder):
            raise ConfigError(f"folder: {self._folder} is no folder; give the server's slot_save_path")
        self._slots: int | None = None
        self._habits: tuple[int, bool] | None = None  # streams of its context, whether it packs tokens

    def restore(self, slot: int, tokens: Any, *, namespace: str | bytes = b"", max_tokens: int | None = None) -> int:
        """Replace a slot by the longest stored prefix of `tokens`; leave it as it is if there is none.

        The next completion with this `id_slot`, `cache_prompt` and a prompt that begins so reuses it.

        Args:
            slot: its number.
            tokens: ids of all tokens of the prompt.
            namespace: that of `save`.
            max_tokens: restore at most this many.

        Returns:
            How many tokens were restored. 0 also if the server does not take them, which `stats()` counts as
            "fallback_engine_refused".

        Raises:
            ValueError: an argument is malformed.
            UnsupportedCache: the server cannot be reached or does not save slots; the message has its answer.
            IdentityMismatch: the server has states of another version than the store.
        """
        ids = as_tokens(tokens)
        most = most_tokens(ids, max_tokens, len(ids))
        hit = self._store.get(ids, namespace=namespace, max_tokens=most, reserve=0) if most else None
        if hit is None:
            return 0
        if self._habits is None:
            self._saved(slot)
        streams, packed = self._habits or (1, False)
        data = build_slot_file(ids[: hit.tokens], hit.layers, self._form, self._layout, streams=streams, packed=packed)
        with _Scratch(self._folder, slot) as name:
            _write(os.path.join(self._folder, name), data)
            try:
                self._ask(slot, "restore", name)
            except _Refused:
                self._store.metrics.add(Metric.FALLBACK_ENGINE_REFUSED)
                return 0
        return hit.tokens

    def save(
        self, slot: int, *, namespace: str | bytes = b"", ttl: float | None = None, pin: bool = False
    ) -> PutResult:
        """Store what a slot holds. Its tokens come from the server.

        Args:
            slot: its number.
            namespace, ttl, pin: as of `KVStore.put`, and so is what is durable on return.

        Returns:
            What was new.

        Raises:
            The errors of `restore`, and those of `LlamaCache.save`.
        """
        file, data = self._saved(slot)
        found = parse_state(file.state, self._form, self._layout)
        if found.tokens != len(file.tokens):
            raise LayoutMismatch(f"slot file: {len(file.tokens)} tokens are named, the state has {found.tokens}")
        del data
        if not found.tokens:
            return PutResult(0, 0, 0, 0, 0.0)
        return self._store.put(file.tokens, found.layers, namespace=namespace, ttl=ttl, pin=pin)

    def _saved(self, slot: int) -> tuple[SlotFile, Bytes]:
        with _Scratch(self._folder, slot) as name:
            self._ask(slot, "save", name)
            try:
                data = np.fromfile(os.path.join(self._folder, name), np.uint8)
            except OSError as error:
                raise UnsupportedCache(f"folder: the server saved no file there ({error})") from error
        file = read_slot_file(data, self._form.version)
        self._habits = file.streams, file.packed
        return file, data

    def _ask(self, slot: int, action: str, name: str) -> None:
        if self._slots is None:
            self._slots = int(self._answer("/props").get("total_slots", 1 << 16))
        # a server takes any slot for one that it has not
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < self._slots:
            raise ValueError(f"slot: expected an integer from 0 to {self._slots - 1}, found {slot!r}")
        self._answer(f"/slots/{slot}?action={action}", {"filename": name})

    def _answer(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            kind = _Refused if error.code == _BAD_REQUEST else UnsupportedCache
            raise kind(f"the server refuses {path}: {error.code} {error.read(500)!r}") from error
        except (OSError, ValueError) as error:
            raise UnsupportedCache(f"the server at {self._url} cannot be reached: {error}") from error


class _Refused(UnsupportedCache):
    """The server answers that this cannot be done: it has no room for a state, or does not take it."""


class _Scratch:
    """The name of a file for one request, which is removed afterwards."""

    def __init__(self, folder: str, slot: int) -> None:
        self._folder, self._name = folder, f"kvstore-{os.getpid()}-{slot}.bin"

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, *_: object) -> None:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, self._name))


def _write(path: str, data: Bytes) -> None:
    # O_EXCL and no links: the folder may belong to others, too
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data.data)
