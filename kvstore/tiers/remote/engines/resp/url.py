"""What stands in the URL of a server, or of a cluster."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.resp.address import Address
from kvstore.tiers.remote.engines.resp.cluster import ClusterEngine
from kvstore.tiers.remote.engines.resp.connection import Login
from kvstore.tiers.remote.engines.resp.engine import RespEngine

_PORT = 6379
_TLS = ("valkeys", "rediss")


def open_resp(url: str, *, tls_context: ssl.SSLContext | None = None, **settings: Any) -> RemoteEngine:
    """Open the engine of a `valkey://` or `redis://` URL; `valkeys://` and `rediss://` are with TLS, and `+cluster`
    behind any of these names is a cluster, of which one or more nodes are named.

    Args:
        tls_context: with TLS, instead of the system's certificates.
        settings: see `RespEngine`.

    Raises:
        ConfigError: something in the URL is not as it should be. The message shows no password.
    """
    scheme, _, rest = url.partition("://")
    kind, _, cluster = scheme.partition("+")
    login, _, places = rest.rpartition("@")
    places, _, database = places.partition("/")
    # What was found is not shown: it may have a password in the wrong place.
    form = f"expected {scheme}://[[USER]:PASSWORD@]HOST[:PORT]{',HOST:PORT...' if cluster else '[/DATABASE]'}"
    if not places or (database and (cluster or not database.isdecimal())):
        raise ConfigError(form)
    addresses = [_address(place, form) for place in places.split(",")]
    user, _, password = login.partition(":")
    known = Login(unquote(user), unquote(password), int(database or 0))
    tls = (tls_context or ssl.create_default_context()) if kind in _TLS else None
    if cluster:
        return ClusterEngine(addresses, known, tls, **settings)
    if len(addresses) != 1:
        raise ConfigError(f"{form}, found {len(addresses)} servers; of a cluster it is {kind}+cluster://")
    return RespEngine(addresses[0], known, tls, **settings)


def _address(place: str, form: str) -> Address:
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        raise ConfigError(form) from None
    if not host or parts.query or parts.fragment or parts.path:
        raise ConfigError(form)
    return Address(host, port)
