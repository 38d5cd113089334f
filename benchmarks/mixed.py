"""Puts, gets, resumes and evictions at once: ours and others under the same load, `python -m benchmarks.mixed`.

`[--quick] [--threads 1 4 16] [--working 0.5 2 10] [--only NAME ...] [--lmcache PYTHON] [--memory MIB] [--slices N]
[--seconds S]`

Sessions chosen by Zipf's law hold conversations of 1 to 8 blocks of 512 KiB; a fifth of the calls put the next block,
a tenth resume a session by name, the others get. The sessions hold 0.5, 2 and 10 times what the host tier may (`--host`
MiB). Each subject is a process of its own; slices of a few seconds run in turns. Percentiles are of all slices.

Every subject may take the same memory, the page cache of its files included: --memory MiB (4 times the host tier) more
than it has when it is open, held by a control group (`memory` in the rows: 0 where this machine allows none, and
everybody then has the page cache of the whole machine). Ours has the host tier and reads past the page cache. All end
with a tensor of each layer's K and V; those of the others are views of bytes that nobody checked, in memory that was
there, in pieces that a model could not use as they are. A put is not durable when it returns, for any of them but LMDB,
which knows no other way that survives a power cut. What is written is counted by the system,
for the process; with `--device` also for the whole device, which must have nothing else to do then. Where the file
system has large folios (here ext4 of Linux 6.18), a page that is written to a cached file counts as its whole folio for
the process, up to 256 pages: the others are counted too high by that, and so is the catalog of ours.

--lmcache: the Python of the environment of `make test-lmcache`, for LMCache's `fs_native`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, Rows, arguments, percentile, scratch
from benchmarks.peers.stores.keyed import KEYED
from benchmarks.workloads.memory import remove_group

TAILS = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def main() -> None:
    parser = arguments("Puts, gets, resumes and evictions at once, beside other stores.")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 4, 16))
    parser.add_argument("--working", nargs="+", type=float, default=(0.5, 2, 10), help="times the host tier")
    parser.add_argument("--host", type=int, default=64, metavar="MIB", help="host memory of ours (64)")
    parser.add_argument("--memory", type=int, metavar="MIB", help="of each subject (4 times --host; 0: no limit)")
    parser.add_argument("--only", nargs="+", choices=["store", *KEYED], help="subjects (all that are installed)")
    parser.add_argument("--slices", type=int, default=4, help="of each subject and number of threads (4)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a slice (1.5)")
    parser.add_argument("--device", action="store_true", help="count what the device writes, too")
    parser.add_argument("--dir", type=Path, help="where values are kept (default: build/scratch)")
    parser.add_argument("--lmcache", type=Path, metavar="PYTHON", help="to run fs_native with")
    args = parser.parse_args()
    args.memory = 4 * args.host if args.memory is None else args.memory
    if args.quick:
        args.threads, args.working, args.slices, args.seconds = (4,), (2,), 2, 0.7
    names = args.only or [
        "store",
        *(name for name, (module, _) in KEYED.items() if find_spec(module) or (name == "fs_native" and args.lmcache)),
    ]
    rows = Rows("mixed", args.json)
    for working in args.working:
        with scratch("mixed", args.dir) as folder:
            measure(rows, folder, names, working, args)
    rows.main_exit()


def measure(rows: Rows, folder: Path, names: list[str], working: float, args: Any) -> None:
    """Rows of all subjects with one working set."""
    served = {}
    try:
        for name in names:  # filled one after the other
            python = str(args.lmcache) if name == "fs_native" and args.lmcache else sys.executable
            sizes = args.host * MIB, int(working * args.host * MIB), args.memory * MIB
            served[name] = Served(python, name, folder / name, sizes)
            rows.add(f"{name}/{working:g}x-host", "memory", served[name].memory / MIB, "MiB")
        for threads in args.threads:
            slices: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for number in range(args.slices):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    slices[name].append(served[name].run(threads, args.seconds, number, args.device))
            case = f"{working:g}x-host/{threads}-threads"
            for name in ["store", *(name for name in names if name != "store")]:
                if name in slices:
                    add_rows(rows, name, case, slices[name], slices.get("store"), args.seconds * args.slices)
    finally:
        for one in served.values():
            one.close()


def add_rows(
    rows: Rows, name: str, case: str, slices: list[dict[str, Any]], ours: list[dict[str, Any]] | None, seconds: float
) -> None:
    full = f"{name}/{case}"
    for call in ("get", "put", "resume"):
        samples = [x for one in slices for x in one[call]]
        if not samples:
            continue
        for tail, share in TAILS.items():
            value = 1000 * percentile(samples, share)
            rows.add(full, f"{call}_{tail}_ms", value, "ms")
            if ours is not None and name != "store" and call == "get":
                mine = 1000 * percentile([x for one in ours for x in one[call]], share)
                rows.add(f"store/{case}", f"{call}_{tail}_of_peer", mine / value, "share", name, mine / value)
        rows.add(full, f"{call}s", len(samples) / seconds, "calls/s")
    hits, misses = (sum(one[key] for one in slices) for key in ("hits", "misses"))
    rows.add(full, "hits", hits / max(1, hits + misses), "share")
    put = sum(one["put_bytes"] for one in slices)
    rows.add(full, "written_by_process", sum(one["written_bytes"] for one in slices) / put, "of the bytes put")
    if "device_bytes" in slices[0]:
        rows.add(full, "written_by_device", sum(one["device_bytes"] for one in slices) / put, "of the bytes put")
    rows.add(full, "live", slices[-1]["live_bytes"] / slices[-1]["file_bytes"], "of the bytes of its files")


class Served:
    """A process that keeps one subject. `memory`: bytes that it may take, 0 for no limit."""

    def __init__(self, python: str, name: str, folder: Path, sizes: tuple[int, int, int]) -> None:
        """sizes: bytes of the host tier, of the working set and of the memory that it may take."""
        self._folder = folder
        command = [python, "-m", "benchmarks.workloads.mixed", name, str(folder), *map(str, sizes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.memory: int = self._answer()["memory"]

    def run(self, threads: int, seconds: float, seed: int, device: bool) -> dict[str, Any]:
        """One slice; with `device` also what the device wrote meanwhile."""
        before = device_written(self._folder) if device else 0
        assert self._process.stdin is not None
        print(json.dumps({"threads": threads, "seconds": seconds, "seed": seed}), file=self._process.stdin, flush=True)
        answer = self._answer()
        if device:
            answer["device_bytes"] = device_written(self._folder) - before
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            remove_group(self._process.pid)
            raise RuntimeError(f"{self._process.args} ended with status {status}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        remove_group(self._process.pid)


def device_written(folder: Path) -> int:
    """Bytes that the device under a folder has written, all programs together."""
    device = folder.stat().st_dev
    major, minor = device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00
    return int(Path(f"/sys/dev/block/{major}:{minor}/stat").read_text().split()[6]) * 512


if __name__ == "__main__":
    main()
