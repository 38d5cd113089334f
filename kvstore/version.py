"""The version of this package, and of those that it works with."""

from importlib import metadata

__version__ = "0.1.0"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of kvstore and of these packages, as a profile names those that made it.

    Example:
        >>> list(versions("numpy"))
        ['kvstore', 'numpy']
    """
    return {"kvstore": __version__, **{name: metadata.version(name) for name in packages}}
