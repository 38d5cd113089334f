"""One damaged byte of a member or a donor per trial: who is lost, and above all who is not. Run by helpers/trials.py.

Every trial copies the same small store of two families, damages it, opens it and holds it against what was put.
"""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import family_stores
import seeds
import small_stores

from kvstore import KVStore

HEADER = (0, 224)  # all of it but the sums, which damage_trials.py goes through
KINDS = (
    "member_header", "member_donors", "member_tokens", "member_payload", "member_spans", "donor_header",
    "donor_tokens", "donor_payload", "catalog_donors",
)  # fmt: skip
_TEXTS = (family_stores.passage(1), family_stores.passage(2, 70))
_SEQUENCES = (
    *_TEXTS,
    family_stores.behind(10, _TEXTS[0], 11),
    family_stores.join(_TEXTS[1][: 2 * family_stores.BLOCK], family_stores.passage(12, 40), _TEXTS[0][40:]),
    family_stores.behind(11, family_stores.join(_TEXTS[1], _TEXTS[0][: 2 * family_stores.BLOCK])),
)


def build(path: Path) -> list[Any]:
    """Returns all entries; the store is closed."""
    with KVStore(path, family_stores.IDENTITY, family_stores.config()) as store:
        for tokens in _SEQUENCES:
            family_stores.put(store, tokens)
            store.flush()
        assert family_stores.members(store) >= 6
        return small_stores.catalog_entries(store)


def many(kind: str, seeds: int, shared: str) -> dict[str, int]:
    """One trial per seed. Counts what became of the store. shared: a folder for what all kinds need."""
    outcomes: dict[str, int] = {}
    template, kept = Path(shared, "template"), Path(shared, "built")
    if not kept.exists():
        small_stores.keep_entries(kept, build(template))
    entries = small_stores.kept_entries(kept)
    with small_stores.scratch() as folder:
        for seed in range(seeds):
            shutil.copytree(template, folder / "store")
            try:
                outcome = flip(folder / "store", entries, kind, seed)
            except Exception as error:
                raise AssertionError(f"{kind}, seed {seed}: {error!r}") from error
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            shutil.rmtree(folder / "store")
    return outcomes


def flip(path: Path, entries: list[Any], kind: str, seed: int) -> str:
    """Flips one bit of a byte of that kind. Returns what became of the store."""
    rng = random.Random(f"{kind}/{seeds.nth(seed)}")
    needed = {donor for entry in entries for donor in entry.donors}
    hit = rng.choice([e for e in entries if (e.record in needed if kind.startswith("donor") else e.donors)])
    if kind == "catalog_donors":
        file, packed = path / "catalog" / "data.mdb", hit.pack()
        wrong = bytearray(packed)
        wrong[rng.randrange(len(packed) - 8 * len(hit.donors), len(packed))] ^= 1 << rng.randrange(8)
        file.write_bytes(file.read_bytes().replace(packed, wrong))  # in the pages that are in use, and in old ones
        return _check(path, {}, entries)
    file = path / "segments" / f"{hit.extent.segment:08x}.seg"
    first, last = _place(file.read_bytes()[hit.extent.offset :][: hit.extent.nbytes], kind.partition("_")[2])
    small_stores.flip(file, hit.extent.offset + rng.randrange(first, last), 1 << rng.randrange(8))
    lost = {hit.record} | {e.record for e in entries if hit.record in e.donors}
    return _check(path, {e.record: e for e in entries if e.record in lost}, entries)


def _place(record: bytes, what: str) -> tuple[int, int]:
    (payload,) = struct.unpack_from("<I", record, 12)
    (payload_bytes,) = struct.unpack_from("<Q", record, 176)
    count, _, layers = struct.unpack_from("<III", record, 184)
    (donors,) = struct.unpack_from("<H", record, 216)
    tokens = 256 + 4 * layers
    return {
        "header": HEADER,
        "tokens": (tokens, tokens + 4 * count),
        "donors": (tokens + 4 * count, tokens + 4 * count + 40 * donors),
        "spans": (payload, payload + 32),
        "payload": (payload, payload + payload_bytes),
    }[what]


def _left(tokens: Any, lost: dict[int, Any]) -> int:
    """How many leading tokens no lost block holds."""
    starts = [
        entry.start
        for entry in lost.values()
        if tokens[entry.start : entry.start + len(entry.tokens)].tolist() == entry.tokens.tolist()
    ]
    return min(starts, default=len(tokens))


def _check(path: Path, lost: dict[int, Any], entries: list[Any]) -> str:
    order = sorted(_SEQUENCES, key=len, reverse=len(lost) % 2 == 0)
    with KVStore(path, family_stores.IDENTITY, family_stores.config()) as store:
        for tokens in order:
            there, left = family_stores.stored(store, tokens), _left(tokens, lost)
            assert there == left, f"a sequence of {len(tokens)}: {there} tokens left, expected {left}"
        counters = store.stats()["counters"]
        assert counters.get("quarantined_records", 0) == len(lost)
        family_stores.families_hold(store)
        for tokens in _SEQUENCES:
            family_stores.put(store, tokens)
        assert store.flush().dropped_blocks == 0
        signs = ("catalog_rebuilt", "mended_entries", "quarantined_records")
        outcome = next((sign for sign in signs if counters.get(sign)), "fine")
    with KVStore(path, family_stores.IDENTITY, family_stores.config()) as store:
        for tokens in _SEQUENCES:
            assert family_stores.stored(store, tokens) == len(tokens)
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
    return outcome
