"""Catalogs of real stores, small and packed, and what is wrong with them: the inputs of the targets `catalog_file`
(targets/catalog_file.cc, which reads them alike) and `whole_file` (parsers.py).

An input is the number of a catalog, whether the checksums of its entries are made right again, and damages: each names
a place by what stands there (a field of a page, a slot, a node, a field of a meta page) and what is put there.

    python tests/fuzz/catalogs.py    # makes tests/fuzz/catalogs/ anew, after a change of the format
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).with_name("catalogs")
NAMES = ("empty", "small", "deep", "long", "names")
PAGE, HEADER, NODE, HEAD = 4096, 16, 8, 80
_LEAF, _BIG = 0x02, 0x01
_FIELDS = (0, 8, 10, 12, 14)  # of a page: its number, what pads it, its kind, where its gap begins and ends
# Of a meta page, behind its header: magic, version, size of the map, two trees (what pads it, flags, depth, branches,
# leaves, long pages, entries, root), the last page, the commit.
_TREE = (0, 4, 6, 8, 16, 24, 32, 40)
_METAS = (0, 4, 16, *(24 + at for at in _TREE), *(72 + at for at in _TREE), 120, 128)


class Numbers:
    """Takes numbers from an input; zeros once it has ended."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, count: int = 1) -> int:
        found = self._data[self._at : self._at + count]
        self._at = min(len(self._data), self._at + count)
        return int.from_bytes(found, "little")

    def more(self) -> bool:
        return self._at < len(self._data)


def packed(file: bytes) -> bytes:
    """Runs of one byte are said by their length: the number of bytes that follow as they are, these, length, byte."""
    out, begin, at = bytearray(), 0, 0
    while at < len(file):
        end = at
        while end < len(file) and file[end] == file[at] and end - at < 0xFFFF:
            end += 1
        if end - at >= 6 or end == len(file):
            out += struct.pack("<H", at - begin) + file[begin:at] + struct.pack("<HB", end - at, file[at])
            begin = end
        at = end
    return bytes(out)


def unpacked(data: bytes) -> bytearray:
    out, at = bytearray(), 0
    while at < len(data):
        (count,) = struct.unpack_from("<H", data, at)
        out += data[at + 2 : at + 2 + count]
        length, byte = struct.unpack_from("<HB", data, at + 2 + count)
        out += bytes([byte]) * length
        at += 5 + count
    return out


def damaged(data: bytes) -> bytearray:
    """The file that an input stands for."""
    numbers = Numbers(data)
    file = unpacked((FOLDER / NAMES[numbers.number() % len(NAMES)]).read_bytes())
    right_sums = numbers.number() & 1
    while numbers.more():
        _damage(file, numbers)
    if right_sums:
        _sum(file)
    return file


def _damage(file: bytearray, numbers: Numbers) -> None:
    what = numbers.number()
    if what & 15 == 10:
        size = numbers.number(3)
        del file[size:]
        file.extend(bytes(min(size, 0xFFFFF) - len(file)) if size > len(file) else b"")
        return
    pages = len(file) // PAGE
    if not pages:
        return
    page = numbers.number() % pages * PAGE
    if what & 15 == 9:
        other, number = numbers.number() % pages * PAGE, bytes(file[page : page + 8])
        file[page : page + PAGE] = file[other : other + PAGE]
        if what & 16:
            file[page : page + 8] = number
        return
    at = _place(file, page, what & 15, numbers)
    width, how = 1 << (what >> 4 & 3), numbers.number()
    width = max(0, min(width, len(file) - at))
    value = int.from_bytes(file[at : at + width], "little")
    if how % 4 == 0:
        value = numbers.number(width)
    elif how % 4 == 1:
        value += numbers.number() - 128
    elif how % 4 == 2:
        value = numbers.number() % pages
    else:
        value ^= 1 << numbers.number() % 64
    file[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _place(file: bytearray, page: int, kind: int, numbers: Numbers) -> int:
    if kind == 1:
        return page + _FIELDS[numbers.number() % len(_FIELDS)]
    if kind == 8:
        return page % (2 * PAGE) + HEADER + _METAS[numbers.number() % len(_METAS)]
    if not 2 <= kind <= 7:
        return page + numbers.number(2) % PAGE
    slot = page + HEADER + 2 * (numbers.number() % max(1, _count(file, page)))
    if kind == 2:
        return slot
    node = page + struct.unpack_from("<H", file, slot)[0] % (PAGE - NODE)
    if kind < 6:
        return node + (0, 4, 6)[kind - 3]
    key = struct.unpack_from("<H", file, node + 6)[0] % PAGE if kind == 7 else 0
    return min(node + NODE + key + numbers.number(), len(file))


def _count(file: bytearray, page: int) -> int:
    return max(0, min(struct.unpack_from("<H", file, page + 12)[0], PAGE) - HEADER) // 2


def _sum(file: bytearray) -> None:
    """Makes the checksum of all right that may be an entry: a key of 8 bytes, a value that is long enough."""
    import xxhash

    for page in range(2 * PAGE, len(file) - PAGE + 1, PAGE):
        if struct.unpack_from("<H", file, page + 10)[0] != _LEAF:
            continue
        for i in range(_count(file, page)):
            node = page + struct.unpack_from("<H", file, page + HEADER + 2 * i)[0] % (PAGE - NODE)
            size, flags, key = struct.unpack_from("<IHH", file, node)
            if key != 8 or node + NODE + key + 8 > page + PAGE:
                continue
            at, end = node + NODE + key, page + PAGE
            if flags & _BIG:
                at, end = struct.unpack_from("<Q", file, at)[0] % (len(file) // PAGE) * PAGE + HEADER, len(file)
            if HEAD <= size <= end - at:
                file[at : at + 8] = xxhash.xxh3_64_intdigest(bytes(file[at + 8 : at + size])).to_bytes(8, "little")


def make() -> None:
    """Stores with few and with many blocks, long ones, removed ones, and sessions with long names."""
    import numpy as np
    import small_stores

    from kvstore import KVStore

    def sequence(number: int, count: int) -> np.ndarray:
        return np.array([number, *[0] * (count - 1)], np.uint32)

    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            config = small_stores.config(**({"block_tokens": 2048, "segment_bytes": 1 << 20} if name == "long" else {}))
            with KVStore(folder, small_stores.IDENTITY, config) as store:
                blocks = {"small": [9] * 3, "deep": [18] * 9, "long": [2500, 4100], "names": [1] * 3}
                for number, count in enumerate(blocks.get(name, [])):
                    small_stores.put(store, sequence(number, count), b"other" if number == 2 else b"")
                store.flush()
                for number in range({"deep": 3}.get(name, 0)):
                    store.delete(sequence(number, 18))
                    store.flush()
                for number in range({"small": 1, "names": 40}.get(name, 0)):
                    tokens = sequence(number % 2, 1)
                    session = store.session("a" * 380 * (name == "names") + str(number))
                    session.save(tokens, small_stores.kv_of(tokens))
                store.flush()
            data = packed(Path(folder, "catalog", "data.mdb").read_bytes())
            (FOLDER / name).write_bytes(data)
            print(name, len(unpacked(data)) // PAGE, "pages", len(data), "bytes")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers")]
    make()
