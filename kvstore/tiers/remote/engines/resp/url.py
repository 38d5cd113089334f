"""What stands in the URL of a server."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.resp.address import Address
from kvstore.tiers.remote.engines.resp.connection import Login
from kvstore.tiers.remote.engines.resp.engine import RespEngine

_PORT = 6379


def open_resp(url: str, *, tls_context: ssl.SSLContext | None = None, **settings: Any) -> RemoteEngine:
    """Open the engine of a `valkey://`, `redis://`, `valkeys://` or `rediss://` URL.

    Args:
        tls_context: with TLS, instead of the system's certificates.
        settings: see `RespEngine`.

    Raises:
        ConfigError: something in the URL is not as it should be. The message shows no password.
    """
    scheme, _, rest = url.partition("://")
    hidden = f"{scheme}://...{rest[rest.rfind('@') :] if '@' in rest else rest}"
    try:
        parts = urlsplit(url)
        host, port, database = parts.hostname, parts.port or _PORT, int(parts.path.strip("/") or 0)
    except ValueError as error:
        raise ConfigError(f"{hidden}: {error}") from None
    if not host or parts.query or parts.fragment or database < 0:
        raise ConfigError(f"{hidden}: expected {scheme}://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]")
    login = Login(unquote(parts.username or ""), unquote(parts.password or ""), database)
    tls = (tls_context or ssl.create_default_context()) if scheme in ("valkeys", "rediss") else None
    return RespEngine(Address(host, port), login, tls, **settings)
