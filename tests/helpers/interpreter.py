"""Triton's interpreter, without what it does for nothing. At every call of a function it searches its whole language
for what to replace, and puts that back: in a process that only interprets, once is enough, and takes half the time.
And it computes whether sums and products overflow, but looks at that only where `debug` is set: a third of the rest.
Types and shapes it makes anew at every operation: those that are equal share them here, two fifths of what is left.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
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
    _unwrap_by_class()
    _share_types()
    _share_shapes()


def _unwrap_by_class() -> None:
    """Most of what is asked for its constant is none, or is one: `isinstance` is not needed to see that."""
    unwrap, constexpr = tl.core._unwrap_if_constexpr, tl.constexpr
    plain = {int, bool, float, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is constexpr else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrapped


def _share_types() -> None:
    """Blocks of one shape have one list of sizes, by which they are known to need no broadcast, and those of one type
    one name."""
    make, known, shapes = tl.block_type.__init__, dict[Any, dict[str, Any]](), dict[Any, Any]()

    def init(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(map(tl.core._unwrap_if_constexpr, shape))
        key = element_ty.name, sizes
        if key not in known:
            make(self, element_ty, shape)
            shared = shapes.setdefault(sizes, self.shape)
            known[key] = {"shape": shared, "numel": self.numel, "name": self.name}
        self.__dict__.update(known[key])
        self.element_ty = element_ty

    tl.block_type.__init__ = init

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        shape = getattr(lhs.type, "shape", None)
        is_needed = shape is None or shape is not getattr(rhs.type, "shape", None)
        return broadcast(self, lhs, rhs) if is_needed else (lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _share_shapes() -> None:
    """Tensors of one shape have one list of its constants."""
    make, known = tl.tensor.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, handle: Any, dtype: Any) -> None:
        key = tuple(dtype.shape.values) if dtype.is_block() else ()
        if key not in known:
            make(self, handle, dtype)
            known[key] = {name: self.__dict__[name] for name in ("shape", "numel")}
        self.__dict__.update(known[key])
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar

    tl.tensor.__init__ = init
