"""FORMAT.md is the format: its example is decoded here with nothing but what the page says, and by the product."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from kvstore.codecs import BlockInfo, KVView, codec_by_id
from kvstore.codecs.donor.spans import Span, SpanTable
from kvstore.core.identity import ModelIdentity
from kvstore.core.keys import chain_key, chain_root, namespace_digest
from kvstore.core.layout import KVLayout
from kvstore.core.record import check_payload, parse, payload_of, seal
from kvstore.tiers.disk.entry import Entry

PAGE = Path(__file__).parents[1] / "FORMAT.md"
LAYOUT = KVLayout.uniform(1, 1, 2)
KEYS = [[1.0, -1.0], [0.5, 2.0], [0.0, -0.0]]
VALUES = [[3.0, 4.0], [float("inf"), 5.0], [6.0, -8.0]]


@pytest.fixture(scope="module")
def example() -> bytes:
    block = re.search(r"```hexdump\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return b"".join(bytes.fromhex(line[6:]) for line in block[1].splitlines())


def lengths(*fields: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(f).to_bytes(8, "little") + f for f in fields)).digest()


def test_example_by_the_page_alone(example: bytes) -> None:
    identity = {
        "codec_family": "exact",
        "layout": LAYOUT.canonical(),
        "model": "example",
        "revision": "1",
        "shard": "0/1",
        "tokenizer": "",
        "weights": "00",
    }
    digest = lengths(*(text.encode() for pair in sorted(identity.items()) for text in pair))
    root = lengths(b"kvstore/1", digest, lengths(b"namespace", b""), (64).to_bytes(4, "little"))
    tokens = struct.pack("<3I", 7, 8, 9)
    assert example[:8] == b"KVSTREC1"
    assert struct.unpack_from("<HHI", example, 8) == (1, 0, 320)
    assert example[16:48] == hashlib.sha256(root + (12).to_bytes(8, "little") + tokens).digest()
    assert example[48:80] == root
    assert example[80:112] == bytes(32)
    assert example[112:144] == lengths(b"namespace", b"")
    assert example[144:160] == bytes(16)
    assert struct.unpack_from("<QQQIIIffId", example, 160) == (1, 24, 24, 3, 0, 1, 0.0, 48.0, 0, 0.0)
    assert struct.unpack_from("<H", example, 216) == (0,)  # donors
    assert example[218:224] == bytes(6)
    assert example[256:272] == struct.pack("<I", 24) + tokens
    assert example[272:320] == bytes(48)
    assert example[224:240] == xxhash.xxh3_128_digest(example[320:344])
    assert example[240:256] == xxhash.xxh3_128_digest(example[:240] + example[256:272])
    values = np.frombuffer(example[320:344], "<u2").astype(np.uint32) << 16
    assert values.view(np.float32).reshape(2, 3, 2).tolist() == [KEYS, VALUES]


def with_donors(example: bytes, numbers: list[int], keys: list[bytes]) -> bytes:
    """The example as the record of a member, by the page alone."""
    table = b"".join(struct.pack("<Q", number) + key for number, key in zip(numbers, keys, strict=True))
    tables = example[256:272] + table
    offset = -(-(256 + len(tables)) // 64) * 64
    fixed = bytearray(example[:240])
    fixed[12:16] = struct.pack("<I", offset)
    fixed[80:112] = keys[0]
    fixed[216:218] = struct.pack("<H", len(keys))
    tail = tables.ljust(offset - 256, b"\0") + example[320:344]
    return bytes(fixed) + xxhash.xxh3_128_digest(bytes(fixed) + tables) + tail


def test_donors_by_the_page_are_donors_of_the_product(example: bytes) -> None:
    record = with_donors(example, [5, 1 << 40], [b"d" * 32, b"e" * 32])
    header = parse(memoryview(record), len(record))
    check_payload(header, memoryview(record))
    assert [(donor.record, donor.key) for donor in header.donors] == [(5, b"d" * 32), (1 << 40, b"e" * 32)]
    assert bytes(payload_of(header, memoryview(record))) == example[320:344]
    again = bytearray(len(record))
    again[header.payload_offset :] = record[header.payload_offset :]
    seal(header, memoryview(again))
    assert bytes(again) == record


def test_a_donor_section_by_the_page_is_one_of_the_product() -> None:
    layout = KVLayout.uniform(1, 1, 4, rope='{"rope_theta": 100.0, "rope_type": "default"}')
    angle = struct.pack("<4h", 16384, 16373, 0, 610)
    spans = struct.pack("<HHHHiI", 0, 5, 1, 9, 0, 0) + struct.pack("<HHHHiI", 7, 3, 0, 0, -300, 1)
    section = struct.pack("<IHHII", 6, 2, 1, 1, 33) + spans + angle
    table = SpanTable.parse(layout, 12, memoryview(section + bytes(33)))
    assert table.spans == (Span(0, 5, 1, 9, 0), Span(7, 3, 0, 0, -300))
    assert table.which == (-1, 0)
    assert table.angles.tolist() == [[[16384, 16373], [0, 610]]]
    assert (table.propagated, table.rest, table.nbytes) == (True, 33, len(section))
    assert table.pack(33) == section
    assert table.gaps(12) == [(5, 2), (10, 2)]


def test_an_entry_by_the_page_is_one_of_the_product() -> None:
    head = struct.pack("<QQQQIIIIIIfHHd", 9, 8, 77, 66, 3, 2, 1, 64, 2, 5, 2.0, 3, 1, 4.5)
    body = head + struct.pack("<2I", 10, 11) + struct.pack("<2Q", 7, 1 << 40)
    value = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body
    entry = Entry.unpack(value)
    assert entry is not None
    assert entry.donors == (7, 1 << 40)
    assert entry.tokens.tolist() == [10, 11]
    assert (entry.record, entry.parent, entry.tag, entry.parent_tag) == (9, 8, 77, 66)
    assert (entry.extent.segment, entry.extent.offset, entry.extent.nbytes) == (3, 8192, 4096)
    assert (entry.start, entry.namespace, entry.bits, entry.codec, entry.flags) == (64, 5, 2.0, 3, 1)
    assert entry.expiry == 4.5
    assert entry.pack() == value


def test_example_by_the_product(example: bytes) -> None:
    header = parse(memoryview(example), len(example))
    check_payload(header, memoryview(example))
    identity = ModelIdentity("example", "1", "00", "", LAYOUT)
    root = chain_root(identity.digest, namespace_digest(b""), 64)
    assert header.parent == root
    assert header.key == chain_key(root, np.array([7, 8, 9], np.uint32))
    k, v = torch.empty(1, 3, 2, dtype=torch.bfloat16), torch.empty(1, 3, 2, dtype=torch.bfloat16)
    info = BlockInfo(LAYOUT, header.tokens, header.start)
    out = KVView.of_layers(LAYOUT, [(k, v)])
    codec_by_id(header.codec).decode(info, payload_of(header, memoryview(example)), header.layer_sizes, out)
    assert k[0].tolist() == KEYS
    assert v[0].tolist() == VALUES
    assert torch.signbit(k[0, 2, 1])
