"""Triton's interpreter, without what it does again at every call of a function: it searches its whole language for what
to replace, and puts that back. In a process that only interprets, once is enough, and takes half the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """Replaces, for the rest of the process, what the interpreter replaces for a call that sees all of the language."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()

    find, known = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = np_dtype
