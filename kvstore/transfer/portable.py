"""Export to one file, import of one, and backup: `copy_store` between a store and a small one that is packed."""

from __future__ import annotations

import os

from kvstore.config import GIB, MIB, StoreConfig, TierConfig
from kvstore.core.arguments import as_folder
from kvstore.errors import CorruptStore, KVStoreError
from kvstore.store import KVStore
from kvstore.stored import stored_bytes, stored_identity
from kvstore.tiers.disk.fs import FileSystem, remove_tree
from kvstore.transfer.bundle import check_target, pack, unpack
from kvstore.transfer.copy import Choice, CopyReport, Progress, copy_store
from kvstore.transfer.settings import PATIENCE_S, READING, writing_config


def export_store(
    source: KVStore, path: str, choice: Choice, progress: Progress | None = None
) -> tuple[CopyReport, int]:
    """Write chosen sequences and sessions of an open store to one file, whole or not at all. Durable on return.

    Beside the file a folder is made for the time being, which takes as much space again.

    Args:
        source: may be open for reading beside its writer.
        path: of the file; one that is there is replaced.
        choice, progress: see `copy_store`.

    Returns:
        What was copied, and the bytes of the file.

    Raises:
        DiskError, OSError: the file cannot be written.
    """
    fs, path = FileSystem(), os.path.abspath(os.path.expanduser(path))
    check_target(fs, path)
    work = path + ".work"
    remove_tree(fs, work)
    try:
        most = 2 * int(source.stats()["disk"]["raw_bytes"]) + GIB
        config = StoreConfig(
            host=TierConfig(0),
            disk=TierConfig(most, "entropy"),
            segment_bytes=_segment_bytes(source),
            block_tokens=source.config.block_tokens,
            put_timeout_s=PATIENCE_S,
            pinned_share=0.9,
            learn="off",
        )
        with KVStore(work, source.identity, config) as target:
            report = copy_store(source, target, choice, progress)
        return report, pack(fs, work, path)
    finally:
        remove_tree(fs, work)


def _segment_bytes(source: KVStore) -> int:
    """Small segments, so that little of the last one is empty, if every record fits one."""
    layout = source.identity.layout
    is_small = not layout.states and layout.bytes_per_token * source.config.block_tokens < MIB // 4
    return MIB if is_small else 64 * MIB


def import_bundle(
    path: str, target: str, config: StoreConfig | None = None, progress: Progress | None = None
) -> CopyReport:
    """Merge what a bundle holds into a store, which is made if it is missing. Durable on return.

    Nothing of the bundle is trusted: its checksums are compared, its files are opened as a store's, and each record is
    checked and decoded. Beside the store a folder is made for the time being.

    Args:
        path: of the bundle.
        target: folder of the store.
        config: settings to open it with; default is `writing_config`.
        progress: see `copy_store`.

    Raises:
        CorruptStore: the bundle is damaged. Nothing is changed.
        IdentityMismatch: it is of another model. Nothing is changed.
        The errors of `KVStore`.
    """
    fs, folder = FileSystem(), as_folder(target)
    work = folder + ".import"
    remove_tree(fs, work)
    try:
        unpack(fs, path, work)
        try:
            identity = stored_identity(work)
            source = KVStore(work, identity, READING, read_only=True)
        except KVStoreError as error:
            raise CorruptStore(f"{path}: what the bundle holds is damaged ({error}); export again") from error
        with source:
            settings = config or writing_config(folder, stored_bytes(work))
            with KVStore(folder, identity, settings) as store:
                return copy_store(source, store, None, progress)
    finally:
        remove_tree(fs, work)


def backup_store(source: KVStore, target: str, progress: Progress | None = None) -> CopyReport:
    """Copy a whole store to another folder, beside its writer; what is there already is not copied again.

    Sequences are copied one after the other, each checked; what leaves the source meanwhile is counted as `left`.

    Args:
        source: an open store.
        target: folder of the copy, which is a store of its own; made if it is missing.
        progress: see `copy_store`.

    Raises:
        The errors of `KVStore` for the target, and of `copy_store`.
    """
    room = int(source.stats()["disk"]["raw_bytes"])
    sizes = source.config
    base = StoreConfig(block_tokens=sizes.block_tokens, segment_bytes=sizes.segment_bytes, learn="off")
    with KVStore(target, source.identity, writing_config(as_folder(target), room, base)) as store:
        return copy_store(source, store, None, progress)
