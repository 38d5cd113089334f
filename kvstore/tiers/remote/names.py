"""What values are called in the remote tier (FORMAT.md, "Remote values")."""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "kvs1"
_HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteNames:
    """The names of the values of one identity.

    Attributes:
        identity: digest of the identity that keys are made with.

    Example:
        >>> names = RemoteNames(bytes(32))
        >>> names.block(bytes([1] * 32))[:26], names.profile(bytes(16))[-40:]
        ('kvs1/0000000000000000/0101', 'profile/00000000000000000000000000000000')
        >>> names.key(names.block(bytes([1] * 32))) == bytes([1] * 32), names.key("kvs1/other")
        (True, None)
    """

    identity: bytes

    @property
    def prefix(self) -> str:
        """What all of them begin with."""
        return f"{PREFIX}/{self.identity[:8].hex()}/"

    def block(self, key: bytes) -> str:
        """Return the name of the record of a block."""
        return self.prefix + key.hex()

    def key(self, name: str) -> bytes | None:
        """Return the key of the block whose record has a name; None where it is no block of this identity."""
        last = name.removeprefix(self.prefix)
        return bytes.fromhex(last) if name.startswith(self.prefix) and _HEX.fullmatch(last) else None

    def profile(self, profile: bytes) -> str:
        """Return the name of a profile."""
        return f"{self.prefix}profile/{profile.hex()}"
