"""What was freed goes back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None
    return trim


_malloc_trim = _find()


def give_back_freed() -> bool:
    """Give memory that was freed back to the system; the C library keeps it for later otherwise.

    Takes milliseconds, so it is for after work that took much more memory than what it leaves.

    Returns:
        False where the C library cannot do that (it is not glibc) or had nothing to give.

    Example:
        >>> given = give_back_freed()
    """
    return _malloc_trim is not None and _malloc_trim(0) == 1
