"""Every exception the store raises. Each message says what was wrong and what to do about it."""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all errors raised by kvstore."""


class ConfigError(KVStoreError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class LayoutMismatch(KVStoreError, ValueError):
    """The given tensors do not have the layout that the store's identity names. Nothing was stored."""


class UnsupportedModel(KVStoreError):
    """The model keeps a kind of state that cannot be stored; the message names it."""


class UnsupportedCache(KVStoreError):
    """The cache object holds a layer that cannot be stored; the message names it."""


class UnsupportedLength(KVStoreError, ValueError):
    """The model rotates the keys of sequences of this length otherwise than those that the store holds.

    With rope types longrope and dynamic: `ModelIdentity.from_transformers` says which lengths an identity is for.
    """


class UnsupportedTokens(KVStoreError, ValueError):
    """Some of the tokens stand for images or sound, which token ids do not show. Nothing was stored."""


class MalformedEvents(KVStoreError, ValueError):
    """A message is no batch of KV events (`kvstore.events.wire`)."""


class MalformedState(KVStoreError, ValueError):
    """The bytes are not what they should be, a state or a file of an engine: truncated, damaged or of another format.

    Nothing was stored.
    """


class MetadataError(KVStoreError, ValueError):
    """The metadata of a session takes too many bytes, or is of a kind that is not kept. Nothing was stored."""


class FormatVersion(KVStoreError):
    """The store was written by another version of the format."""


class IdentityMismatch(KVStoreError):
    """The store belongs to another model, dtype or layout."""


class LayerLost(KVStoreError):
    """A layer of a cache that was got with lazy=True cannot be decoded, for a record is damaged.

    That record is no longer used. Get the cache again, and compute what is missing.
    """


class StoreLocked(KVStoreError):
    """Another writer has the store open; the message names the holder.

    Attributes:
        what: what happened, without the advice to a Python program.
    """

    def __init__(self, what: str = "", advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what


class StoreClosed(KVStoreError):
    """The store was used after close()."""


class StoreBusy(KVStoreError):
    """A signal handler called the store while it interrupted another call of it in the same thread."""


class WriterSilent(KVStoreError):
    """The process that writes a shared store does not answer; it may be stopped. Gets go on working."""


class BlocksLost(KVStoreError):
    """The store was closed, and blocks that were put could not be written; the message says how many, and why."""


class StoreForked(KVStoreError):
    """The store was opened in a parent process; open it anew in the child."""


class ReadOnlyStore(KVStoreError):
    """A store opened with read_only=True was asked for a change."""


class StoreNotFound(KVStoreError):
    """A store was to be opened for reading, and there is none in that folder."""


class CorruptStore(KVStoreError):
    """A file is so damaged that dropping single entries does not help; the message names the file."""


class DiskError(KVStoreError):
    """The disk tier could not be written or read: the disk fails, or the process has no right or no descriptors left.

    What is stored is not damaged by this. An open store drops the affected blocks and continues; a store that could not
    be opened can be opened once the cause is gone.
    """


class CodecError(KVStoreError):
    """The bytes given to a codec are not bytes that it wrote."""


class UnknownCodec(CodecError):
    """No codec is registered under that number or name."""


class ProfileError(KVStoreError, ValueError):
    """A calibration profile is missing, damaged, or another model's; `kvstore calibrate` makes one."""


class RemoteError(KVStoreError):
    """Base of what goes wrong with an engine of the remote tier. The store makes a miss or a dropped write of it."""


class RemoteTimeout(RemoteError):
    """The call took as long as it may. A read is a miss; whether a write or a deletion happened is not known."""


class RemoteUnavailable(RemoteError):
    """The server cannot be reached, closed the connection, or is starting; a later call may succeed."""


class RemoteRefused(RemoteError):
    """The server answered that it will not: wrong password, no right, or a command that it does not have."""


class RemoteFull(RemoteRefused):
    """The server has no room for the value, and evicts nothing."""


class RemoteGarbled(RemoteError):
    """The server answered with bytes that the protocol does not allow. The connection was closed, nothing was used."""


class RemoteTooLarge(RemoteError, ValueError):
    """A value is larger than the buffer that was to take it, or than what the engine stores."""
