"""What the store does on a GPU: `python -m benchmarks.gpu [--quick] [--json FILE] [--only SECTION...] [--dry-run]`

Sections: splitzip, predictive, levels (predictive's), donor, stores (the device tier, and host and disk to a cache on
the GPU), demotion (beside computing), resume. Each says in `benchmarks/device/` what it measures. Each runs in a
process of its own with a limit of time, so that one that fails or hangs costs no other. Every figure stands beside a
ceiling that was measured in the same rounds: a copy on the device for codecs, a copy between the device and pinned
memory for transfers. What does not come back bit for bit is not timed, and its section fails. `make gpu` runs it after
the tests.

--json FILE gets one object: `header` (device, driver, versions, date), `rows`, and `failed`: why, by section.
--dry-run runs every line on the CPU, in tiny sizes and kernels in Triton's interpreter; its times mean nothing.
--published DIR: a clone of the published implementation of SplitZip, timed beside ours.
--seconds N: all sections together take no longer (default 400).

Status 0: all sections are measured; 1: some failed; 3: there is no GPU here, which is said, and nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# By name: the most seconds that it may take. The first are those that nothing else can show.
SECTIONS = {"splitzip": 90, "predictive": 120, "levels": 90, "demotion": 90, "stores": 120, "resume": 150, "donor": 60}
LEAST_S = 20  # in less no section is measured
NO_GPU = 3
ERROR_CHARACTERS = 2000

Report = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the store does on a GPU.")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), help="these sections")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: shows that every line runs")
    parser.add_argument("--published", type=Path, metavar="DIR", help="clone of the published implementation")
    parser.add_argument("--seconds", type=float, default=400, help="of all sections together (400)")
    parser.add_argument("--section", choices=sorted(SECTIONS), help=argparse.SUPPRESS)  # this process measures it
    args = parser.parse_args()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # triton looks once, when it is imported
    missing = None if args.dry_run else why_no_gpu()
    if missing is not None:
        print(f"no GPU: {missing}; nothing was measured", flush=True)
        sys.exit(NO_GPU)
    if args.section is not None:
        measure(args.section, args.quick, args.json, args.dry_run, args.published)
        return
    report = run(args)
    sys.exit(1 if report["failed"] else 0)


def why_no_gpu() -> str | None:
    """What is missing to measure on a GPU; None if nothing is."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    try:
        torch.ones(1, device="cuda").add_(1)
        import triton  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return None


def measure(section: str, quick: bool, json_path: Path | None, dry: bool, published: Path | None) -> None:
    """Measures one section in this process."""
    from benchmarks.common import Rows
    from benchmarks.device.machine import Machine

    importlib.import_module(f"benchmarks.device.{section}").measure(
        Machine(dry, quick, published), Rows("gpu", json_path)
    )


def run(args: argparse.Namespace) -> Report:
    """Measures the sections, each in a process of its own; the report is written after each."""
    report: Report = {"header": header(args.dry_run), "rows": [], "failed": {}}
    print(json.dumps(report["header"]), flush=True)
    begin = time.monotonic()
    options = ["--quick"] * args.quick + ["--dry-run"] * args.dry_run
    options += ["--published", str(args.published)] if args.published else []
    for section in args.only or SECTIONS:
        left = args.seconds - (time.monotonic() - begin)
        if left < LEAST_S:
            report["failed"][section] = f"not begun: of {args.seconds:g} seconds {max(0.0, left):.0f} were left"
        else:
            command = [sys.executable, "-m", "benchmarks.gpu", "--section", section, *options]
            rows, why = in_a_process(command, min(SECTIONS[section], left))
            report["rows"] += rows
            if why is not None:
                report["failed"][section] = why
        if section in report["failed"]:
            print(f"FAILED {section}: {report['failed'][section]}", file=sys.stderr, flush=True)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


def in_a_process(command: list[str], limit_s: float) -> tuple[list[Report], str | None]:
    """Runs a section, whose rows are printed as they come. Returns them, and why it failed; None if it did not."""
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder) / "rows.json", Path(folder) / "errors"
        with errors.open("wb") as file:
            try:
                status = subprocess.run([*command, "--json", str(path)], stderr=file, timeout=limit_s).returncode
                why = f"status {status}: " if status else None
            except subprocess.TimeoutExpired:
                why = f"took longer than {limit_s:g} s: "
        said = errors.read_text(errors="replace").strip()
        rows: list[Report] = json.loads(path.read_text()) if path.exists() else []
    if why is None and not rows:
        why = "no rows: "
    return rows, None if why is None else why + said[-ERROR_CHARACTERS:]


def header(dry: bool) -> dict[str, object]:
    """What was measured on, with what, and when."""
    import torch
    import triton

    found: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    found |= {"triton": triton.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if dry:
        return {**found, "device": "none: a dry run on the CPU, whose times mean nothing", "driver": None, "cuda": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found |= {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    found |= {"capability": f"{properties.major}.{properties.minor}", "driver": driver()}
    return found


def driver() -> str | None:
    """The version of the driver, as its own tool says it; None if that is not here."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


if __name__ == "__main__":
    main()
