"""Writes the golden files that do not exist yet: records of every registered codec, and a whole store.

    python tests/golden/make.py

Files that exist are never written again: they stand for stores on somebody's disk. `<codec>/<case>.rec` is a sealed
record, `<case>.sha256` the hash of the raw block that it must decode to; `stores/<name>.tar.gz` the files of a store,
`stores/<name>.json` what is in it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))

import goldenstore  # noqa: E402
from goldencases import CASES, Case  # noqa: E402

from kvstore.codecs import Codec, KVView, codec_by_name, codec_names  # noqa: E402
from kvstore.identity import chain_key  # noqa: E402
from kvstore.record import RecordHeader, payload_offset, seal  # noqa: E402

PARENT = hashlib.sha256(b"parent of a golden record").digest()
NAMESPACE = hashlib.sha256(b"namespace of a golden record").digest()
STORE = "first"


def record_of(codec: Codec, case: Case, number: int) -> bytes:
    info = case.info()
    begin = payload_offset(len(info.layout.layers), info.count)
    record = bytearray(begin + codec.bound(info))
    sizes = codec.encode(info, KVView.of_layers(info.layout, case.kv()), memoryview(record)[begin:])
    header = RecordHeader(
        key=chain_key(PARENT, info.tokens),
        parent=PARENT,
        namespace=NAMESPACE,
        codec=codec.id,
        record_id=number,
        start=info.start,
        tokens=info.tokens,
        layer_sizes=sizes,
        raw_bytes=info.count * info.layout.bytes_per_token,
        bits=16.0 * info.count,
    )
    del record[header.record_bytes :]
    seal(header, memoryview(record))
    return bytes(record)


def write_new(path: Path, data: bytes) -> None:
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
    print(f"{path.relative_to(HERE)}: {len(data)} bytes")


def write_store(name: str) -> None:
    if (HERE / "stores" / f"{name}.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        manifest = goldenstore.write(Path(folder) / "store")
        write_new(HERE / "stores" / f"{name}.tar.gz", goldenstore.pack(Path(folder) / "store"))
    write_new(HERE / "stores" / f"{name}.json", json.dumps(manifest).encode() + b"\n")


def main() -> None:
    for number, (name, case) in enumerate(CASES.items(), 1):
        write_new(HERE / f"{name}.sha256", hashlib.sha256(case.raw()).hexdigest().encode() + b"\n")
        for codec in map(codec_by_name, codec_names()):
            write_new(HERE / codec.name / f"{name}.rec", record_of(codec, case, number))
    write_store(STORE)


if __name__ == "__main__":
    main()
