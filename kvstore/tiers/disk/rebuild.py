"""Rebuilds a catalog whose structure is damaged: records from the segments, sessions and holes from its raw pages.

Records describe themselves, so the segments alone say what is stored. Records that had been deleted or evicted and
not yet been overwritten come back: their contents are right for their tokens, and they are evicted in turn.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.config import PAGE_BYTES
from kvstore.core.record import DamagedRecord, RecordHeader, header_bytes, key_tag, padded, parse
from kvstore.core.session_note import SessionNote
from kvstore.core.session_record import SessionChange, SessionHead, SessionRecord, SessionText, tokens_of
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.entry import MAX_RECORD, Entry, Scan, checked, entry_of, is_entry
from kvstore.tiers.disk.files import segment_path
from kvstore.tiers.disk.format1 import session_of_format_1
from kvstore.tiers.disk.fs import FileSystem, close_quietly, is_passing, read_all
from kvstore.tiers.disk.saved_notes import session_key_of
from kvstore.tiers.disk.segment import Extent

_CHUNK_BYTES = 4 << 20
_LMDB_HEADER = 16
_MOST_VALUE = 1 << 28  # no session is larger
_LEAF, _BIG = 0x02, 0x01


@dataclass(frozen=True)
class Rebuilt:
    """How many records and sessions a rebuild found."""

    records: int
    sessions: int


def rebuild(
    fs: FileSystem,
    directory: str,
    damaged_catalog: str,
    segment_numbers: list[int],
    segment_bytes: int,
    make_catalog: Callable[[], Catalog],
) -> tuple[Catalog, Rebuilt]:
    """Fill a new catalog from segments, and from what can be read of a damaged one.

    Args:
        fs: the file system.
        directory: of the segments.
        damaged_catalog: path of a data.mdb, which may be missing.
        segment_numbers: the segments to read.
        segment_bytes: size of each.
        make_catalog: makes the empty catalog.

    Raises:
        OSError: a file cannot be read, which says nothing about its bytes. The new catalog is closed, and of no use.
        CatalogError: the same, if the new catalog cannot be written.
    """
    catalog = make_catalog()
    with contextlib.ExitStack() as undo:
        undo.callback(catalog.close)
        found = _fill(catalog, fs, directory, segment_numbers, segment_bytes, damaged_catalog)
        undo.pop_all()
    return catalog, found


def _fill(
    catalog: Catalog,
    fs: FileSystem,
    directory: str,
    segment_numbers: list[int],
    segment_bytes: int,
    damaged_catalog: str,
) -> Rebuilt:
    sessions = salvage_sessions(fs, damaged_catalog)
    newest: dict[bytes, tuple[RecordHeader, Extent]] = {}
    for number in segment_numbers:
        for header, extent in scan_segment(fs, segment_path(directory, number), number, segment_bytes):
            known = newest.get(header.key)
            if known is None or known[0].record_id < header.record_id:
                newest[header.key] = (header, extent)
    numbers = _numbers(header for header, _ in newest.values())
    namespaces: dict[bytes, int] = {}
    entries = []
    for header, extent in newest.values():
        if header.namespace not in namespaces:
            namespaces[header.namespace] = catalog.namespace(header.namespace)
        entry = entry_of(header, extent, numbers.get(header.parent, 0), namespaces[header.namespace])
        # A donor that is gone has no number; what needed it finds that out.
        donors = tuple(numbers.get(donor.key, 0) for donor in header.donors)
        entries.append(replace(entry, record=numbers[header.key], donors=donors))
    changes = [SessionChange(key, record, record.sequence) for key, record in sessions.items()]
    holes = salvage_holes(fs, damaged_catalog, entries)
    catalog.commit(added=sorted([*entries, *holes], key=lambda entry: entry.record), sessions=changes)
    return Rebuilt(len(entries), len(sessions))


def _numbers(headers: Iterable[RecordHeader]) -> dict[bytes, int]:
    """The record number of every block (by its key): its own, or a new one where an older block has it. A number is
    given again when its record was gone at an open, and the bytes of that record may still lie in some segment."""
    taken: dict[int, bytes] = {}
    again = []
    for header in headers:
        if header.record_id < MAX_RECORD and taken.setdefault(header.record_id, header.key) == header.key:
            continue
        again.append(header.key)
    first_free = max(taken, default=0) + 1
    return {key: number for number, key in taken.items()} | {k: n for n, k in enumerate(again, first_free)}


def recover_entries(
    fs: FileSystem,
    directory: str,
    segment_numbers: list[int],
    segment_bytes: int,
    scan: Scan,
    namespaces: dict[bytes, int],
) -> list[Entry]:
    """Make the damaged entries of a scan again from their records, which the segments still hold.

    Raises:
        OSError: a segment cannot be read, which says nothing about its bytes.
    """
    wanted = {number for key in scan.damaged if 0 < (number := int.from_bytes(key, "big")) < MAX_RECORD}
    by_tag = dict(zip(scan.entries["tag"].tolist(), scan.entries["record"].tolist(), strict=True))
    found: dict[int, Entry] = {}
    for number in segment_numbers:
        for header, extent in scan_segment(fs, segment_path(directory, number), number, segment_bytes):
            # A number stands once in the catalog; of two records with it one was moved, and either is whole.
            if header.record_id in wanted and header.namespace in namespaces:
                parent = by_tag.get(key_tag(header.parent), 0)
                found[header.record_id] = entry_of(header, extent, parent, namespaces[header.namespace])
    return list(found.values())


def scan_segment(fs: FileSystem, path: str, number: int, segment_bytes: int) -> Iterator[tuple[RecordHeader, Extent]]:
    """Yield the intact record headers of a segment, in order. After a damaged one the search goes on page by page.

    Raises:
        OSError: the file cannot be read, which says nothing about its bytes: too few descriptors, no right to read it.
    """
    opened = _opened(fs, path)
    if opened is None:
        return
    fd, size = opened[0], min(opened[1], segment_bytes)
    try:
        offset = PAGE_BYTES
        while offset + PAGE_BYTES <= size:
            try:
                header = _read_header(fs, fd, offset, size)
            except (DamagedRecord, OSError) as error:
                if isinstance(error, OSError) and is_passing(error):
                    raise
                offset += PAGE_BYTES
                continue
            extent = Extent(number, offset, padded(header.record_bytes))
            yield header, extent
            offset += extent.nbytes
    finally:
        close_quietly(fs, fd)


def _opened(fs: FileSystem, path: str) -> tuple[int, int] | None:
    """A descriptor of a file, and its size; None if it cannot be opened for good."""
    try:
        size = fs.size(path)
        return fs.open(path, os.O_RDONLY), size
    except OSError as error:
        if is_passing(error):
            raise
        return None


def _read_header(fs: FileSystem, fd: int, offset: int, size: int) -> RecordHeader:
    page = bytearray(PAGE_BYTES)
    read_all(fs, fd, [memoryview(page)], offset)
    room = size - offset
    wanted = header_bytes(page)
    if PAGE_BYTES < wanted <= min(room, _CHUNK_BYTES):
        page = bytearray(wanted)
        read_all(fs, fd, [memoryview(page)], offset)
    return parse(memoryview(page), room)


def salvage_holes(fs: FileSystem, path: str, entries: Sequence[Entry]) -> list[Entry]:
    """Return holes in place of blocks that stand before some of `entries` and are not among them.

    A record names the key of the block before it and not its tokens. These are in the entry of that block or of its
    hole, if one of the leaf pages of the damaged LMDB file has it still; it may be of any age, for a key stands for one
    sequence of tokens. Of what stays without a place `load_index` says that it cannot be reached.
    """
    tags = {entry.tag for entry in entries}
    waiting = [entry for entry in entries if entry.start and entry.parent_tag not in tags]
    known: dict[int, Entry] = {}
    for key, value in _leaf_pairs(fs, path) if waiting else ():
        entry = Entry.unpack(value) if is_entry(key, value) else None
        if entry is not None and entry.tag not in tags:
            known[entry.tag] = entry
    holes: list[Entry] = []
    free = max((entry.record for entry in entries), default=0) + 1
    while waiting:
        below = waiting.pop()
        above = known.get(below.parent_tag)
        if above is None or above.start + len(above.tokens) != below.start:
            continue
        del known[above.tag]
        holes.append(replace(above.as_hole(), record=free + len(holes), namespace=below.namespace))
        if above.start and above.parent_tag not in tags:
            waiting.append(holes[-1])
    return holes


def salvage_sessions(fs: FileSystem, path: str) -> dict[bytes, SessionRecord]:
    """Return the sessions in the leaf pages of a damaged LMDB file: every intact one whose texts are there, too.

    Old pages hold old values; the value with the highest sequence number wins.

    Raises:
        OSError: the file cannot be read, which says nothing about its bytes.
    """
    texts: dict[bytes, SessionText] = {}
    notes: dict[tuple[bytes, float], SessionNote] = {}  # the newest, by session and when that was made
    heads: dict[bytes, list[SessionHead]] = {}
    best: dict[bytes, SessionRecord] = {}
    for name, value in _leaf_pairs(fs, path):
        body = checked(value)
        if body is None:
            continue
        if (text := SessionText.unpack(name, body)) is not None:
            texts[name] = text
        elif (head := SessionHead.unpack(name, body)) is not None:
            heads.setdefault(name, []).append(head)
        elif (session := session_key_of(name)) is not None and (note := SessionNote.unpack(body)) is not None:
            known = notes.get((session, note.created))
            if known is None or known.sequence < note.sequence:
                notes[session, note.created] = note
        elif (old := session_of_format_1(name, body)) is not None:
            _keep_newer(best, name, old)
    for name, found in heads.items():
        for head in found:
            tokens = tokens_of(head, texts.get)
            if tokens is not None:
                noted = notes.get((name, head.created))
                if noted is not None:
                    head = head._replace(hits=noted.hits, metadata=noted.metadata)
                _keep_newer(best, name, head.with_tokens(tokens))
    return best


def _keep_newer(best: dict[bytes, SessionRecord], name: bytes, record: SessionRecord) -> None:
    if name not in best or best[name].sequence < record.sequence:
        best[name] = record


def _leaf_pairs(fs: FileSystem, path: str) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of every node of every leaf page, sound or not; nothing is trusted but the file's size."""
    opened = _opened(fs, path)
    if opened is None:
        return
    fd, size = opened
    try:
        page, offset = bytearray(PAGE_BYTES), 0
        while offset + PAGE_BYTES <= size:
            here, offset = offset, offset + PAGE_BYTES
            try:
                read_all(fs, fd, [memoryview(page)], here)
            except OSError as error:
                if is_passing(error):
                    raise
                continue
            flags, lower = struct.unpack_from("<HH", page, 10)
            if not flags & _LEAF or lower > PAGE_BYTES:
                if not any(page):
                    offset = max(offset, fs.next_data(fd, offset) // PAGE_BYTES * PAGE_BYTES)
                continue
            for slot in range(_LMDB_HEADER, lower - 1, 2):
                (node,) = struct.unpack_from("<H", page, slot)
                if node + 8 > PAGE_BYTES:
                    continue
                low, high, node_flags, key_size = struct.unpack_from("<HHHH", page, node)
                value_size = low | high << 16
                begin = node + 8 + key_size
                key = bytes(page[node + 8 : begin])
                if not node_flags & _BIG:
                    yield key, bytes(page[begin : begin + value_size])
                    continue
                if begin + 8 > PAGE_BYTES:
                    continue
                (first_page,) = struct.unpack_from("<Q", page, begin)
                where = first_page * PAGE_BYTES + _LMDB_HEADER
                if value_size <= _MOST_VALUE and where + value_size <= size:
                    value = bytearray(value_size)
                    try:
                        read_all(fs, fd, [memoryview(value)], where)
                    except OSError as error:
                        if is_passing(error):
                            raise
                        continue
                    yield key, bytes(value)
    finally:
        close_quietly(fs, fd)
