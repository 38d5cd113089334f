"""Checks of plain arguments that several calls of a store take."""

from __future__ import annotations

import time
from typing import Any


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


def end_of_life(ttl: float | None) -> float:
    """Return when `ttl` seconds from now are over, in unix seconds; 0 for never, if `ttl` is None.

    Raises:
        ValueError: `ttl` is not a finite number above 0.
    """
    if ttl is None:
        return 0.0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < float("inf"):
        raise ValueError(f"ttl: expected seconds > 0, found {ttl!r}")
    return time.time() + ttl


def as_floats(values: Any) -> Any:
    """Return a tensor as a float32 array on the CPU, and anything else as it is."""
    return values.detach().float().cpu().numpy() if hasattr(values, "detach") else values
