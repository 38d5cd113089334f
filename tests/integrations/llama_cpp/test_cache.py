"""Sequences of llama.cpp saved to a store and restored: logits to the bit as llama.cpp's own state file gives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llamas import Llama
from threadruns import HANGS_S

from kvstore import KVStore, StoreConfig
from kvstore.core.rope import rotate
from kvstore.errors import ConfigError, IdentityMismatch, LayoutMismatch, UnsupportedCache
from kvstore.integrations.llama_cpp import Library, LlamaCache, identity_from_gguf

TOKENS = np.random.default_rng(1).integers(3, 320, 150)


def _store(folder: Path, gguf_path: Path, **settings: Any) -> KVStore:
    return KVStore(folder, identity_from_gguf(gguf_path, **settings))


@pytest.mark.parametrize(("flash", "sequences", "unified"), [(True, 1, True), (True, 3, False), (False, 3, True)])
def test_logits_are_those_of_a_state_file(
    llama: Llama, gguf_path: Path, tmp_path: Path, flash: bool, sequences: int, unified: bool
) -> None:
    how = {"flash": flash, "sequences": sequences, "unified": unified}
    with _store(tmp_path / "store", gguf_path, flash_attention=flash) as store:
        first = llama.context(**how)
        llama.decode(first, TOKENS)
        assert LlamaCache(store, first).save(0, [*TOKENS, 5]).new_tokens == 150
        llama.save_file(first, 0, tmp_path / "own.bin", TOKENS)
        going_on = llama.decode(first, [7, 8, 9])
        store.flush()
    with _store(tmp_path / "store", gguf_path, flash_attention=flash) as store:
        second, third = llama.context(**how), llama.context(**how)
        assert LlamaCache(store, second).restore(0, [*TOKENS, 7, 8, 9]) == 150
        assert llama.load_file(third, 0, tmp_path / "own.bin", 200).tolist() == TOKENS.tolist()
        ours, theirs = (llama.decode(context, [7, 8, 9]) for context in (second, third))
    assert np.array_equal(ours, going_on)
    assert np.array_equal(ours, theirs)


def test_another_prompt_takes_what_it_shares(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    with _store(tmp_path / "store", gguf_path) as store:
        first, second = llama.context(), llama.context()
        llama.decode(first, TOKENS)
        cache = LlamaCache(store, first)
        assert cache.save(0, TOKENS).new_tokens == 150
        assert cache.save(0, TOKENS).new_tokens == 0
        other = [*TOKENS[:100], 4, 4]
        taken = LlamaCache(store, second)
        assert taken.restore(0, other) == 100
        found = llama.decode(second, [4, 4])
        # the same rows in llama.cpp's own hands
        llama.cut(first, 0, 100)
        assert np.array_equal(llama.decode(first, [4, 4]), found)
        assert taken.save(0, other).tokens == store.contains(other) == 102
        assert taken.restore(0, other, max_tokens=10) == 10
        assert taken.restore(0, TOKENS) == 149  # one is left to be decoded
        assert taken.restore(0, [300, 1, 1]) == 0
        assert taken.save(0, TOKENS).tokens == 0  # nothing is there


def test_namespaces_do_not_share(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    with _store(tmp_path / "store", gguf_path) as store:
        cache = LlamaCache(store, llama.context())
        llama.decode(cache._context, TOKENS)
        cache.save(0, TOKENS, namespace="a")
        assert cache.restore(0, TOKENS, namespace="b") == 0
        assert cache.restore(0, TOKENS, namespace="a") == 149


def test_keys_in_the_store_are_rotated_in_halves(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    with _store(tmp_path / "store", gguf_path) as store:
        context = llama.context()
        llama.decode(context, [5] * 70)
        LlamaCache(store, context).save(0, [5] * 70)
        hit = store.get([5] * 70)
        assert hit is not None
        keys = hit.layers[0][0][0].float().transpose(0, 1).reshape(70, 64).numpy()
    # in the first layer the keys of one token differ in their positions alone
    still = rotate(keys, 2, np.arange(70), store.identity.layout.rope, -1)
    assert np.abs(keys - keys[0]).max() > 1
    assert np.abs(still - still[0]).max() < 0.01


def test_a_context_of_other_settings_is_named(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    with _store(tmp_path / "store", gguf_path) as store:
        good = llama.context()
        llama.decode(good, TOKENS)
        LlamaCache(store, good).save(0, TOKENS)
        for settings, error, message in (
            ({"flash": False}, LayoutMismatch, "flash attention off"),
            ({"kind": 0}, LayoutMismatch, "f32"),
            ({"kind": 8}, UnsupportedCache, "q8_0|rotated"),
        ):
            context = llama.context(**settings)
            cache = LlamaCache(store, context)
            assert cache.restore(0, TOKENS) == 0
            llama.decode(context, [300, 9, 9])
            with pytest.raises(error, match=message):
                cache.save(0, [300, 9, 9])
        assert store.stats()["counters"]["fallback_engine_refused"] == 3
        assert store.contains([300, 9, 9]) == 0


def test_a_context_without_room_computes(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    with _store(tmp_path / "store", gguf_path) as store:
        large, small = llama.context(room=1024), llama.context(room=256)
        tokens = np.random.default_rng(2).integers(3, 320, 400)
        llama.decode(large, tokens)
        LlamaCache(store, large).save(0, tokens)
        assert LlamaCache(store, small).restore(0, tokens) == 256


def test_what_is_wrong_is_named_before_anything_happens(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    context = llama.context()
    llama.decode(context, TOKENS)
    with _store(tmp_path / "store", gguf_path) as store:
        cache = LlamaCache(store, context)
        for call in (lambda: cache.restore(1, TOKENS), lambda: cache.save(-1, TOKENS), lambda: cache.restore(0, [])):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(ValueError, match="max_tokens"):
            cache.restore(0, TOKENS, max_tokens=-1)
        with pytest.raises(LayoutMismatch, match="150 tokens, 3"):
            cache.save(0, TOKENS[:3])
        assert Library().length(context, 0) == 150
        llama.shift(context, 0, 3)
        with pytest.raises((LayoutMismatch, ValueError)):
            cache.save(0, [*TOKENS, 1, 1, 1])
        for bad in (0, None, "x", True):
            with pytest.raises(ConfigError, match="context"):
                LlamaCache(store, bad)
        for bad in ("/no/such/file.so", "libc.so.6"):
            with pytest.raises(ConfigError, match="library"):
                LlamaCache(store, context, bad)
    with _store(tmp_path / "older", gguf_path, state_version=3) as store:
        store.put(TOKENS, [(k, v) for k, v in _zeros(store)])
        with pytest.raises(IdentityMismatch, match="version 4"):
            LlamaCache(store, context).restore(0, TOKENS)


def _zeros(store: KVStore) -> Any:
    return [(torch.zeros(2, 150, 32).half(), torch.zeros(2, 150, 32).half()) for _ in store.identity.layout.layers]


def test_a_killed_process_loses_nothing_that_was_flushed(llama: Llama, gguf_path: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; import numpy as np; from llamas import Llama\n"
        "from kvstore import KVStore; from kvstore.integrations.llama_cpp import LlamaCache, identity_from_gguf\n"
        "path, folder = map(Path, sys.argv[1:]); llama = Llama(path); context = llama.context()\n"
        "tokens = np.random.default_rng(1).integers(3, 320, 150); llama.decode(context, tokens)\n"
        "store = KVStore(folder / 'store', identity_from_gguf(path)); LlamaCache(store, context).save(0, tokens)\n"
        "store.flush(); np.save(folder / 'logits.npy', llama.decode(context, [7]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, gguf_path, tmp_path], env=_environment(), timeout=HANGS_S, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with KVStore(tmp_path / "store", identity_from_gguf(gguf_path), StoreConfig()) as store:
        context = llama.context()
        assert LlamaCache(store, context).restore(0, [*TOKENS, 7]) == 150
        assert np.array_equal(llama.decode(context, [7]), np.load(tmp_path / "logits.npy"))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
