"""Checks of plain arguments that several calls of a store take."""

from __future__ import annotations

import os
import time
from typing import Any

from kvstore.core.tensors import as_array
from kvstore.errors import ConfigError, LayoutMismatch

_FOR_EVER = 1e12  # seconds: ten thousand years


def check_integer(name: str, value: int | None, least: int, most: int | None = None) -> int | None:
    """Return `value` if it is None or an integer from `least` to `most`.

    Raises:
        ValueError: it is anything else; the message begins with `name`.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name}: expected an integer of at least {least}, found {value!r}")
    if value is not None and most is not None and value > most:
        raise ValueError(f"{name}: expected at most {most}, found {value}")
    return value


def check_kind(name: str, value: Any, kind: type, advice: str) -> None:
    """Check that an argument is of a class; `advice` says how to make one.

    Raises:
        ConfigError: it is of another; the message begins with `name`.

    Example:
        >>> check_kind("shape", "3x4", tuple, "write (3, 4)")
        Traceback (most recent call last):
        ...
        kvstore.errors.ConfigError: shape: expected a tuple, found '3x4'; write (3, 4)
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected a {kind.__name__}, found {_short(value)}; {advice}")


def end_of_life(ttl: float | None) -> float:
    """Return when `ttl` seconds from now are over, in unix seconds; 0 for never, if `ttl` is None.

    Raises:
        ValueError: `ttl` is not a number above 0 and below 10**12.
    """
    if ttl is None:
        return 0.0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < _FOR_EVER:
        raise ValueError(f"ttl: expected 0 < seconds < {_FOR_EVER:.0e}, or None for no end, found {_short(ttl)}")
    return time.time() + ttl


def as_folder(path: Any) -> str:
    """Return the absolute path that `path` (text, bytes or a `Path`) names, `~` and symbolic links replaced.

    Raises:
        ConfigError: it cannot be the name of a folder.

    Example:
        >>> as_folder("/var/./kv")
        '/var/kv'
    """
    try:
        text = os.fsdecode(path)
        if not text:
            raise ValueError("it is empty")
        text.encode()  # LMDB takes nothing but UTF-8
        return os.path.realpath(os.path.expanduser(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"path: expected the name of a folder, found {path!r}: {error}") from error


def as_numbers(name: str, values: Any) -> Any:
    """Return a tensor as an array on the CPU, and anything else as it is.

    Raises:
        ValueError: the tensor has no memory of its own; the message begins with `name`.
    """
    try:
        return as_array(values) if hasattr(values, "detach") else values
    except LayoutMismatch as error:
        raise ValueError(f"{name}: {error}") from error


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a larger number"
    return text if len(text) < 100 else f"{text[:100]}..."
