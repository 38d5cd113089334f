"""What is kept of a session: where its tokens are, so that it can be continued even when its cache was evicted.

The tokens stand in *texts* of `TEXT_TOKENS` tokens each, which sessions that begin alike share; what is left over
stands with the session itself (FORMAT.md, "Sessions"). Pure: values in, bytes out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np

from kvstore.core.tokens import Tokens

TEXT_TOKENS = 256
UNCOUNTED = (1 << 32) - 1  # references of a text that stays, for how many it has is not known
MAX_NAME_BYTES = 400  # LMDB takes keys of at most 511 bytes

_HEAD = struct.Struct("<QdddII32s16s")
_TEXT = struct.Struct("<16sI")
_TEXT_BYTES = _TEXT.size + 4 * TEXT_TOKENS
TEXT_KEY_BYTES = 16  # also what a session's key has of its namespace
_PINNED = 1
_MAX_SEQUENCE = 1 << 62  # what a store counts to; more would not fit when it counts on


@dataclass(frozen=True)
class SessionRecord:
    """A session with its tokens. Immutable.

    Attributes:
        name: the session's id.
        namespace: digest of its namespace, 32 bytes.
        tokens: `[n]` uint32.
        created, used: unix seconds.
        sequence: of two values of one session the greater is the newer.
        expiry: unix seconds, 0 for never.
        pinned: whether it is given up only when every session is pinned.
        hits: how often it was resumed.
        metadata: the user's, as `core.session_note.pack_metadata` makes it.

    Example:
        >>> record = SessionRecord("alice", bytes(32), np.arange(600, dtype=np.uint32), 0.0, 0.0, 1)
        >>> head = SessionHead.unpack(record.key, record.head().pack())
        >>> head.length, len(head.rest), len(record.texts())
        (600, 352, 2)
    """

    name: str
    namespace: bytes
    tokens: Tokens
    created: float
    used: float
    sequence: int
    expiry: float = 0.0
    pinned: bool = False
    hits: int = 0
    metadata: bytes = b""

    @property
    def key(self) -> bytes:
        """The catalog's key."""
        return session_key(self.namespace, self.name)

    def texts(self) -> list[tuple[bytes, bytes, bytes]]:
        """The texts that the session needs, the first of it first: (key, key of the one before, tokens)."""
        return list(_texts(self.namespace, self.tokens))

    def head(self, end: bytes | None = None) -> SessionHead:
        """What stands with the session. end: key of the last of `texts`, if it is known."""
        if end is None:
            end = next((key for key, _, _ in reversed(self.texts())), no_text(self.namespace))
        count = len(self.tokens)
        rest = self.tokens[count - count % TEXT_TOKENS :].astype("<u4", copy=False).tobytes()
        return SessionHead(
            self.name,
            self.namespace,
            count,
            rest,
            end,
            self.created,
            self.used,
            self.sequence,
            self.expiry,
            self.pinned,
            self.hits,
            self.metadata,
        )


class SessionHead(NamedTuple):
    """What the catalog keeps under a session's key: everything but the texts. Immutable.

    name, namespace, created, used, sequence, expiry, pinned: as of `SessionRecord`.
    hits, metadata: as of `SessionRecord`; they stand beside it, in its `SessionNote`.
    length: how many tokens the session has.
    rest: the tokens behind the last whole text, 4 bytes each, little-endian.
    end: key of the last text; `no_text` if the session has none.
    """

    name: str
    namespace: bytes
    length: int
    rest: bytes
    end: bytes
    created: float
    used: float
    sequence: int
    expiry: float
    pinned: bool
    hits: int = 0
    metadata: bytes = b""

    @property
    def key(self) -> bytes:
        """The catalog's key."""
        return session_key(self.namespace, self.name)

    def with_tokens(self, tokens: Tokens) -> SessionRecord:
        """The session with all its tokens."""
        return SessionRecord(
            self.name,
            self.namespace,
            tokens,
            self.created,
            self.used,
            self.sequence,
            self.expiry,
            self.pinned,
            self.hits,
            self.metadata,
        )

    def pack(self) -> bytes:
        """Return the bytes for the catalog (FORMAT.md, "Sessions")."""
        head = _HEAD.pack(
            self.sequence,
            self.created,
            self.used,
            self.expiry,
            self.length,
            _PINNED if self.pinned else 0,
            self.namespace,
            self.end,
        )
        return head + self.rest + self.name.encode()

    @classmethod
    def unpack(cls, key: bytes, data: bytes) -> SessionHead | None:
        """Read what `pack` wrote under `key`. Returns None if the bytes are anything else; never raises for any."""
        if len(data) < _HEAD.size:
            return None
        sequence, created, used, expiry, count, flags, namespace, end = _HEAD.unpack_from(data)
        behind = _HEAD.size + 4 * (count % TEXT_TOKENS)
        name = data[behind:]
        # The key repeats namespace and name: whatever is found under another key is another session, or damaged.
        if namespace[:TEXT_KEY_BYTES] + name != key or flags > _PINNED or sequence >= _MAX_SEQUENCE:
            return None
        if not count or not isfinite(created + used + expiry) or not 1 <= len(name) <= MAX_NAME_BYTES:
            return None
        if count < TEXT_TOKENS and end != no_text(namespace):
            return None
        try:
            text = name.decode()
        except UnicodeDecodeError:
            return None
        rest = data[_HEAD.size : behind]
        return cls(text, namespace, count, rest, end, created, used, sequence, expiry, flags == _PINNED)


@dataclass(frozen=True)
class SessionText:
    """`TEXT_TOKENS` tokens that one or more sessions have at the same place, behind the same tokens. Immutable.

    Attributes:
        before: key of the text before it; `no_text` for the first one.
        references: how many texts and sessions name it.
        tokens: 4 bytes each, little-endian.
    """

    before: bytes
    references: int
    tokens: bytes

    def pack(self) -> bytes:
        """Return the bytes for the catalog (FORMAT.md, "Sessions")."""
        return _TEXT.pack(self.before, self.references) + self.tokens

    @classmethod
    def unpack(cls, key: bytes, data: bytes) -> SessionText | None:
        """Read what `pack` wrote under `key`. Returns None if the bytes are anything else; never raises for any."""
        if len(data) != _TEXT_BYTES:
            return None
        before, references = _TEXT.unpack_from(data)
        tokens = data[_TEXT.size :]
        return cls(before, references, tokens) if text_key(before, tokens) == key else None

    def referred(self, change: int) -> SessionText:
        """The same text with so many references more, or fewer."""
        if self.references == UNCOUNTED:
            return self
        return SessionText(self.before, self.references + change, self.tokens)


@dataclass(frozen=True)
class SessionChange:
    """A change of a session, for the catalog. Immutable.

    Attributes:
        key: what `session_key` made.
        record: the session; None if it was deleted.
        sequence: order of changes.

    Example:
        >>> SessionChange(session_key(bytes(32), "alice"), record=None, sequence=3).record is None
        True
    """

    key: bytes
    record: SessionRecord | None
    sequence: int


def session_key(namespace: bytes, name: str) -> bytes:
    """Return the catalog's key of a session: 16 bytes of its namespace's digest, then its id.

    Raises:
        ValueError: the id is not text of 1 to 400 bytes.

    Example:
        >>> session_key(bytes(32), "alice")[16:]
        b'alice'
    """
    if not isinstance(name, str):
        raise ValueError(f"session: expected text, found {type(name).__name__}")
    try:
        key = name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"session: expected text that UTF-8 can hold, found {name!r}") from error
    if not 1 <= len(key) <= MAX_NAME_BYTES:
        raise ValueError(f"session: expected 1 to {MAX_NAME_BYTES} bytes, found {len(key)}")
    return namespace[:TEXT_KEY_BYTES] + key


def tokens_of(head: SessionHead, text: Callable[[bytes], SessionText | None]) -> Tokens | None:
    """Return all tokens of a session, `[n]`, read-only; None if a text is missing.

    Args:
        text: gives the text of a key.
    """
    parts, key = [head.rest], head.end
    for _ in range(head.length // TEXT_TOKENS):
        found = text(key)
        if found is None:
            return None
        parts.append(found.tokens)
        key = found.before
    return np.frombuffer(b"".join(reversed(parts)), "<u4") if key == no_text(head.namespace) else None


def no_text(namespace: bytes) -> bytes:
    """Return what stands before the first text of a namespace, in place of a key."""
    return namespace[:TEXT_KEY_BYTES]


def text_key(before: bytes, tokens: bytes) -> bytes:
    """Return the key of a text: it follows from the tokens, and from all tokens before them."""
    return hashlib.sha256(before + tokens).digest()[:TEXT_KEY_BYTES]


def _texts(namespace: bytes, tokens: Tokens) -> Iterator[tuple[bytes, bytes, bytes]]:
    before, data = no_text(namespace), tokens.astype("<u4", copy=False).tobytes()
    size = 4 * TEXT_TOKENS
    for start in range(0, len(data) - len(data) % size, size):
        part = data[start : start + size]
        key = text_key(before, part)
        yield key, before, part
        before = key
