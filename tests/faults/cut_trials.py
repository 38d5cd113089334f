"""Power cuts: a store's calls are recorded once, and what a disk could hold after any of them is opened and checked.

One case is a recording, of which many cuts are made. Run by helpers/trials.py, with shim.c preloaded.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import lives
import seeds
import shim
import small_stores
from powercut import Recording, Tree
from teller import ACK

from kvstore import KVStore

_COUNTS = {"recode": 6}  # families instead of sequences
_AGAIN = 8  # of so many cuts one is followed by another in the middle of the opening


class _Marks(lives.Teller):
    """Notes what a script tells between the calls that it makes. forgetful: syncs no segment, to be caught."""

    def __init__(self, driver: shim.Driver, forgetful: bool) -> None:
        super().__init__()
        self._driver, self._forgetful = driver, forgetful

    def fdatasync(self, fd: int) -> None:
        if not (self._forgetful and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg")):
            super().fdatasync(fd)

    def __call__(self, kind: bytes, number: int = 0, length: int = 0) -> None:
        self._driver.mark(ACK.pack(kind, number, length))


def life(seed: int, phase: str, cuts: int, forgetful: bool = False) -> dict[str, int]:
    """Records a script, cuts it `cuts` times, and checks each. Counts what was cut."""
    rng = random.Random(f"{phase}/{seeds.nth(seed)}")
    found: Counter[str] = Counter()
    with small_stores.scratch() as folder:
        live = folder / "live"
        live.mkdir()
        recording = _recorded(live, phase, rng, forgetful)
        for number in range(cuts):
            at = rng.randrange(1, len(recording.events) + 1)
            again = number % _AGAIN == 0
            try:
                found += _cut(folder, recording, phase, at, random.Random(rng.random()), again)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {phase}: cut {number}, at event {at}{_kept(folder)}") from error
    return dict(found)


def _recorded(live: Path, phase: str, rng: random.Random, forgetful: bool) -> Recording:
    driver, before = shim.Driver(), Tree.of(live)
    with driver.recording(live) as events:
        count = _COUNTS.get(phase, rng.randrange(12, 40))
        store = lives.work(live / "store", phase, rng, 1, _Marks(driver, forgetful), count)
        if rng.random() < 0.5:
            store.close()
    store.close()
    return Recording(live, before, events)


def _cut(folder: Path, recording: Recording, phase: str, at: int, rng: random.Random, again: bool) -> Counter[str]:
    known = lives.Known()
    known.take([ACK.unpack(mark) for mark in recording.marks(at)])
    image = folder / "cut"
    image.mkdir()
    recording.at(at, rng).write(image)
    found = Counter(cuts=1, flushed=len(known.durable), sessions=len(known.sessions))
    if again:
        image = _cut_again(folder, image, phase, rng)
        found["again"] += 1
    if not (image / "store").exists():
        assert not known.durable, "the folder of the store is gone"
        found["before"] += 1
    lives.check(image / "store", phase, known, last=rng.random() < 0.02)
    for name in ("cut", "again"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return found


def _cut_again(folder: Path, image: Path, phase: str, rng: random.Random) -> Path:
    """The power fails a second time while the store is opened."""
    target = folder / "again"
    shutil.copytree(image, target)
    driver, before = shim.Driver(), Tree.of(image)
    with driver.recording(image) as events:
        KVStore(image / "store", lives.identity(phase), lives.config(phase)).close()
    recording = Recording(image, before, events)
    shutil.rmtree(target)
    target.mkdir()
    recording.at(rng.randrange(len(events) + 1), rng).write(target)
    return target


def _kept(folder: Path) -> str:
    """Copies the folders of a trial that failed to where KVSTORE_KEEP says."""
    keep = os.environ.get("KVSTORE_KEEP")
    if not keep:
        return "; KVSTORE_KEEP=folder keeps what was found"
    shutil.copytree(folder, Path(keep) / folder.name, dirs_exist_ok=True)
    return f"; kept in {Path(keep) / folder.name}"
