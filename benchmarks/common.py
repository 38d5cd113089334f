"""What every benchmark shares: arguments, result rows, interleaved medians, and the ceilings of this machine.

A benchmark is `python -m benchmarks.NAME [--quick] [--json FILE] [--model DIR|NAME] [--text FILE]`. Each row it
prints is one JSON object {bench, case, metric, value, unit, peer, ratio}; `ratio` is ours / peer, both null
without a peer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

MIB = 1 << 20
ALIGN = 4096
HUGE_PAGE = 2 * MIB
MODEL = "checkpoint, or a name of `python -m benchmarks.models` (default: installed SmolLM2)"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the four arguments that every benchmark understands; callers add their own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer; ends in a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows to FILE, as an array")
    parser.add_argument("--model", type=Path, metavar="DIR|NAME", help=MODEL)
    parser.add_argument("--text", type=Path, metavar="FILE", help="text (default: installed conversations)")
    return parser


def use_helpers_of_tests() -> None:
    """Lets a benchmark import the models that the tests are made of, in tests/helpers."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))


class Rows:
    """The result rows of one benchmark: each is printed as a line of JSON the moment it is known.

    `json_path` (the --json argument) gets all rows as an array, rewritten after every row, so that an
    interrupted run keeps what it measured.
    """

    def __init__(self, bench: str, json_path: Path | None = None) -> None:
        self.bench = bench
        self.json_path = json_path
        self.rows: list[dict[str, object]] = []

    def add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        peer: str | None = None,
        ratio: float | None = None,
    ) -> None:
        """Adds one row. Raises `ValueError` for a value that is not a finite number, or a ratio without a
        peer."""
        for name, number in (("value", value), ("ratio", ratio)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name}: expected a finite number for {case} {metric}, found {number!r}")
        if (peer is None) != (ratio is None):
            raise ValueError(f"{case} {metric}: peer and ratio go together, found {peer!r} and {ratio!r}")
        row: dict[str, object] = {"bench": self.bench, "case": case, "metric": metric, "value": _short(value)}
        row |= {"unit": unit, "peer": peer, "ratio": None if ratio is None else _short(ratio)}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.json_path is not None:
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(json.dumps(self.rows, indent=1) + "\n")

    def main_exit(self, ok: bool = True) -> None:
        """Ends the program: status 0 if `ok` and at least one row was measured."""
        sys.exit(0 if ok and self.rows else 1)


def _short(number: float) -> float:
    """Six significant digits: what a measurement can bear."""
    return number if isinstance(number, int) else float(f"{number:.6g}")


def interleave(
    functions: Mapping[str, Callable[[], object]], repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds per call of each function: the median of `repeats` rounds, every round calling all in a new
    order.

    Interleaving lets a slow minute of the machine hit all alike. A function that returns a float reports its
    own time (so that it can leave its preparation out); otherwise the whole call is timed, by `clock`. Order is
    seeded.
    """
    order = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        names = list(functions)
        order.shuffle(names)
        for name in names:
            start = clock()
            own = functions[name]()
            elapsed = clock() - start
            samples[name].append(own if isinstance(own, float) else elapsed)
    return {name: statistics.median(values) for name, values in samples.items()}


def together(jobs: Sequence[Callable[[], object]]) -> float:
    """Seconds in which as many threads did the jobs. Raises the error of the first job that met one."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    return time.perf_counter() - begin


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, `share` from 0 to 1."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def memcpy_ceiling(size: int = 256 * MIB, repeats: int = 7) -> float:
    """Bytes per second that one thread copies between two warm buffers of `size` bytes (read once, written
    once)."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return size / interleave({"memcpy": lambda: np.copyto(target, source)}, repeats)["memcpy"]


def aligned(size: int, huge: bool = False) -> memoryview:
    """An anonymous page-aligned buffer, as O_DIRECT wants it, faulted in and filled with incompressible bytes.

    huge: of huge pages, where the system gives them. A request to a disk lists the pages of its buffer: with few of
    them it is up to twice as fast, and a ceiling that few programs come near.
    """
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    begin = -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE
    buffer = memoryview(mapping)[begin : begin + size]
    noise = random.Random(1).randbytes(min(size, MIB))
    for start in range(0, size, len(noise)):
        buffer[start : start + len(noise)] = noise[: size - start]
    return buffer


@contextlib.contextmanager
def direct_file(folder: Path, size: int) -> Iterator[int]:
    """A descriptor opened with O_DIRECT on a preallocated, once written file of `size` bytes; deleted
    afterwards.

    `size` is a multiple of 4 MiB. Raises `OSError` where the file system has no O_DIRECT: then there is no
    ceiling.
    """
    path = Path(folder) / f"ceiling.{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        direct_write(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def direct_write(descriptor: int, size: int, chunk: int = 4 * MIB, offset: int = 0, huge: bool = False) -> float:
    """Seconds to write `size` bytes at `offset` in writes of `chunk` (multiples of 4096), with one
    fdatasync. huge: see `aligned`."""
    buffer = aligned(chunk, huge)
    start = time.perf_counter()
    for at in range(offset, offset + size, chunk):
        part = buffer[: min(chunk, offset + size - at)]
        if os.pwrite(descriptor, part, at) != len(part):
            raise OSError(f"short write at {at}")
    os.fdatasync(descriptor)
    return time.perf_counter() - start


def direct_read(descriptor: int, size: int, chunk: int, count: int, seed: int = 0, huge: bool = False) -> float:
    """Seconds for `count` random reads of `chunk` bytes (a multiple of 4096) from the first `size` bytes. huge: see
    `aligned`."""
    order = random.Random(seed)
    places = [order.randrange(max(1, size // chunk)) * chunk for _ in range(count)]
    buffer = aligned(chunk, huge)
    start = time.perf_counter()
    for place in places:
        if os.preadv(descriptor, [buffer], place) != chunk:
            raise OSError(f"short read at {place}")
    return time.perf_counter() - start


def write_ceiling(folder: Path, size: int = 256 * MIB, repeats: int = 5) -> float:
    """Bytes per second of O_DIRECT writes of 4 MiB into written extents, one fdatasync at the end; median."""
    with direct_file(folder, size) as descriptor:
        return size / interleave({"write": lambda: direct_write(descriptor, size)}, repeats)["write"]


def read_ceiling(folder: Path, chunk: int = MIB, size: int = 256 * MIB, repeats: int = 5) -> float:
    """Bytes per second of random O_DIRECT reads of `chunk` bytes, one at a time; median."""
    count = max(16, 128 * MIB // chunk)
    with direct_file(folder, size) as descriptor:
        seconds = interleave({"read": lambda: direct_read(descriptor, size, chunk, count)}, repeats)["read"]
    return count * chunk / seconds


def drop_page_cache(*paths: Path, machine: bool = True) -> bool:
    """Empties the page cache: of the whole machine where that is permitted and `machine` is set, else of `paths`
    (files, or folders with all files in them) by advice. Returns whether the whole machine's was dropped."""
    os.sync()
    if machine:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
            return True
    for path in paths:
        for file in [path] if path.is_file() else [x for x in path.rglob("*") if x.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return False


def folder_bytes(folder: Path) -> int:
    """Bytes that the files under `folder` occupy on disk (allocated blocks, not lengths)."""
    return sum(x.stat().st_blocks * 512 for x in Path(folder).rglob("*") if x.is_file())


@contextlib.contextmanager
def scratch(name: str, base: Path | None = None) -> Iterator[Path]:
    """A fresh folder in `base`, else on the disk that `TMPDIR` or the current folder's build/ names; deleted
    afterwards.

    Not the system default: that is memory on many machines, and a disk is what is measured.
    """
    base = base or Path(os.environ.get("TMPDIR") or "build/scratch")
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=base) as folder:
        yield Path(folder)
