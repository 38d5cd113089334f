"""What values are called in the remote tier (FORMAT.md, "Remote values")."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "kvs1"


@dataclass(frozen=True)
class RemoteNames:
    """The names of the values of one identity.

    Attributes:
        identity: digest of the identity that keys are made with.

    Example:
        >>> names = RemoteNames(bytes(32))
        >>> names.block(bytes([1] * 32))[:26], names.profile(bytes(16))[-40:]
        ('kvs1/0000000000000000/0101', 'profile/00000000000000000000000000000000')
    """

    identity: bytes

    @property
    def prefix(self) -> str:
        """What all of them begin with."""
        return f"{PREFIX}/{self.identity[:8].hex()}/"

    def block(self, key: bytes) -> str:
        """Return the name of the record of a block."""
        return self.prefix + key.hex()

    def profile(self, profile: bytes) -> str:
        """Return the name of a profile."""
        return f"{self.prefix}profile/{profile.hex()}"
