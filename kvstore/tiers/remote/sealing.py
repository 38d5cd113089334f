"""Sealed values: what does not know the fleet key can neither read a record nor make one (FORMAT.md, "Remote values").

A checksum shows damage, no forgery. Sealed, a value also says under which name it was written, so that none can be
replayed in the place of another.
"""

from __future__ import annotations

import hashlib
import os

from kvstore.core.record import Damage, DamagedRecord
from kvstore.errors import ConfigError

MAGIC = b"KVSTSEA1"
KEY_BYTES = 32
_ID, _NONCE, _TAG = 8, 12, 16
BEGIN = len(MAGIC) + _ID + _NONCE
OVERHEAD = BEGIN + _TAG


class Sealer:
    """Seals and opens values with AES-256-GCM. Thread-safe.

    Args:
        key: 32 bytes, the same in the whole fleet.

    Raises:
        ConfigError: the key has another length, or the package cryptography is missing.

    Example:
        >>> parts = Sealer(bytes(32)).seal("kvs1/a", memoryview(b"record"))
        >>> value = bytearray(b"".join(parts))
        >>> bytes(Sealer(bytes(32)).opened("kvs1/a", memoryview(value)))
        b'record'
    """

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise ConfigError("remote.key: needs the package cryptography; pip install 'kvstore-lm[remote]'") from error
        if len(key) != KEY_BYTES:
            raise ConfigError(f"remote.key: expected {KEY_BYTES} bytes, found {len(key)}")
        self._cipher = AESGCM(key)
        self._key_id = hashlib.sha256(b"kvstore fleet key" + key).digest()[:_ID]

    def seal(self, name: str, data: memoryview | bytes) -> list[bytes]:
        """Return the parts of the sealed value that is to be written under `name`."""
        nonce = os.urandom(_NONCE)
        return [MAGIC + self._key_id + nonce, self._cipher.encrypt(nonce, data, name.encode())]

    def opened(self, name: str, value: memoryview) -> bytes:
        """Return what was sealed under `name`.

        Raises:
            DamagedRecord: it was not sealed under that name with this key.
        """
        from cryptography.exceptions import InvalidTag

        if len(value) < OVERHEAD or value[: len(MAGIC)] != MAGIC:
            raise DamagedRecord(Damage.MAGIC, "the value is not sealed")
        if value[len(MAGIC) : len(MAGIC) + _ID] != self._key_id:
            raise DamagedRecord(Damage.FIELD, "the value is sealed with another fleet key")
        try:
            return self._cipher.decrypt(bytes(value[BEGIN - _NONCE : BEGIN]), value[BEGIN:], name.encode())
        except InvalidTag:
            raise DamagedRecord(Damage.PAYLOAD_SUM, "the value is forged, damaged, or was written elsewhere") from None


def key_from(data: bytes) -> bytes:
    """Return the key that a file holds: its bytes, or 64 hex digits.

    Raises:
        ConfigError: it holds none.
    """
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode().strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"remote.key: expected a file of {KEY_BYTES} bytes, or of {2 * KEY_BYTES} hex digits")
    return key
