"""What a disk may hold after a power cut, from a recording of all calls that were made (helpers/shim.py).

Whatever was synced is there. Of everything else any part may be: every sector of every write, every size, every name,
in any order. Names are synced with their folder, as POSIX has it; Linux file systems promise more.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from shim import Event

SECTORS = (512, 4096)
_MANNERS = ("all", "none", "some", "most", "few", "early", "late")  # of what is not synced: what is kept


@dataclass
class File:
    """One file while its calls are made again. pieces: the calls that change it, by number."""

    pieces: list[tuple[int, Event]] = field(default_factory=list)
    content: bytes = b""


@dataclass(frozen=True)
class Tree:
    """Folders and files, by names relative to a root."""

    folders: frozenset[str]
    files: dict[str, bytes]

    @classmethod
    def of(cls, root: Path) -> tuple[Tree, dict[int, str]]:
        """Whatever is there now, and the names by inodes."""
        folders, files, names = {""}, {}, {}
        for folder, _, inside in os.walk(root):
            folders.add(os.path.relpath(folder, root).removeprefix("."))
            for name in inside:
                path = os.path.join(folder, name)
                short = os.path.relpath(path, root)
                files[short] = Path(path).read_bytes()
                names[os.stat(path).st_ino] = short
        return cls(frozenset(folders), files), names

    def write(self, root: Path) -> None:
        for folder in sorted(self.folders):
            (root / folder).mkdir(exist_ok=True)
        for name, content in self.files.items():
            (root / name).write_bytes(content)


class Chooser:
    """Says of each thing that was not synced whether it reached the disk."""

    def __init__(self, rng: random.Random, events: int) -> None:
        self._rng = rng
        self.sector = rng.choice(SECTORS)
        self.manner = rng.choice(_MANNERS)
        self._border = rng.randrange(events + 1)

    def keeps(self, number: int) -> bool:
        rng = self._rng
        chance = {"all": 1.0, "none": 0.0, "some": 0.5, "most": 0.95, "few": 0.05}.get(self.manner)
        if chance is not None:
            return rng.random() < chance
        near = abs(number - self._border) < 2  # the call in the middle of which it happened
        return rng.random() < 0.5 if near else (number < self._border) == (self.manner == "early")


class Recording:
    """All calls below `root` since it was `before`; `at` makes the folder of a cut."""

    def __init__(self, root: Path, before: tuple[Tree, dict[int, str]], events: list[Event]) -> None:
        self._root = str(root)
        self._before, self._inodes = before
        self.events = events

    def marks(self, cut: int) -> list[bytes]:
        """What was noted before the cut."""
        return [event.data for event in self.events[:cut] if event.kind == "marked"]

    def at(self, cut: int, rng: random.Random) -> Tree:
        """What may be left after a cut before event number `cut`."""
        events, keeps = self.events[:cut], Chooser(rng, cut)
        synced = _Synced(events, self._root)
        folders, names = set(self._before.folders), {name: File(content=c) for name, c in self._before.files.items()}
        files = {inode: names[name] for inode, name in self._inodes.items()}
        for number, event in enumerate(events):
            if event.kind in ("created", "renamed", "unlinked", "made"):
                self._rename(number, event, folders, names, files, synced, keeps)
            elif event.kind in ("wrote", "zeroed", "cut", "grew") and event.inode in files:
                files[event.inode].pieces.append((number, event))
        found = {name: file for name, file in names.items() if os.path.dirname(name) in folders}
        return Tree(frozenset(folders), {name: _content(file, synced, keeps) for name, file in found.items()})

    def _rename(
        self, number: int, event: Event, folders: set[str], names: dict[str, File], files: dict[int, File],
        synced: _Synced, keeps: Chooser,
    ) -> None:  # fmt: skip
        one, _, other = event.data.decode().partition("\0")
        name, target = _short(one, self._root), _short(other, self._root)
        if event.kind == "created":
            files[event.inode] = File()  # inodes come again
        is_there = synced.name(number, os.path.dirname(name)) or keeps.keeps(number)
        if not is_there or os.path.dirname(name) not in folders:
            return
        if event.kind == "made":
            folders.add(name)
        elif event.kind == "created":
            names[name] = files[event.inode]
        elif name in names:
            file = names.pop(name)
            if event.kind == "renamed":
                names[target] = file


class _Synced:
    """What must be there after the cut: the last sync of each file, by inode and in the life of it."""

    def __init__(self, events: list[Event], root: str) -> None:
        self._syncs: dict[int, list[tuple[int, int, int]]] = {}  # inode -> (number, events before, only)
        self._folders: dict[str, int] = {}
        for number, event in enumerate(events):
            if event.kind == "synced":
                self._syncs.setdefault(event.inode, []).append((number, event.a, event.b))
                name = _short(event.data.decode(), root)
                self._folders[name] = max(self._folders.get(name, 0), event.a)
        self._births: dict[int, list[int]] = {}
        for number, event in enumerate(events):
            if event.kind == "created":
                self._births.setdefault(event.inode, []).append(number)

    def piece(self, number: int, event: Event) -> bool:
        """Whether a later sync of the same file holds it."""
        born = next((b for b in self._births.get(event.inode, ()) if b > number), None)
        return any(
            number == only or (only < 0 and number < before and (born is None or at < born))
            for at, before, only in self._syncs.get(event.inode, ())
        )

    def name(self, number: int, folder: str) -> bool:
        """Whether the folder was synced since."""
        return number < self._folders.get(folder, -1)


def _short(path: str, root: str) -> str:
    return path.removeprefix(root).strip("/")


def _content(file: File, synced: _Synced, keeps: Chooser) -> bytes:
    data = bytearray(file.content)
    for number, event in file.pieces:
        durable = synced.piece(number, event)
        if event.kind in ("wrote", "zeroed"):
            new = event.data if event.kind == "wrote" else bytes(event.b)
            _write(data, event.a, new, number, None if durable else keeps)
        elif durable or keeps.keeps(number):
            size = event.a
            if event.kind == "cut":
                del data[size:]
            data.extend(bytes(max(0, size - len(data))))
    return bytes(data)


def _write(data: bytearray, offset: int, new: bytes, number: int, keeps: Chooser | None) -> None:
    step = keeps.sector if keeps is not None else max(1, len(new))
    done = 0
    while done < len(new):
        size = min(len(new) - done, step - (offset + done) % step if keeps is not None else step)
        if keeps is None or keeps.keeps(number):
            begin = offset + done
            data.extend(bytes(max(0, begin - len(data))))
            data[begin : begin + size] = new[done : done + size]
        done += size
