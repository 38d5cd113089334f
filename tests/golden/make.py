"""Writes the golden files that do not exist yet: records of every codec, streams, and a whole store.

    python tests/golden/make.py

Files that exist are never written again: they stand for stores on somebody's disk. `<codec>/<case>.rec` is a sealed
record, `<case>.sha256` the hash of the raw block that it must decode to; tests/helpers/goldenmodels.py says what there
is of codecs that need a profile or donors. `rans/<case>.json` is a stream of the entropy coder with its tables.
`stores/<name>.tar.gz` are the files of a store, `stores/<name>.json` says what is in it; `windows/store.*` are those
of a layout with windows.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))

import goldenstore  # noqa: E402
import goldenwindows  # noqa: E402
from goldencases import CASES  # noqa: E402
from goldenmodels import record_of, write_missing  # noqa: E402
from ranscases import golden_stream  # noqa: E402

from kvstore.codecs import codec_by_name, codec_names  # noqa: E402

STORES = ("first", "second")  # of formats 1 and 2
RANS = {  # seed, symbols, period of the classes, tables, bits: only ever added to
    "empty": (1, 0, 1, 1, 11),
    "one": (2, 1, 1, 2, 12),
    "short": (3, 77, 7, 3, 11),
    "long": (4, 1500, 50, 4, 12),
}


def write_new(path: Path, data: bytes) -> None:
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
    print(f"{path.relative_to(HERE)}: {len(data)} bytes")


def write_store(name: str, write: Callable[[Path], dict[str, Any]] = goldenstore.write) -> None:
    if (HERE / f"{name}.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        manifest = write(Path(folder) / "store")
        write_new(HERE / f"{name}.tar.gz", goldenstore.pack(Path(folder) / "store"))
    write_new(HERE / f"{name}.json", json.dumps(manifest).encode() + b"\n")


def main() -> None:
    for number, (name, case) in enumerate(CASES.items(), 1):
        write_new(HERE / f"{name}.sha256", hashlib.sha256(case.raw()).hexdigest().encode() + b"\n")
        for codec in map(codec_by_name, codec_names()):
            write_new(HERE / codec.name / f"{name}.rec", record_of(codec, case.info(), case.kv(), number))
    write_missing(write_new)
    for name, arguments in RANS.items():
        path = HERE / "rans" / f"{name}.json"
        if not path.exists():
            write_new(path, golden_stream(*arguments))
    for name in STORES:
        write_store(f"stores/{name}")
    write_store("windows/store", goldenwindows.write)


if __name__ == "__main__":
    main()
