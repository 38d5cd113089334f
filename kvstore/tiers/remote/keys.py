"""Which strings are keys of remote values: the same for all engines, so that a value can move from one to another."""

from __future__ import annotations

import re

MAX_KEY = 512
_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*", re.ASCII)


def is_key(name: str) -> bool:
    """Return whether a string is a key, see `RemoteEngine`.

    Example:
        >>> [is_key(x) for x in ("kvs1/ab/cd", "a..b", "a/../b", "/a", "a//b", "", "a b")]
        [True, True, False, False, False, False, False]
    """
    return len(name) <= MAX_KEY and _KEY.fullmatch(name) is not None


def check_keys(*keys: str) -> None:
    """Raise ValueError for the first of them that is no key."""
    for key in keys:
        if not is_key(key):
            raise ValueError(f"key: expected 1-{MAX_KEY} of A-Z a-z 0-9 . _ - in parts between slashes, found {key!r}")


def check_prefix(prefix: str) -> None:
    """Raise ValueError if no key can start so."""
    if len(prefix) > MAX_KEY or _PREFIX.fullmatch(prefix) is None:
        raise ValueError(f"prefix: expected at most {MAX_KEY} of A-Z a-z 0-9 . _ - /, found {prefix!r}")
