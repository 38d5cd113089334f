"""Stores as an operator meets them: empty, healthy, damaged, locked, of another format, or none at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from small_stores import config, flip, identity, kv_of, put, tokens_of

from kvstore import KVStore

STATES = ("empty", "healthy", "damaged", "unreadable", "locked", "foreign", "other", "missing")
TOKENS = ",".join(map(str, tokens_of(1, 6)))
HOLD = """import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def make_stores(folder: Path) -> None:
    """One folder for each of `STATES` but "missing"."""
    with KVStore(folder / "empty", identity(), config()):
        pass
    with KVStore(folder / "healthy", identity(), config()) as store:
        for number in (1, 2, 3):
            put(store, tokens_of(number, 20))
        put(store, tokens_of(4, 9), namespace=b"apart", ttl=1e6)
        store.session("alice").save(tokens_of(1, 20), kv_of(tokens_of(1, 20)))
    for state in ("damaged", "unreadable", "locked", "foreign"):
        shutil.copytree(folder / "healthy", folder / state)
    segment = next((folder / "damaged" / "segments").iterdir())
    flip(segment, 4096 * 2 + 400, 0xFF)  # in the payload of a record
    (folder / "unreadable" / "catalog" / "data.mdb").write_bytes(b"nothing" * 1000)
    for name in ("store.json", "store.json.copy"):
        path = folder / "foreign" / name
        document = json.loads(path.read_bytes().partition(b"\n")[0]) | {"format": 99}
        body = json.dumps(document, sort_keys=True).encode() + b"\n"
        path.write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("somebody else's")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process holds the lock of the store meanwhile."""
    (folder / "writer.lock").touch()
    command = [sys.executable, "-S", "-c", HOLD, str(folder / "writer.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate()
