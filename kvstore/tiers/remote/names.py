"""What values are called in the remote tier (FORMAT.md, "Remote values").

Inside of a store a value goes by bytes: the key of a block, 32 bytes, and behind it in ASCII what else is told apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "kvs1"
KEY_BYTES = 32
_PLACE, _MARK, _PARCEL = b".place", b".mark", b".parcel"
PARCEL = ".parcel"
_VALUE = re.compile(r"([0-9a-f]{64})((?:-[0-9a-f]{1,8}s?|\.place|\.mark|\.parcel)?)", re.ASCII)


def part_of(key: bytes, cut: int, has_states: bool) -> bytes:
    """Return what the record of a block goes by, which lacks some tokens of windows, or has states.

    Example:
        >>> part_of(b"k" * 32, 0, False) == b"k" * 32, part_of(b"k" * 32, 500, True)[32:]
        (True, b'-1f4s')
    """
    return key + (b"-%x%s" % (cut, b"s" * has_states) if cut or has_states else b"")


def place_of(key: bytes) -> bytes:
    """Return what the place at the end of a block goes by."""
    return key + _PLACE


def mark_of(key: bytes) -> bytes:
    """Return what the mark goes by which says that there are places in blocks that follow this one."""
    return key + _MARK


def parcel_of(key: bytes) -> bytes:
    """Return what the parcel goes by whose first record is that of this block."""
    return key + _PARCEL


def split(name: str) -> tuple[bytes, str] | None:
    """Return the key in the last part of a name, and what stands behind it; None for other names.

    Example:
        >>> split("kvs1/00/" + "ab" * 32 + ".place")[1]
        '.place'
    """
    found = _VALUE.fullmatch(name.rpartition("/")[2])
    return None if found is None else (bytes.fromhex(found[1]), found[2])


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

    def block(self, value: bytes) -> str:
        """Return the name of what goes by these bytes."""
        return self.prefix + value[:KEY_BYTES].hex() + value[KEY_BYTES:].decode("ascii")

    def key(self, name: str) -> bytes | None:
        """Return what a value with this name goes by; None where it is not of this identity, or is a profile."""
        found = split(name) if name.startswith(self.prefix) else None
        return None if found is None or "/" in name.removeprefix(self.prefix) else found[0] + found[1].encode()

    def profile(self, profile: bytes) -> str:
        """Return the name of a profile."""
        return f"{self.prefix}profile/{profile.hex()}"
