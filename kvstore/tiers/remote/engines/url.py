"""URLs of engines that take their settings in the query: SCHEME://HOST[:PORT][/PATH][?NAME=VALUE&...]."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import ConfigError


class EngineURL(NamedTuple):
    """What an engine's URL says.

    Attributes:
        host: without its port, in small letters.
        port: None where the URL names none.
        path: without slashes at its ends.
        settings: of the query; of a name given twice, the last.
    """

    host: str
    port: int | None
    path: str
    settings: dict[str, str]


def parse_engine_url(url: str, known: Collection[str], form: str) -> EngineURL:
    """Split an engine's URL.

    Args:
        known: the names that may be in the query.
        form: how the URL should look, for the error.

    Raises:
        ConfigError: the URL has no host, has a user or a fragment, its port is no port, or its query has another name.

    Example:
        >>> parse_engine_url("s3://bucket/a%20b/?region=here", {"region"}, "s3://BUCKET")
        EngineURL(host='bucket', port=None, path='a b', settings={'region': 'here'})
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        query = parse_qs(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise ConfigError(f"expected {form}: {error}") from error
    if not parts.hostname or set(query) - set(known) or parts.username or parts.fragment:
        raise ConfigError(f"expected {form}")
    path = unquote(parts.path.strip("/"))
    return EngineURL(parts.hostname, port, path, {name: values[-1] for name, values in query.items()})
