"""Triton's interpreter, without what it does for nothing. At every call of a function it searches its whole language
for what to replace, and puts that back: in a process that only interprets, once is enough, and takes half the time.
And it computes whether sums and products overflow, but looks at that only where `debug` is set: a third of the rest.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """Replaces, for the rest of the process, what the interpreter replaces for a call that sees all of the language."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    find, known = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = np_dtype
