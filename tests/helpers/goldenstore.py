"""A store with something of everything in it: how the golden one was made, and how it is read again.

`write` is run once for ever (tests/golden/make.py); what it wrote is read by `tests/store/test_golden_store.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
import torch
from family_stores import BLOCK, join, passage
from profilecases import ROPE, VOCABULARY, Layers, predicted_kv, profile_of

from kvstore import Hit, KVLayout, KVStore, ModelIdentity, StoreConfig
from kvstore.codecs.profile import Profile

LAYOUT = KVLayout.uniform(2, 1, 16, rope=ROPE)
TENANT = b"tenant"
_CENTURY = 100 * 365 * 86400.0
_MOMENT = 3.0  # seconds: longer than it takes to write the store, over when anybody reads it
_NOT_COPIED = "lock.mdb"  # of the processes that have the catalog open, and of the machine's kind


def identity() -> ModelIdentity:
    return ModelIdentity("golden", "1", "00", "", LAYOUT)


def config(codec: str = "entropy", **settings: Any) -> StoreConfig:
    return family_stores.config(disk=1 << 20, codec=codec, **settings)


def digest_of(layers: Any) -> str:
    """sha256 of keys and values of every layer, each contiguous `[heads, tokens, dim]`."""
    sha = hashlib.sha256()
    for tensor in (tensor for pair in layers for tensor in pair):
        flat = tensor[0] if tensor.dim() == 4 else tensor
        sha.update(flat.contiguous().view(torch.int16).numpy().tobytes())
    return sha.hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a store that is the store's own."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != _NOT_COPIED]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def pack(folder: Path) -> bytes:
    """The files as .tar.gz: segments are mostly zeros."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=9) as archive:
        for name, data in files_of(folder).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


class Writer:
    """Puts sequences and notes in `manifest` what a reader must find."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = {"sequences": {}, "sessions": {}}

    def put(self, store: KVStore, name: str, tokens: Any, kv: Layers, *, found: int | None = None, **how: Any) -> None:
        session = how.pop("session", None)
        namespace = how.pop("namespace", b"")
        found = len(tokens) if found is None else found
        if session is None:
            store.put(tokens, kv, namespace=namespace, **how)
        else:
            store.session(session, namespace=namespace).save(tokens, kv, **how)
            self.manifest["sessions"][session] = {"namespace": namespace.decode(), "tokens": tokens.tolist()}
        self.manifest["sequences"][name] = {
            "namespace": namespace.decode(),
            "tokens": tokens.tolist(),
            "found": found,
            "sha256": digest_of([(k[:, :found], v[:, :found]) for k, v in kv]),
        }

    def alike(self, store: KVStore, name: str, tokens: Any, **how: Any) -> None:
        """With the contents that `family_stores.kv_of` gives the sequence."""
        self.put(store, name, tokens, family_stores.kv_of(tokens, how.get("namespace", b""), LAYOUT), **how)


def write(path: Path) -> dict[str, Any]:
    """Makes the store at `path`; returns its manifest as plain JSON values."""
    writer = Writer(path)
    with KVStore(path, identity(), config()) as store:
        _with_entropy(writer, store)
        store.flush()
        members = store.stats()["families"]["members"]
        assert members >= 4
    profile = profile_of_store()
    saved = path.parent / "profile.safetensors"
    profile.save(saved)
    with KVStore(path, identity(), config("predictive", profile=saved)) as store:
        _with_the_profile(writer, store, profile)
        store.flush()
        writer.manifest["members"] = store.stats()["families"]["members"]
        assert writer.manifest["members"] >= members + 4
    for number, codec in enumerate(("raw", "splitzip", "zstd")):
        with KVStore(path, identity(), config(codec)) as store:
            writer.alike(store, codec, passage(40 + number, BLOCK + 3))
    with KVStore(path, identity(), config()) as store:
        _with_long_sessions(writer, store)
    return json.loads(json.dumps(writer.manifest))  # type: ignore[no-any-return]


def profile_of_store() -> Profile:
    made = profile_of(LAYOUT, "lossless", "donor")
    return Profile.new(identity(), {name: made.section(name) for name in made.sections})


def _with_entropy(writer: Writer, store: KVStore) -> None:
    text = passage(1)
    writer.alike(store, "text", text)
    store.flush()
    writer.alike(store, "member", family_stores.behind(10, text))
    writer.alike(store, "tail", passage(2, BLOCK + 9))
    writer.alike(store, "tenant", text, namespace=TENANT)
    writer.alike(store, "century", passage(3, BLOCK), ttl=_CENTURY)
    writer.alike(store, "expired", passage(4, BLOCK), ttl=_MOMENT, found=0)
    writer.alike(store, "pinned", passage(5, BLOCK), pin=True)
    writer.alike(store, "session", passage(6, 2 * BLOCK + 1), session="chat")
    writer.alike(store, "tenant-session", passage(7, BLOCK), session="chat of a tenant", namespace=TENANT)
    writer.alike(store, "deleted", passage(8, BLOCK), found=0)
    store.flush()
    store.delete(passage(8, BLOCK))


def _with_the_profile(writer: Writer, store: KVStore, profile: Profile) -> None:
    tokens = ((np.arange(2 * BLOCK + 11) * 37 + 5) % VOCABULARY).astype(np.uint32)
    kv = predicted_kv(profile, tokens, 0)
    writer.put(store, "predicted", tokens[: BLOCK + 7], [(k[:, : BLOCK + 7], v[:, : BLOCK + 7]) for k, v in kv])
    store.flush()
    writer.put(store, "predicted and longer", tokens, kv)  # whose second block replaces a tail
    other = passage(20)
    writer.alike(store, "other", other)
    store.flush()
    writer.alike(store, "propagated", family_stores.behind(30, other, BLOCK + 5))
    writer.alike(store, "both", join(passage(31, BLOCK), other[: 2 * BLOCK], passage(1)[BLOCK:]))


def _with_long_sessions(writer: Writer, store: KVStore) -> None:
    """Two that share what they begin with, and a fork."""
    tokens = passage(50, 290)
    writer.alike(store, "long", tokens, session="long")
    writer.alike(store, "longer", np.concatenate([tokens[:256], passage(51, 24)]), session="longer", ttl=_CENTURY)
    store.session("long").fork("twig")
    writer.manifest["sessions"]["twig"] = writer.manifest["sessions"]["long"]


def read(store: KVStore, sequence: dict[str, Any]) -> Hit | None:
    return store.get(np.array(sequence["tokens"], np.uint32), namespace=sequence["namespace"].encode())
