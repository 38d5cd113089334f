"""What a test depends on beside its code: chance, several threads, processes of its own. `make test-repeat` runs these.

A test is of a kind where it, a fixture of it, or a helper that one of them calls names one of the signs. What the
product itself does with threads is not looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import is_hypothesis_test
from hypothesis.stateful import RuleBasedStateMachine

TESTS = Path(__file__).parents[1]
SIGNS = {
    "threads": {"threading", "Thread", "ThreadPoolExecutor"},
    "processes": {"subprocess", "fork", "Popen"},
    "random": {"seeds"},
}


def kinds_of(item: pytest.Item) -> set[str]:
    function = getattr(item, "obj", None)
    fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    named = [definition.func for found in fixtures.values() for definition in found]
    found = set().union(*(_kinds(inspect.unwrap(one)) for one in (function, *named) if _is_ours(one)))
    machine = getattr(function, "__self__", None)  # `TestCase` of a state machine
    if is_hypothesis_test(function) or hasattr(machine, "settings"):
        found.add("random")
    return found


@cache
def _kinds(start: Any) -> frozenset[str]:
    """Of a function or class and of whatever else in tests/ it names."""
    found, seen, left = set[str](), {start}, [start]
    while left:
        for name, value in _names(left.pop()):
            found |= {kind for kind, signs in SIGNS.items() if name in signs}
            if isinstance(value, type) and issubclass(value, RuleBasedStateMachine):
                found.add("random")
            if _is_ours(value) and value not in seen:
                seen.add(value)
                left.append(value)
    return frozenset(found)


def _is_ours(value: Any) -> bool:
    if not isinstance(value, FunctionType | type):
        return False
    module = inspect.getmodule(value)
    return module is not None and str(getattr(module, "__file__", "")).startswith(str(TESTS))


def _names(value: Any) -> Iterator[tuple[str, Any]]:
    """Names in the code of a function, or of the functions of a class, with what they stand for."""
    functions = [f for f in vars(value).values() if isinstance(f, FunctionType)] if isinstance(value, type) else [value]
    if isinstance(value, type):
        yield from ((base.__name__, base) for base in value.__mro__[1:])
    for function in functions:
        yield from _names_in(function.__code__, function.__globals__)


def _names_in(code: CodeType, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    modules = [values[name] for name in code.co_names if isinstance(values.get(name), ModuleType)]
    for name in code.co_names:
        yield name, values.get(name)
        yield from ((name, vars(module)[name]) for module in modules if name in vars(module))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant, values)
