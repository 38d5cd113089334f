"""Functions around every pass of a model, outside of what torch.compile makes of it.

A forward hook belongs to the module's call, which `model.compile()` compiles as a whole: what a hook does is traced
then, and breaks the model's graphs. Of such a model the compiled call itself is replaced while someone looks, by one
that calls it between the functions. Of all others they are forward hooks; a compiled `model.forward` lies inside of
these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.integrations.transformers.adapters import bare

__all__ = ["around", "has_compiled_call", "is_compiled"]

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
After = Callable[..., None]
_CALL = "_compiled_call_impl"  # where `torch.nn.Module.compile` puts the compiled call; torch never copies or saves it


@contextmanager
def around(
    model: Any, before: Before | None = None, after: After | None = None, *, first: bool = False
) -> Iterator[None]:
    """Inside the block, call functions around each pass of a model, in all threads. Thread-safe.

    Args:
        model: a transformers model; one wrapped by `torch.compile` or peft is fine.
        before: called with (model, args, kwargs); returns None, or the (args, kwargs) that the pass takes.
        after: called with (model, args, kwargs, output). Where the model is not compiled, passes of other threads that
            run when the block begins or ends may call it without `output`.
        first: call `after` before those that are there.

    Example:
        >>> import torch
        >>> model, seen = torch.nn.Linear(2, 1), []
        >>> with around(model, after=lambda model, args, kwargs, output: seen.append(list(output.shape))):
        ...     output = model(torch.zeros(3, 2))
        >>> seen
        [[3, 1]]
    """
    model = bare(model)
    if has_compiled_call(model):
        with _around_call(model, before, after, first):
            yield
        return
    with contextlib.ExitStack() as hooks:
        if before is not None:
            hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        if after is not None:
            hooks.callback(model.register_forward_hook(after, with_kwargs=True, prepend=first).remove)
        yield


def has_compiled_call(model: Any) -> bool:
    """Return whether `model.compile()` was called, so that forward hooks are compiled, too. model: a bare one."""
    return vars(model).get(_CALL) is not None


def is_compiled(model: Any) -> bool:
    """Return whether torch.compile made something of a model, or of one of its modules.

    Example:
        >>> import torch
        >>> is_compiled(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        False
    """
    stack = [model]
    while stack:
        own = vars(stack.pop())
        forward = own.get("forward")  # one of its own stands before that of its class
        if own.get(_CALL) is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            return True
        modules = own.get("_modules", {})
        if "_orig_mod" in modules:
            return True
        stack += [module for module in modules.values() if module is not None]
    return False


class _Call:
    """The compiled call of a model, between functions of those who look at its passes.

    Attributes:
        compiled: the call.
        before, after: replaced, never changed, for passes of other threads go through them.
    """

    def __init__(self, model: Any, compiled: Any) -> None:
        self._model = model
        self.compiled = compiled
        self.before: tuple[Before, ...] = ()
        self.after: tuple[After, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, after = self.before, self.after
        for function in before:
            args, kwargs = function(self._model, args, kwargs) or (args, kwargs)
        output = self.compiled(*args, **kwargs)
        for function in after:
            function(self._model, args, kwargs, output)
        return output


_entering = threading.Lock()
_calls: dict[Any, _Call] = {}  # of the models that someone looks at now


@contextmanager
def _around_call(model: Any, before: Before | None, after: After | None, first: bool) -> Iterator[None]:
    with _entering:
        call = _calls.get(model)
        if call is None or vars(model)[_CALL] is not call:  # compiled anew meanwhile
            call = _calls[model] = _Call(model, vars(model)[_CALL])
            setattr(model, _CALL, call)
        if before is not None:
            call.before = (*call.before, before)
        if after is not None:
            call.after = (after, *call.after) if first else (*call.after, after)
    try:
        yield
    finally:
        with _entering:
            call.before = _without(call.before, before)
            call.after = _without(call.after, after)
            if not (call.before or call.after) and _calls.get(model) is call:
                del _calls[model]
                if vars(model).get(_CALL) is call:
                    setattr(model, _CALL, call.compiled)


def _without(functions: tuple[Any, ...], one: Any) -> tuple[Any, ...]:
    """All functions but one; of equal ones, as several threads enter them, one stays less."""
    if one is None:
        return functions
    at = functions.index(one)
    return functions[:at] + functions[at + 1 :]
