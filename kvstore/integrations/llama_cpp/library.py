"""The functions of llama.cpp's library that save and restore sequences, called by ctypes.

Only functions that take pointers and numbers are called: the structures that contexts are made with change from version
to version.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import ConfigError, UnsupportedCache
from kvstore.integrations.llama_cpp.state import Bytes

_POINTER, _SIZE, _INT, _TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_seq_pos_max": (_INT, [_POINTER, _INT]),
    "llama_memory_seq_rm": (ctypes.c_bool, [_POINTER, _INT, _INT, _INT]),
    "llama_n_ctx": (ctypes.c_uint32, [_POINTER]),
    "llama_n_seq_max": (ctypes.c_uint32, [_POINTER]),
    "llama_state_seq_get_size": (_SIZE, [_POINTER, _INT]),
    "llama_state_seq_get_data": (_SIZE, [_POINTER, _POINTER, _SIZE, _INT]),
    "llama_state_seq_set_data": (_SIZE, [_POINTER, _POINTER, _SIZE, _INT]),
    "llama_state_seq_save_file": (_SIZE, [_POINTER, _TEXT, _INT, _POINTER, _SIZE]),
}


class Library:
    """llama.cpp's library. As thread-safe as that: calls for one context must not overlap. The GIL is released in them.

    Args:
        library: a `ctypes.CDLL` (llama-cpp-python: `llama_cpp.llama_cpp._lib`), or the path of a shared library that
            has llama.cpp's C functions; None: that of the package xllamacpp.

    Raises:
        ConfigError: the library cannot be loaded, or it lacks a function.
        ModuleNotFoundError: no library is given, and xllamacpp is not installed.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None or isinstance(library, str | bytes | os.PathLike):
            path = installed_library() if library is None else os.fsdecode(library)
            try:
                library = ctypes.CDLL(path)
            except OSError as error:
                raise ConfigError(f"library: {path} cannot be loaded: {error}") from error
        # another handle of the same library: the declarations of functions belong to a handle
        handle = ctypes.CDLL(None, handle=library._handle)
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(handle, name)
            except AttributeError as error:
                raise ConfigError(f"library: it has no function {name}; is it llama.cpp's?") from error
            function.restype, function.argtypes = result, arguments
        self._library, self._calls = library, handle

    def room(self, context: int) -> int:
        """Return how many tokens a context has room for."""
        return int(self._calls.llama_n_ctx(context))

    def sequences(self, context: int) -> int:
        """Return how many sequences a context may hold."""
        return int(self._calls.llama_n_seq_max(context))

    def length(self, context: int, sequence: int) -> int:
        """Return the last position of a sequence, and 1; 0 of an empty one."""
        return int(self._calls.llama_memory_seq_pos_max(self._calls.llama_get_memory(context), sequence)) + 1

    def clear(self, context: int, sequence: int) -> None:
        """Empty a sequence."""
        self._calls.llama_memory_seq_rm(self._calls.llama_get_memory(context), sequence, -1, -1)

    def state(self, context: int, sequence: int) -> Bytes:
        """Return the state of a sequence, with the magic and the number before it.

        Raises:
            UnsupportedCache: llama.cpp gives none; its log says why.
        """
        out = np.empty(self._calls.llama_state_seq_get_size(context, sequence), np.uint8)
        size = self._calls.llama_state_seq_get_data(context, out.ctypes.data, len(out), sequence)
        if not 0 < size <= len(out):
            raise UnsupportedCache("llama.cpp gave no state of the sequence; its log says why")
        return out[:size]

    def set_state(self, context: int, sequence: int, state: Bytes) -> bool:
        """Replace a sequence by a state, and return whether llama.cpp took it; if not, the sequence is empty."""
        read = self._calls.llama_state_seq_set_data(context, state.ctypes.data, len(state), sequence)
        return int(read) == len(state)

    def file_head(self, context: int, sequence: int) -> bytes:
        """Return the first bytes of the file that llama.cpp writes of a sequence without tokens: magic, version, ..."""
        descriptor = os.memfd_create("kvstore-llama-state")
        try:
            path = f"/proc/self/fd/{descriptor}".encode()
            self._calls.llama_state_seq_save_file(context, path, sequence, None, 0)
            return os.pread(descriptor, 4096, 0)
        finally:
            os.close(descriptor)


def installed_library() -> str:
    """Return the path of the library in the package xllamacpp, which is not imported: its module and that of blosc2
    cannot be in one process.

    Raises:
        ModuleNotFoundError: xllamacpp is not installed.
    """
    found = find_spec("xllamacpp")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        for path in sorted(Path(folder).glob("xllamacpp*.so")):
            return str(path)
    what = "no library is given, and xllamacpp is not installed; pip install 'kvstore-lm[llama]'"
    raise ModuleNotFoundError(what, name="xllamacpp")
