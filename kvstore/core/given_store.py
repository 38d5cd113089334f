"""Whether what a caller gives for a store is one."""

from __future__ import annotations

import os
from typing import Any

from kvstore.core.identity import ModelIdentity
from kvstore.errors import ConfigError


def check_store(store: Any, advice: str, wanted: str = "an open KVStore or SharedKVStore") -> None:
    """Check that an argument is a store whose calls are not awaited.

    Args:
        advice: what else to do.
        wanted: what it may be.

    Raises:
        ConfigError: it is something else; the message says what to do.

    Example:
        >>> check_store(7, "open one first")
        Traceback (most recent call last):
        kvstore.errors.ConfigError: store: expected an open KVStore or SharedKVStore, found int; open one first
    """
    if isinstance(getattr(store, "identity", None), ModelIdentity):
        return
    if hasattr(store, "store"):  # an AsyncKVStore, and whatever else has one
        advice = "give its `store`"
    found = repr(store) if isinstance(store, str | os.PathLike) else type(store).__name__
    raise ConfigError(f"store: expected {wanted}, found {found}; {advice}")
