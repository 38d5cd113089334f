"""Slots of a server of llama.cpp, which xllamacpp runs in this process, saved to a store and restored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import Llama

from kvstore import KVStore
from kvstore.errors import ConfigError, KVStoreError, UnsupportedCache
from kvstore.integrations.llama_cpp import LlamaCache, LlamaServer, identity_from_gguf

TOKENS = np.random.default_rng(1).integers(3, 320, 150).tolist()
# In a process of its own: the extension modules of xllamacpp and blosc2 cannot be in one.
PROGRAM = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.slot_save_path, params.n_ctx, params.n_parallel = sys.argv[1], sys.argv[2] + "/", 512, 2
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.warmup = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class _Server:
    """Two slots of 256 tokens."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, slot: int, tokens: list[int]) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were not computed."""
        body = {"prompt": tokens, "id_slot": slot, "n_predict": 6, "temperature": 0, "cache_prompt": True}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: Any = json.load(answer)
        return found["content"], found["timings"]["cache_n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(gguf_path: Path, folder: Path) -> Iterator[_Server]:
    if find_spec("xllamacpp") is None:
        pytest.skip("could not import 'xllamacpp'")
    command = [sys.executable, "-c", PROGRAM, str(gguf_path), str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the server did not start"
        yield _Server(address)
        process.stdin.close()


def test_a_slot_goes_on_from_the_store(server: _Server, gguf_path: Path, folder: Path, tmp_path: Path) -> None:
    with KVStore(tmp_path, identity_from_gguf(gguf_path)) as store:
        slots = LlamaServer(store, server.url, folder)
        assert slots.save(1).tokens == 0
        text, cached = server.complete(0, TOKENS)
        assert cached == 0
        done = slots.save(0)
        assert done.tokens == done.new_tokens >= len(TOKENS)
        again = LlamaServer(store, server.url, folder)  # which must learn how this server writes
        assert again.restore(1, [9, 9, 9]) == 0
        assert again.restore(1, [*TOKENS[:90], 4, 4]) == 90
        assert server.complete(1, [*TOKENS[:90], 4, 4])[1] == 90
        assert again.restore(1, TOKENS) == 149
        assert server.complete(1, TOKENS) == (text, 149)
        assert list(folder.iterdir()) == []


def test_a_slot_and_a_context_share_a_store(
    server: _Server, llama: Llama, gguf_path: Path, folder: Path, tmp_path: Path
) -> None:
    prompt = np.random.default_rng(3).integers(3, 320, 100).tolist()
    with KVStore(tmp_path, identity_from_gguf(gguf_path)) as store:
        context = llama.context()
        llama.decode(context, prompt)
        LlamaCache(store, context).save(0, prompt)
        slots = LlamaServer(store, server.url, folder)
        assert slots.restore(0, [*prompt, 5]) == 100
        assert server.complete(0, [*prompt, 5])[1] == 100


def test_what_the_server_does_not_take_is_computed(
    server: _Server, llama: Llama, gguf_path: Path, folder: Path, tmp_path: Path
) -> None:
    prompt = np.random.default_rng(4).integers(3, 320, 400).tolist()  # a slot has room for 256
    with KVStore(tmp_path, identity_from_gguf(gguf_path)) as store:
        context = llama.context(room=512)
        llama.decode(context, prompt)
        LlamaCache(store, context).save(0, prompt)
        assert LlamaServer(store, server.url, folder).restore(0, prompt) == 0
        assert store.stats()["counters"]["fallback_engine_refused"] == 1
        assert LlamaServer(store, server.url, folder).restore(0, prompt, max_tokens=200) == 200


def test_what_is_wrong_is_named(server: _Server, gguf_path: Path, folder: Path, tmp_path: Path) -> None:
    with KVStore(tmp_path / "store", identity_from_gguf(gguf_path)) as store:
        with pytest.raises(ConfigError, match="slot_save_path"):
            LlamaServer(store, server.url, tmp_path / "missing")
        with pytest.raises(UnsupportedCache, match="no file there"):
            LlamaServer(store, server.url, tmp_path).save(0)
        with pytest.raises(UnsupportedCache, match="reached"):
            LlamaServer(store, "http://127.0.0.1:1", folder).save(0)
        for slot in (-1, 2, True):
            with pytest.raises(ValueError, match="from 0 to 1"):
                LlamaServer(store, server.url, folder).save(slot)
    with KVStore(tmp_path / "other", identity_from_gguf(gguf_path, flash_attention=False)) as store:
        server.complete(0, [5, 6, 7])
        with pytest.raises(KVStoreError, match="flash attention on"):
            LlamaServer(store, server.url, folder).save(0)
    for left in folder.iterdir():
        os.unlink(left)
