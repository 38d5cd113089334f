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
from kvstore.identity import ModelIdentity, chain_key, chain_root, namespace_digest
from kvstore.layout import KVLayout
from kvstore.record import check_payload, parse, payload_of

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
    assert example[216:224] == bytes(8)
    assert example[256:272] == struct.pack("<I", 24) + tokens
    assert example[272:320] == bytes(48)
    assert example[224:240] == xxhash.xxh3_128_digest(example[320:344])
    assert example[240:256] == xxhash.xxh3_128_digest(example[:240] + example[256:272])
    values = np.frombuffer(example[320:344], "<u2").astype(np.uint32) << 16
    assert values.view(np.float32).reshape(2, 3, 2).tolist() == [KEYS, VALUES]


def test_example_by_the_product(example: bytes) -> None:
    header = parse(memoryview(example), len(example))
    check_payload(header, memoryview(example))
    identity = ModelIdentity("example", "1", "00", "", LAYOUT)
    root = chain_root(identity, namespace_digest(b""), 64)
    assert header.parent == root
    assert header.key == chain_key(root, np.array([7, 8, 9], np.uint32))
    k, v = torch.empty(1, 3, 2, dtype=torch.bfloat16), torch.empty(1, 3, 2, dtype=torch.bfloat16)
    info = BlockInfo(LAYOUT, header.tokens, header.start)
    out = KVView.of_layers(LAYOUT, [(k, v)])
    codec_by_id(header.codec).decode(info, payload_of(header, memoryview(example)), header.layer_sizes, out)
    assert k[0].tolist() == KEYS
    assert v[0].tolist() == VALUES
    assert torch.signbit(k[0, 2, 1])
