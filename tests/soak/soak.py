"""A soak: for hours a writer of eight threads and four readers do everything at once, and every get is checked.

    PYTHONPATH=tests/helpers python tests/soak/soak.py --hours 0.75 [--folder build/soak] [--seed 7]

A folder remembers how long it was soaked: the same command goes on where it was left. Each life of the writer ends in
another way, and the next one opens what it left. samples.jsonl has memory, descriptors, threads and bytes on disk over
time; violations.jsonl what was wrong. The last line says both in short, and the exit status is 1 where anything was
wrong, grew without end, or took more of the disk than its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from workers import pid_bytes
from worlds import WORLDS, World

HERE = Path(__file__).resolve().parent
READERS = 4
ENDS = ("close", "kill", "leave", "kill")
SAMPLE_S = 2.0
GRACE_S = 240.0  # that a life may take longer than it was given
MOST_GROWTH, MOST_SHARE = 32 << 20, 0.10  # of memory in a life, after its first quarter


class Soak:
    def __init__(self, folder: Path, seed: int | None, calm: bool) -> None:
        self.folder, self.calm = folder, calm
        folder.mkdir(parents=True, exist_ok=True)
        known = self._state() or {
            "seed": seed if seed is not None else random.randrange(1 << 30),
            "life": 0,
            "seconds": 0.0,
        }
        self.seed, self.life, self.seconds = known["seed"], known["life"], known["seconds"]
        self.rng = random.Random(self.seed * 1_000_003 + self.life)

    def _state(self) -> dict[str, Any] | None:
        path = self.folder / "state.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def run(self, seconds: float) -> None:
        print(f"seed {self.seed}, life {self.life}, {self.seconds:.0f} of {seconds:.0f} s done", flush=True)
        while self.seconds < seconds:
            begin = time.monotonic()
            length = min(900.0, max(30.0, seconds / 8), max(30.0, seconds - self.seconds))
            self._live(WORLDS[self.life % len(WORLDS)], ENDS[self.life // len(WORLDS) % len(ENDS)], length)
            self.life, self.seconds = self.life + 1, self.seconds + time.monotonic() - begin
            state = {"seed": self.seed, "life": self.life, "seconds": self.seconds}
            (self.folder / "state.json").write_text(json.dumps(state))
            if self._wrong():
                return

    def _live(self, world: World, end: str, seconds: float) -> None:
        """One life of the writer, and its readers."""
        how = "work" if end == "kill" else end
        arguments = [str(self.folder), world.name, str(self.life), str(self.rng.getrandbits(40)), str(seconds), how]
        arguments.append(str(int(self.calm)))
        begin = time.monotonic()
        writer = self._start("writer.py", arguments)
        readers = [self._reader(world) for _ in range(READERS)]
        kill_at = begin + seconds * self.rng.uniform(0.7, 1.0) if end == "kill" else begin + seconds + GRACE_S
        try:
            while writer.poll() is None and time.monotonic() < kill_at:
                time.sleep(SAMPLE_S)
                self._sample(world, [writer, *readers])
                self._disturb(world, readers)
            if writer.poll() is None and end != "kill":
                self._note(world, f"life {self.life} does not end")
                writer.send_signal(signal.SIGABRT)  # its log says where each thread is
                writer.wait(20)
            elif end == "kill" and writer.poll() is None:
                writer.kill()
            elif writer.returncode:
                self._note(world, f"life {self.life} ended with status {writer.returncode}")
        finally:
            for process in (writer, *readers):
                process.kill()
                process.wait()

    def _start(self, program: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = (self.folder / f"{program}.log").open("ab")
        command = [sys.executable, "-X", "faulthandler", str(HERE / program), *arguments]
        return subprocess.Popen(command, env=env, stderr=log, stdout=log)

    def _reader(self, world: World) -> subprocess.Popen[bytes]:
        return self._start("reader.py", [str(self.folder), world.name, str(self.rng.getrandbits(40))])

    def _disturb(self, world: World, readers: list[subprocess.Popen[bytes]]) -> None:
        """Now and then a reader is stopped for a while, or killed in the middle of something."""
        index, chance = self.rng.randrange(READERS), self.rng.random()
        if readers[index].poll() is not None:
            self._note(world, f"a reader ended with status {readers[index].returncode}")
            readers[index] = self._reader(world)
        elif chance < 0.03:
            readers[index].kill()
            readers[index].wait()
            readers[index] = self._reader(world)
        elif chance < 0.06:
            readers[index].send_signal(signal.SIGSTOP)
            time.sleep(self.rng.random() * 3)
            readers[index].send_signal(signal.SIGCONT)

    def _note(self, world: World, text: str) -> None:
        with (self.folder / "violations.jsonl").open("a") as file:
            file.write(json.dumps({"life": self.life, "world": world.name, "wrong": text}) + "\n")

    def _sample(self, world: World, processes: list[subprocess.Popen[bytes]]) -> None:
        used = _allocated(self.folder / world.name)
        if used > world.budget() and not any("bytes on disk" in row["wrong"] for row in self._wrong()):
            self._note(world, f"{used} bytes on disk, budget {world.budget()}")
        memory = [pid_bytes(p.pid)["rss"] for p in processes if p.poll() is None]
        row = {
            "t": time.time(),
            "who": "disk",
            "life": self.life,
            "world": world.name,
            "bytes": used,
            "rss": sum(memory),
        }
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    # ---- what came of it ----

    def _wrong(self) -> list[Any]:
        path = self.folder / "violations.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def report(self) -> dict[str, Any]:
        rows = [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]
        last: dict[Any, Counter[str]] = {}
        for row in rows:
            if "counts" in row:
                last[row["who"], row.get("life"), row["pid"]] = Counter(row["counts"])
        writers = sum((c for (who, _, _), c in last.items() if who == "writer"), Counter())
        readers = sum((c for (who, _, _), c in last.items() if who == "reader"), Counter())
        leaks = _leaks([row for row in rows if row["who"] == "writer"])
        disk = {
            world.name: max(
                (row["bytes"] for row in rows if row["who"] == "disk" and row["world"] == world.name), default=0
            )
            / world.budget()
            for world in WORLDS
        }
        return {
            "hours": round(self.seconds / 3600, 3), "lives": self.life, "seed": self.seed, "writer": writers,
            "readers": readers, "most_of_the_disk": disk, "leaks": leaks, "wrong": len(self._wrong()),
        }  # fmt: skip


def _allocated(folder: Path) -> int:
    """What everything in the folder of a store takes, whatever comes and goes meanwhile."""
    total = 0
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def _leaks(rows: list[dict[str, Any]]) -> list[str]:
    """Of each life: what grew from its second quarter to its last. Samples are taken at rest."""
    lives: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        lives.setdefault(row["life"], []).append(row)
    found = []
    for life, samples in lives.items():
        if len(samples) < 12:
            continue
        quarter = len(samples) // 4
        before, after = samples[quarter : 2 * quarter], samples[-quarter:]
        for name in ("rss", "files", "threads"):
            # How many files of segments are open at rest changes with what was used last; what leaks stays open.
            typical = statistics.median if name == "rss" else min
            one, two = (typical(row[name] for row in part) for part in (before, after))
            most = max(MOST_GROWTH, MOST_SHARE * one) if name == "rss" else 2
            if two - one > most:
                found.append(f"life {life}: {name} grew from {one:.0f} to {two:.0f}")
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hours", type=float, default=0.75)
    options.add_argument("--folder", type=Path, default=Path("build/soak"))
    options.add_argument("--seed", type=int)
    options.add_argument("--calm", action="store_true", help="no interrupts")
    chosen = options.parse_args()
    soak = Soak(chosen.folder.resolve(), chosen.seed, chosen.calm)
    soak.run(chosen.hours * 3600)
    report = soak.report()
    for row in soak._wrong()[:20]:
        print(json.dumps(row))
    print(json.dumps(report))
    sys.exit(1 if report["wrong"] or report["leaks"] else 0)


if __name__ == "__main__":
    main()
