"""Builds tests/neon/machines.cc for this machine and for aarch64, and runs it: natively, or under qemu-user."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "fuzz"))
from run import NATIVE

ROOT = Path(__file__).resolve().parents[2]
CSRC, TARGETS, OWN = ROOT / "csrc", ROOT / "tests" / "fuzz" / "targets", ROOT / "tests" / "neon"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
COMPILE = ("-std=c++17", "-Wall", "-Werror", "-ffp-contract=off", f'-DROOT="{ROOT}"', f"-I{CSRC}", f"-I{TARGETS}")


PARTS = tuple(name for name in NATIVE if name != "catalog_file")  # which has no twins
BY_HAND = ("splitzip", "entropy", "rans", "predictive", "levels", "trie")  # entropy calls rANS


@dataclass(frozen=True)
class Program:
    """machines.cc as a compiler makes it, with some of its parts or all, and how csrc is optimised. Any warning is an
    error. All parts: all of csrc is compiled."""

    compiler: str
    parts: tuple[str, ...] = PARTS
    core: str = "-O3"

    def build(self) -> Path:
        """The program, of what changed since it was built last."""
        folder = ROOT / "build" / "neon" / f"{self.compiler}-{len(self.parts)}{self.core}"
        folder.mkdir(parents=True, exist_ok=True)
        few = ["-DFEW"] if self.parts != PARTS else []
        work = [(OWN / f"{name}.cc", [*few, "-O1"], folder / f"{name}.o") for name in ("machines", "kernels")]
        for name in self.parts:
            target = NATIVE[name]
            more = [*([target.define] if target.define else []), f"-DLLVMFuzzerTestOneInput=try_{name}", "-O1"]
            work.append((TARGETS / target.file, more, folder / f"target-{name}.o"))
        sources = {CSRC / source for name in self.parts for source in NATIVE[name].sources}
        if not few:
            sources = {path for path in CSRC.rglob("*.cc") if "bindings" not in path.parts}
        for source in sorted(sources):
            label = "-".join(source.relative_to(CSRC).parts)
            work.append((source, ["-Wextra", self.core], folder / f"csrc-{label}.o"))
        stamp = _stamp()
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda one: self._compile(*one, stamp), work))
        program = folder / "machines"
        _run([self.compiler, "-static", *(str(made) for _, _, made in work), "-o", str(program)])
        return program

    def _compile(self, source: Path, more: list[str], made: Path, stamp: str) -> None:
        note = made.with_suffix(".hash")
        text = hashlib.sha256(repr((COMPILE, more, stamp)).encode() + source.read_bytes()).hexdigest()
        if made.exists() and note.exists() and note.read_text() == text:
            return
        _run([self.compiler, *COMPILE, *more, "-c", str(source), "-o", str(made)])
        note.write_text(text)


def _stamp() -> str:
    """Of all headers."""
    found = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*.h"), *TARGETS.glob("*.h")]):
        found.update(path.read_bytes())
    return found.hexdigest()


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode:
        raise AssertionError(f"{' '.join(command[:3])} ...: {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def tools() -> bool:
    """Whether aarch64 programs can be made and run here."""
    return bool(shutil.which(CROSS) and shutil.which(EMULATOR) and shutil.which("g++"))


def outputs(program: Path, to: Path, cases: int, level: str, processor: str | None = None) -> str:
    """Writes what a program makes to a file, and returns what it says. processor: what qemu stands for; None: ours."""
    command = [*([EMULATOR, "-cpu", processor] if processor else []), str(program), str(to), str(cases)]
    return _run(command, {"KVSTORE_CPU": level})


def first_difference(one: Path, two: Path) -> str | None:
    """The case from which on two files differ."""
    with one.open("rb") as a, two.open("rb") as b:
        while True:
            head, other = a.readline(), b.readline()
            if not head and not other:
                return None
            size = int(head.split()[-1]) if head == other else -1
            if size < 0 or a.read(size) != b.read(size):
                return f"{head.decode().strip()} / {other.decode().strip()}"
