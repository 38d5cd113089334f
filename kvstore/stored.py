"""What a store on disk is, for whoever has its folder and not its model: an operator, a backup."""

from __future__ import annotations

import os

from kvstore.core.arguments import as_folder
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.errors import ConfigError, CorruptStore, StoreNotFound
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.open import told
from kvstore.tiers.disk.superblock import Superblock


def stored_identity(path: str | os.PathLike[str], *, fs: FileSystem | None = None) -> ModelIdentity:
    """Return the identity that a store was made with, so that it can be opened without its model. Changes nothing.

    Caches that are put under it must be those of that model: nothing else can tell.

    Args:
        path: the folder of the store.
        fs: the file system, for tests that make it fail.

    Raises:
        StoreNotFound: there is no such folder, or no store in it.
        ConfigError: the path leads to a file.
        FormatVersion, CorruptStore, DiskError: the store cannot be read.

    Example:
        >>> import tempfile
        >>> from kvstore import KVStore
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     closed = KVStore(folder, identity).close()
        ...     stored_identity(folder) == identity
        True
    """
    fs, path = fs or FileSystem(), as_folder(path)
    with told(path):
        try:
            kind = fs.kind(path)
        except FileNotFoundError:
            raise StoreNotFound(f"{path}: there is no such folder; name the folder of a store") from None
        if kind != "a folder":
            raise ConfigError(f"path: {path} is {kind}; name the folder of a store")
        superblock = Superblock.read(fs, path)
    if superblock is None:
        raise StoreNotFound(f"{path}: the folder holds no store (store.json is missing); name the folder of a store")
    fields = dict(superblock.identity)
    fields["tokenizer"] = fields.get("tokenizer") or superblock.tokenizer
    try:
        return ModelIdentity(**{**fields, "layout": KVLayout.from_canonical(fields["layout"])})  # type: ignore[arg-type]
    except (ConfigError, KeyError, TypeError) as error:
        raise CorruptStore(
            f"{path}: its identity cannot be read ({error}); restore store.json from a backup"
        ) from error


def stored_bytes(path: str | os.PathLike[str], *, fs: FileSystem | None = None) -> int:
    """Return what everything in a folder takes on disk, in bytes; 0 if there is no such folder."""
    fs, todo, total = fs or FileSystem(), [as_folder(path)], 0
    while todo:
        folder = todo.pop()
        total += fs.allocated(folder)
        try:
            names = fs.names(folder)
        except OSError:
            continue  # a file, or gone meanwhile
        todo += [os.path.join(folder, name) for name in names]
    return total
