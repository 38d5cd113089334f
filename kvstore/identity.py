"""Who made a cache: everything that changes its contents is part of every key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

Tokens = npt.NDArray[np.uint32]
MAX_NAMESPACE_BYTES = 4096


@dataclass(frozen=True)
class ModelIdentity:
    """The model whose caches a store holds. A store refuses to open with an identity that differs in any field.

    Attributes:
        model, revision: names, as the user knows them.
        weights: fingerprint of the weights.
        tokenizer: fingerprint of the tokenizer, "" if tokens are made elsewhere.
        layout: shapes, dtype and positions of the caches.
        codec_family: "exact", or the name of a lossy family, whose caches must not mix with exact ones.
        shard: "rank/size" of tensor-parallel parts.

    Raises:
        ConfigError: names the field that has the wrong type.

    Example:
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> other = ModelIdentity("my-model", "main", "weights-2", "", KVLayout.uniform(2, 4, 16))
        >>> identity.difference(other.fields())
        "weights: stored 'weights-2', given 'weights-1'"
    """

    model: str
    revision: str
    weights: str
    tokenizer: str
    layout: KVLayout
    codec_family: str = "exact"
    shard: str = "0/1"

    def __post_init__(self) -> None:
        for name in ("model", "revision", "weights", "tokenizer", "codec_family", "shard"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"ModelIdentity.{name}: expected text, found {getattr(self, name)!r}")
        if not isinstance(self.layout, KVLayout):
            raise ConfigError(f"ModelIdentity.layout: expected a KVLayout, found {self.layout!r}")

    @classmethod
    def from_transformers(cls, model: Any, tokenizer: Any = None, revision: str = "") -> ModelIdentity:
        """Make the identity of a loaded transformers model.

        The layout comes from the model's config. The fingerprint of the weights is a hash over a sample of every
        tensor: another checkpoint never has the same one, an edit of single values may.

        Args:
            model: a loaded transformers model.
            tokenizer: its tokenizer, or None if tokens are made elsewhere.
            revision: the checkpoint's version; "" takes the commit that the model was loaded from.

        Raises:
            UnsupportedModel: names what the model keeps that cannot be stored, or that its weights are not loaded.
        """
        from kvstore.integrations.transformers.describe import identity_fields

        return cls(**identity_fields(model, tokenizer, revision))

    def fields(self) -> dict[str, str]:
        """Every field as text, the layout in canonical form."""
        texts = {k: v for k, v in asdict(self).items() if k != "layout"}
        return {**texts, "layout": self.layout.canonical()}

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 over all fields, each with its name and length."""
        return _hash(*(part.encode() for pair in sorted(self.fields().items()) for part in pair))

    def difference(self, other: dict[str, str]) -> str:
        """Name the fields in which the stored fields `other` differ, for an error message."""
        mine = self.fields()
        rows = [f"{k}: stored {other.get(k)!r}, given {v!r}" for k, v in mine.items() if other.get(k) != v]
        return "; ".join(row if len(row) < 300 else row[:300] + "..." for row in rows)


def namespace_digest(namespace: bytes) -> bytes:
    """Return 32 bytes that stand for a namespace.

    Args:
        namespace: at most 4096 bytes.

    Raises:
        ValueError: the namespace is too long, or not bytes.

    Example:
        >>> len(namespace_digest(b"tenant-1"))
        32
    """
    if not isinstance(namespace, bytes | bytearray | memoryview):
        raise ValueError(f"namespace: expected bytes, found {type(namespace).__name__}")
    data = bytes(namespace)
    if len(data) > MAX_NAMESPACE_BYTES:
        raise ValueError(f"namespace: expected at most {MAX_NAMESPACE_BYTES} bytes, found {len(data)}")
    return _hash(b"namespace", data)


def chain_root(identity: ModelIdentity, namespace: bytes, block_tokens: int) -> bytes:
    """Return the key before the first block; `namespace` is what `namespace_digest` made."""
    return _hash(b"kvstore/1", identity.digest, namespace, block_tokens.to_bytes(4, "little"))


def chain_key(parent: bytes, tokens: Tokens) -> bytes:
    """Return the key of the block `tokens` that follows the block with key `parent`."""
    # One length-prefixed field after a fixed 32 bytes: no two inputs give the same bytes to hash.
    data = tokens.astype("<u4", copy=False).tobytes()
    return hashlib.sha256(parent + len(data).to_bytes(8, "little") + data).digest()


def chain_keys(root: bytes, tokens: Tokens, block_tokens: int) -> Iterator[bytes]:
    """Yield the keys of all blocks of `tokens`, the partial last one (the tail) included."""
    key = root
    for start in range(0, len(tokens), block_tokens):
        key = chain_key(key, tokens[start : start + block_tokens])
        yield key


def as_tokens(tokens: Any) -> Tokens:
    """Return token ids as a contiguous uint32 array, without a copy if they are one.

    Args:
        tokens: at least one token id, 1-D integers in [0, 2**32), any array-like or a tensor.

    Raises:
        ValueError: tokens are anything else.

    Example:
        >>> as_tokens([1, 2, 3])
        array([1, 2, 3], dtype=uint32)
    """
    try:
        if hasattr(tokens, "detach"):
            tokens = tokens.detach().cpu().numpy()
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"tokens: expected a 1-D array of integers, found {type(tokens).__name__}") from error
    if array.ndim != 1:
        raise ValueError(f"tokens: expected one dimension, found shape {array.shape}")
    if array.size == 0:
        raise ValueError("tokens: expected at least one token, found none")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens: expected integers, found {array.dtype}")
    if array.dtype != np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:
            raise ValueError(f"tokens: expected ids from 0 to 2^32 - 1, found {low if low < 0 else high}")
        array = array.astype(np.uint32)
    return np.ascontiguousarray(array)


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
