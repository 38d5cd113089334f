"""The blosc2 library, imported at its first use."""

from __future__ import annotations

from typing import Any

from kvstore.core.forking import no_fork

_imported: Any = None


def blosc2() -> Any:
    """Return the library, which is told to release the GIL."""
    # It costs 0.3 s, and stores that need none of it shall not pay it. No process forks meanwhile: the child would wait
    # for ever for an import that a thread of the parent had begun.
    global _imported
    if _imported is None:
        with no_fork():
            import blosc2

            blosc2.set_releasegil(True)
            _imported = blosc2
    return _imported
