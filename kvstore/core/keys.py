"""Keys of blocks: a SHA-256 chain over identity, namespace and tokens (FORMAT.md, "Identity and keys")."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kvstore.core.tokens import Tokens

MAX_NAMESPACE_BYTES = 4096


class NamespaceDigest(bytes):
    """What stands for a namespace whose name is not known: 32 bytes, as an inventory of a store names it.

    Example:
        >>> namespace_digest(NamespaceDigest(bytes(32))) == bytes(32)
        True
    """


def namespace_bytes(namespace: str | bytes) -> bytes:
    """Return the bytes of a namespace: of text its UTF-8.

    Raises:
        ValueError: it is neither text that UTF-8 can hold nor bytes.

    Example:
        >>> namespace_bytes("tenant-1")
        b'tenant-1'
    """
    if isinstance(namespace, str):
        try:
            return namespace.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"namespace: expected text that UTF-8 can hold, found {namespace!r}") from error
    if not isinstance(namespace, bytes | bytearray | memoryview):
        raise ValueError(f"namespace: expected text or bytes, found {type(namespace).__name__}")
    return bytes(namespace)


def namespace_digest(namespace: str | bytes) -> bytes:
    """Return 32 bytes that stand for a namespace.

    Args:
        namespace: at most 4096 bytes, or text, which stands for its UTF-8 bytes; a `NamespaceDigest` stands for itself.

    Raises:
        ValueError: the namespace is too long, or neither text nor bytes.

    Example:
        >>> namespace_digest("tenant-1") == namespace_digest(b"tenant-1")
        True
    """
    data = namespace_bytes(namespace)
    if isinstance(namespace, NamespaceDigest):
        if len(data) != 32:
            raise ValueError(f"namespace: a digest has 32 bytes, found {len(data)}")
        return data
    if len(data) > MAX_NAMESPACE_BYTES:
        raise ValueError(f"namespace: expected at most {MAX_NAMESPACE_BYTES} bytes, found {len(data)}")
    return hash_fields(b"namespace", data)


def chain_root(identity: bytes, namespace: bytes, block_tokens: int) -> bytes:
    """Return the key before the first block, 32 bytes.

    Args:
        identity: `ModelIdentity.digest`.
        namespace: what `namespace_digest` made.
        block_tokens: tokens of a full block.
    """
    return hash_fields(b"kvstore/1", identity, namespace, block_tokens.to_bytes(4, "little"))


def chain_key(parent: bytes, tokens: Tokens) -> bytes:
    """Return the key, 32 bytes, of the block `tokens` that follows the block with key `parent`."""
    return _follow(parent, tokens.astype("<u4", copy=False).tobytes())


def chain_keys(root: bytes, tokens: Tokens, block_tokens: int) -> Iterator[bytes]:
    """Yield the keys of all blocks of `tokens`, the partial last one (the tail) included.

    Example:
        >>> import numpy as np
        >>> root = chain_root(bytes(32), namespace_digest(b""), 64)
        >>> len(list(chain_keys(root, np.arange(100, dtype=np.uint32), 64)))
        2
    """
    key, width = root, 4 * block_tokens
    data = tokens.astype("<u4", copy=False).tobytes()
    for start in range(0, len(data), width):
        key = _follow(key, data[start : start + width])
        yield key


def _follow(parent: bytes, data: bytes) -> bytes:
    # One length-prefixed field after a fixed 32 bytes: no two inputs give the same bytes to hash.
    return hashlib.sha256(parent + len(data).to_bytes(8, "little") + data).digest()


def hash_fields(*parts: bytes) -> bytes:
    """Return SHA-256 over the parts, each behind its length: no two lists of parts give the same bytes to hash."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
