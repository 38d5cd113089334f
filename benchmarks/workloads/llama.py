"""llama.cpp by its C functions, in the library of the package xllamacpp: models, contexts, logits.

The structures of the library are passed whole, as its own defaults; only fields whose place is known are set. That is
so for versions of xllamacpp like that of October 2026, which `context` checks by what the defaults are.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.integrations.llama_cpp.library import installed_library

Params = ctypes.c_int32 * 128
_N_CTX, _N_SEQ_MAX, _THREADS, _FLASH, _TYPE_K, _TYPE_V = 0, 3, (7, 8), 13, 26, 27  # words
_UNIFIED = 141  # byte
_POINTER, _INT, _SIZE, _TEXT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p


class _Params(ctypes.Structure):
    _fields_ = [("words", Params)]


class _Batch(ctypes.Structure):
    _fields_ = [("tokens", ctypes.c_int32)] + [
        (name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "llama_model_default_params": (_Params,),
    "llama_context_default_params": (_Params,),
    "llama_model_load_from_file": (_POINTER, _TEXT, _Params),
    "llama_init_from_model": (_POINTER, _POINTER, _Params),
    "llama_model_free": (None, _POINTER),
    "llama_free": (None, _POINTER),
    "llama_model_get_vocab": (_POINTER, _POINTER),
    "llama_vocab_n_tokens": (_INT, _POINTER),
    "llama_tokenize": (_INT, _POINTER, _TEXT, _INT, _POINTER, _INT, ctypes.c_bool, ctypes.c_bool),
    "llama_batch_get_one": (_Batch, _POINTER, _INT),
    "llama_decode": (_INT, _POINTER, _Batch),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), _POINTER, _INT),
    "llama_get_memory": (_POINTER, _POINTER),
    "llama_memory_seq_rm": (ctypes.c_bool, _POINTER, _INT, _INT, _INT),
    "llama_memory_seq_add": (None, _POINTER, _INT, _INT, _INT, _INT),
    "llama_state_seq_save_file": (_SIZE, _POINTER, _TEXT, _INT, _POINTER, _SIZE),
    "llama_state_seq_load_file": (_SIZE, _POINTER, _TEXT, _INT, _POINTER, _SIZE, ctypes.POINTER(_SIZE)),
    "llama_log_set": (None, _POINTER, _POINTER),
}


class Llama:
    """A loaded model. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(installed_library())
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        # No log: `abs` does nothing with a level and a text. A function of Python might be gone when a thread calls it.
        self.library.llama_log_set(ctypes.cast(ctypes.CDLL(None).abs, _POINTER), None)
        self.library.llama_backend_init()
        params = self.library.llama_model_default_params()
        self._model = self.library.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"{path}: llama.cpp does not load it"
        self._words = self.library.llama_model_get_vocab(self._model)
        self.vocabulary = self.library.llama_vocab_n_tokens(self._words)
        self._contexts: list[int] = []

    def tokens_of(self, text: str) -> npt.NDArray[np.int32]:
        raw = text.encode()
        ids = np.zeros(len(raw) + 8, np.int32)
        count = self.library.llama_tokenize(self._words, raw, len(raw), ids.ctypes.data, len(ids), False, False)
        assert count >= 0, "more tokens than letters"
        return ids[:count]

    def context(
        self,
        *,
        flash: bool = True,
        kind: int = 1,
        sequences: int = 1,
        unified: bool = True,
        room: int = 512,
        threads: int = 1,
    ) -> int:
        """A new context. `kind`: number of the type of K and V; `room`: in tokens, of all sequences."""
        params = self.library.llama_context_default_params()
        words = params.words
        assert (words[_FLASH], words[_TYPE_K], words[_TYPE_V], words[_N_SEQ_MAX]) == (-1, 1, 1, 1), "another xllamacpp"
        wanted = {_N_CTX: room, _N_SEQ_MAX: sequences, _FLASH: flash, _TYPE_K: kind, _TYPE_V: kind}
        for place, value in (wanted | dict.fromkeys(_THREADS, threads)).items():
            words[place] = value
        raw = bytearray(bytes(params))
        raw[_UNIFIED] = unified
        context = self.library.llama_init_from_model(self._model, _Params.from_buffer_copy(raw))
        assert context, "llama.cpp makes no such context"
        self._contexts.append(context)
        return int(context)

    def decode(self, context: int, tokens: Any) -> npt.NDArray[np.float32]:
        """Decode tokens of sequence 0 behind those that it has, and return the logits of the last."""
        ids = np.ascontiguousarray(tokens, np.int32)
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            batch = self.library.llama_batch_get_one(part.ctypes.data, len(part))
            assert self.library.llama_decode(context, batch) == 0, "llama.cpp does not decode them"
        found = np.ctypeslib.as_array(self.library.llama_get_logits_ith(context, -1), (self.vocabulary,))
        return found.copy()

    def free(self, context: int) -> None:
        self._contexts.remove(context)
        self.library.llama_free(context)

    def shift(self, context: int, sequence: int, by: int) -> None:
        self.library.llama_memory_seq_add(self.library.llama_get_memory(context), sequence, 0, -1, by)

    def cut(self, context: int, sequence: int, tokens: int) -> None:
        self.library.llama_memory_seq_rm(self.library.llama_get_memory(context), sequence, tokens, -1)

    def save_file(self, context: int, sequence: int, path: Path, tokens: Any) -> int:
        ids = np.ascontiguousarray(tokens, np.int32)
        return int(
            self.library.llama_state_seq_save_file(context, str(path).encode(), sequence, ids.ctypes.data, len(ids))
        )

    def load_file(self, context: int, sequence: int, path: Path, room: int) -> npt.NDArray[np.int32]:
        ids, count = np.zeros(room, np.int32), ctypes.c_size_t()
        read = self.library.llama_state_seq_load_file(
            context, str(path).encode(), sequence, ids.ctypes.data, room, ctypes.byref(count)
        )
        assert read, "llama.cpp does not take the file"
        return ids[: count.value]

    def close(self) -> None:
        for context in self._contexts:
            self.library.llama_free(context)
        self.library.llama_model_free(self._model)
