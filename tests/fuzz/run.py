"""Fuzzes the C++ that reads bytes, and the parsers in Python; `make fuzz SECONDS=60` calls this.

The C++ is compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and guided by what it reaches (driver.cc;
gcc is enough). The parsers run under atheris where it is installed. One row of JSON for each target says how often it
ran, how much of the code it reached, and what was found; anything found ends with status 1, and its input stays in
build/fuzz.

    python tests/fuzz/run.py --seconds 60 [--seed 7] [--targets trie record] [--keep]

--keep adds the inputs that reach something new to tests/fuzz/corpus, as few and as short ones as do.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fuzz"
CORPUS = HERE / "corpus"
RANS = ("rans/rans.cc", "common/cpu.cc")
MODEL = ("predictive/model.cc", *RANS)
STEPS = tuple(f"donor/steps/{name}.cc" for name in ("walk", "encode", "decode"))
COMPILE = (
    "-std=c++17", "-O1", "-g1", "-no-pie", "-ffp-contract=off", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all", f'-DROOT="{ROOT}"', f"-I{ROOT}/csrc", f"-I{HERE}/targets",
)  # fmt: skip
TRACE = ("-fsanitize-coverage=trace-pc,trace-cmp",)  # of what is under test alone
MOST_INPUT = 2048  # bytes of an input that is kept
KEPT = 60  # inputs of a parser


@dataclass(frozen=True)
class Native:
    """A target in C++: its file, what is compiled with it, and of csrc/ what it reads bytes with."""

    file: str
    sources: tuple[str, ...]
    define: str = ""


NATIVE = {
    "rans": Native("rans.cc", RANS),
    "aqua": Native("aqua.cc", ("aqua/aqua.cc", "aqua/candidates.cc", "common/cpu.cc")),
    "splitzip": Native("blocks.cc", ("splitzip/splitzip.cc", "common/cpu.cc")),
    "entropy": Native("blocks.cc", ("splitzip/splitzip.cc", "entropy/entropy.cc", *RANS), "-DENTROPY"),
    "predictive": Native(
        "predictive.cc", ("predictive/predictive.cc", "predictive/float8/float8.cc", "predictive/sections.cc", *MODEL)
    ),
    "levels": Native(
        "levels.cc",
        ("levels/levels.cc", "levels/tiles.cc", "levels/model.cc", "predictive/sections.cc", *MODEL),
    ),
    "donor": Native("donor.cc", ("donor/donor.cc", "donor/rows.cc", "predictive/sections.cc", *MODEL)),
    "groups": Native(
        "donor_groups.cc",
        ("donor/groups.cc", "donor/rows.cc", "levels/tiles.cc", "levels/model.cc", "predictive/sections.cc", *MODEL),
    ),
    "steps": Native("donor.cc", ("donor/rows.cc", *STEPS, *MODEL), "-DSTEPS"),
    "catalog_file": Native("catalog_file.cc", ("catalog/catalog.cc", "xxh3/xxh3.cc", "common/cpu.cc")),
    "lossy": Native("lossy.cc", ("lossy/lossy.cc", "lossy/model.cc", *MODEL)),
    "trie": Native("trie.cc", (*(f"trie/{name}.cc" for name in ("trie", "read", "bits", "restore")), "common/cpu.cc")),
}
PARSERS = (
    "record", "entry", "session", "profile", "superblock", "catalog", "whole_file", "resp", "llama", "gguf", "events",
    "bundle", "shared", "tsc", "archive", "speculative", "zstd",
)  # fmt: skip


def compiler() -> str | None:
    return shutil.which("g++")


def build(names: Iterable[str], jobs: int) -> None:
    """Makes the programs of C++ targets, of what changed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    headers = max(path.stat().st_mtime for path in [*(ROOT / "csrc").rglob("*.h"), *HERE.rglob("*.h")])
    commands = {}
    for source, more, made in (part for name in names for part in _parts(name)):
        if not made.exists() or made.stat().st_mtime < max(headers, source.stat().st_mtime):
            commands[made] = [*COMPILE, *more, "-c", str(source), "-o", str(made)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(_compile, commands.values()))
    for name in names:
        _compile([*COMPILE, *(str(made) for _, _, made in _parts(name)), "-o", str(BUILD / name)])


def _parts(name: str) -> list[tuple[Path, tuple[str, ...], Path]]:
    """(source, options, object file) of all that a program is made of."""
    target = NATIVE[name]
    found: list[tuple[Path, tuple[str, ...]]] = [(HERE / "driver.cc", ())]
    found.append((HERE / "targets" / target.file, (target.define,) if target.define else ()))
    found += [(ROOT / "csrc" / source, TRACE) for source in target.sources]
    label = "_".join
    return [(x, more, BUILD / f"{label([*x.relative_to(ROOT).parts, *more])}.o".replace("=", "-")) for x, more in found]


def _compile(arguments: list[str]) -> None:
    done = subprocess.run([str(compiler()), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def _places(program: Path) -> int:
    """How many places of the traced code there are."""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(program)], capture_output=True, text=True).stdout
    return sum("<__sanitizer_cov_trace_pc>" in line and "call" in line for line in text.splitlines())


def run_native(name: str, seconds: float, seed: int, keep: bool) -> dict[str, object]:
    program, out = BUILD / name, _fresh(name)
    command = [str(program), f"seconds={seconds}", f"seed={seed}", f"out={out}"]
    env = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1:max_allocation_size_mb=2048",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run([*command, *_folders(name)], capture_output=True, text=True, env=env)
    row: dict[str, object] = {"target": name, "seconds": seconds, "seed": seed, "findings": int(done.returncode != 0)}
    if done.returncode:
        row["found"] = (done.stdout + done.stderr)[-3000:]
        row["inputs"] = [str(path) for path in sorted(out.glob("crash-*")) + sorted(out.glob("slow-*"))]
        return row
    row.update(json.loads(done.stdout.splitlines()[-1]))
    row["coverage"] = round(int(str(row["places"])) / max(1, _places(program)), 3)
    if keep:
        short = _fresh(f"{name}-short")
        subprocess.run(
            [str(program), f"reduce={short}", str(out), *_folders(name)], check=True, capture_output=True, env=env
        )
        _replace(name, short.iterdir())
    return row


def run_parser(name: str, seconds: float, seed: int, keep: bool) -> dict[str, object]:
    out = _fresh(name)
    row: dict[str, object] = {"target": name, "seconds": seconds, "seed": seed}
    if importlib.util.find_spec("atheris") is None:
        return {**row, "findings": 0, "executions": 0, "skipped": "atheris is not installed"}
    path = os.pathsep.join([str(HERE.parent / "helpers"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "parsers.py"), name]
    options = [str(out), *_folders(name)]
    options += [f"-max_total_time={int(seconds)}", f"-seed={seed}", f"-artifact_prefix={out}/crash-", "-max_len=2048"]
    done = subprocess.run(
        [*command, *options, "-print_final_stats=1", "-timeout=60", "-rss_limit_mb=4096"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    text = done.stdout + done.stderr
    row["findings"] = int(done.returncode != 0)
    if done.returncode:
        return {**row, "found": text[-3000:], "inputs": [str(path) for path in out.glob("crash-*")]}
    row["executions"] = int(text.rpartition("stat::number_of_executed_units:")[2].split()[0])
    row["features"] = int(text.rpartition("ft: ")[2].split()[0]) if "ft: " in text else 0
    row["places"] = int(text.rpartition("cov: ")[2].split()[0]) if "cov: " in text else 0
    lines = subprocess.run(
        [*command[:3], "--lines", str(out), *_folders(name)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    row.update(json.loads(lines.stdout.splitlines()[-1]))
    needed = [Path(path) for path in row.pop("needed")]  # type: ignore[attr-defined]
    if keep:
        _replace(name, [*needed, *sorted(out.iterdir(), key=lambda path: path.stat().st_size)][:KEPT])
    return row


def _fresh(name: str) -> Path:
    out = BUILD / "out" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def _folders(name: str) -> list[str]:
    return [str(CORPUS / name)] if (CORPUS / name).is_dir() else []


def _replace(name: str, paths: Iterable[Path]) -> None:
    """The new corpus of a target: those of these files that are short enough."""
    kept = {path.name: path.read_bytes() for path in paths if path.stat().st_size <= MOST_INPUT}
    shutil.rmtree(CORPUS / name, ignore_errors=True)
    (CORPUS / name).mkdir(parents=True)
    for file, data in kept.items():
        (CORPUS / name / file).write_bytes(data)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0, help="for each target")
    options.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31), help="0 makes each run alike")
    options.add_argument("--targets", nargs="*", default=[*NATIVE, *PARSERS], choices=[*NATIVE, *PARSERS])
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--keep", action="store_true", help="keep what reaches something new, in tests/fuzz/corpus")
    chosen = options.parse_args()
    build([name for name in chosen.targets if name in NATIVE], chosen.jobs)
    found = 0
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        waiting = [
            pool.submit(run_native if name in NATIVE else run_parser, name, chosen.seconds, chosen.seed, chosen.keep)
            for name in chosen.targets
        ]
        for done in concurrent.futures.as_completed(waiting):
            row = done.result()
            found += int(str(row["findings"]))
            print(json.dumps(row), flush=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
