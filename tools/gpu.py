"""Everything that needs an NVIDIA GPU, in one command and under ten minutes: `make gpu`.

The machine has torch with CUDA, triton, a C++ compiler and Python's headers. What else is missing is installed from
wheels in a folder (`make gpu-wheels` fetches them where there is a network), into build/gpu and nowhere else. Then the
extension modules are built in place for this Python, the tests marked `gpu` run, and `benchmarks.gpu` measures.
build/gpu.json gets one object: what `benchmarks.gpu` writes, and `tests`.

Needs nothing but the standard library itself. Status 0: all is well; 1: a test or a section failed; 3: there is no GPU;
4: something is missing to begin with. Each is said in one line, the last.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "gpu"
LIST = ROOT / "ci" / "gpu-wheels.txt"
TOTAL_S, BUILD_S, TESTS_S = 580.0, 200.0, 180.0
FAILED, NO_GPU, MISSING = 1, 3, 4
MOST_WORKERS = 8
TOO_LONG = 124
# On its own, so that a torch that crashes takes nothing with it.
LOOK = "import sys; sys.path.insert(0, '.'); from benchmarks import gpu; print('why:', gpu.why_no_gpu() or '')"


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests and measures everything that needs a GPU.")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "build" / "wheels", help="folder of wheels (build/wheels)"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", help="(build/gpu.json)")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer rows")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: shows that all of it runs")
    args = parser.parse_args()
    begin = time.monotonic()
    why = None if args.dry_run else why_no_gpu()
    if why:
        end(NO_GPU, f"no GPU: {why}; nothing was tested or measured")
    env = environment(FOLDER)
    missing = install(args.wheels, FOLDER / "site")
    if missing:
        end(
            MISSING,
            f"missing: {', '.join(missing)}; run `make gpu-wheels` with a network, and carry {args.wheels} here",
        )
    why = why_not_built(env)
    if why:
        end(MISSING, f"the extension modules cannot be built: {why}")
    tests = run_tests(env, FOLDER / "tests.xml", args.dry_run)
    left = TOTAL_S - (time.monotonic() - begin)
    report = measure(env, args, left) | {"tests": tests}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = [*tests["failed"], *report["failed"]]
    seconds = time.monotonic() - begin
    said = f"{tests['passed']} tests passed, {len(report['rows'])} rows in {args.json}, {seconds:.0f} s"
    end(FAILED if failed else 0, f"{said}; failed: {', '.join(failed)}" if failed else said)


def end(status: int, said: str) -> None:
    """Ends the program; `said` is its last line."""
    sys.stderr.flush()
    print(f"make gpu: {said}", flush=True)
    sys.exit(status)


def why_no_gpu() -> str:
    """What is missing to measure on a GPU; nothing if all is there."""
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"^why: (.*)$", done.stdout, flags=re.M)
    return found[1] if found else f"looking for one failed: {done.stderr.strip()[-300:]}"


# ---- what is missing ---------------------------------------------------------------------------------------------


def wanted(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields (name, requirement, whether nothing runs without it) of a list such as ci/gpu-wheels.txt."""
    needed = True
    for line in text.splitlines():
        needed = needed and line.strip() != "# optional"
        requirement = line.partition("#")[0].strip()
        if requirement:
            yield re.split(r"[<>=!~ ]", requirement)[0], requirement, needed


def is_here(name: str, requirement: str, path: Sequence[str] | None = None) -> bool:
    """Whether a package is installed, no older than the requirement asks. path: folders to look in."""
    versions = (found.version for found in importlib.metadata.distributions(name=name, path=list(path or sys.path)))
    version = next(versions, None)
    least = re.search(r">=([\d.]+)", requirement)
    return version is not None and (least is None or _numbers(version) >= _numbers(least[1]))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def install(wheels: Path, site: Path) -> list[str]:
    """Installs what is missing from wheels; returns the names of what nothing runs without and is still missing."""
    still = []
    for name, requirement, needed in wanted(LIST.read_text()):
        if is_here(name, requirement, [str(site), *sys.path]):
            continue
        # Python's own pip, nothing but these files, and no dependencies: torch is there, and the list is complete.
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
        command += ["--find-links", str(wheels), "--target", str(site), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} is not here: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            still += [name] * needed
    return still


# ---- building, testing, measuring ------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """For programs that import the package from the tree, and what was installed: the root itself must not be on the
    path, its codecs/ would shadow the standard library's module."""
    path = folder / "path"
    path.mkdir(parents=True, exist_ok=True)
    link = path / "kvstore"
    if not link.is_symlink():
        link.symlink_to(ROOT / "kvstore")
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(folder / "site"), *([given] if given else [])])}


def why_not_built(env: Mapping[str, str]) -> str:
    """Builds the extension modules for this Python, which takes seconds where they are built. Returns nothing, or why
    it failed."""
    status = _status([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], env, BUILD_S)
    if status == TOO_LONG:
        return f"it took longer than {BUILD_S:.0f} s; call again, what is built stays"
    return "they need a C++17 compiler and Python's headers" if status else ""


def run_tests(env: Mapping[str, str], junit: Path, dry: bool) -> dict[str, Any]:
    """Runs the tests that need a GPU, all of which are in tests/kernels: how many passed and were skipped, the names of
    those that failed, and the seconds. In a dry run all are skipped."""
    junit.unlink(missing_ok=True)
    # Warnings of another torch than the one that the project is tested with are no errors here.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    # Most of the time is the compiler's, which uses one core.
    command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    begin = time.monotonic()
    status = _status([*command, f"--junitxml={junit}", "tests/kernels"], env, TESTS_S)
    found = outcomes(junit.read_text()) if junit.exists() else {"passed": 0, "skipped": 0, "failed": []}
    if status and not found["failed"]:
        found["failed"] = [f"pytest (status {status})"]
    if found["skipped"] and not dry:
        found["failed"].append(f"{found['skipped']} tests that were skipped")
    return found | {"seconds": round(time.monotonic() - begin, 1)}


def outcomes(text: str) -> dict[str, Any]:
    """What pytest's XML says."""
    cases = list(xml.fromstring(text).iter("testcase"))
    failed = [
        case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def measure(env: Mapping[str, str], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What `benchmarks.gpu` writes."""
    path = FOLDER / "rows.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(path), "--seconds", f"{seconds - 15:.0f}"]
    command += ["--quick"] * args.quick + ["--dry-run"] * args.dry_run
    status = _status(command, env, seconds)
    if not path.exists():
        return {"header": {}, "rows": [], "failed": {"benchmarks.gpu": f"status {status}"}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _status(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> int:
    """The exit status of a program, whose output is shown; TOO_LONG where it takes longer than its limit."""
    print("+", " ".join(command), flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, env=dict(env), timeout=max(1.0, limit_s)).returncode
    except subprocess.TimeoutExpired:
        print(f"took longer than {limit_s:.0f} s", file=sys.stderr)
        return TOO_LONG


if __name__ == "__main__":
    main()
