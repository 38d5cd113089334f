"""The benchmark of the GPU on a machine that has none: every section runs, in its dry form; one that fails costs no
other, and wrong bits fail it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmodules import ROOT, load
from length import FULL

gpu, machines = load("gpu"), load("device.machine")

# Metrics that a section must have.
METRICS = {
    "splitzip": {"ratio", "copy_GBps", "encode_GBps", "decode_GBps", "bit_identical"},
    "predictive": {"passed", "ratio", "copy_GBps", "bit_identical"}
    | {f"{way}_{what}" for way in ("encode", "decode") for what in ("GBps", "block_us")},
    "levels": {"passed", "ratio", "copy_GBps", "bit_identical"}
    | {f"{way}_{what}" for way in ("encode", "decode") for what in ("GBps", "block_us")},
    "donor": {"ratio", "encode_GBps", "decode_GBps", "bit_identical"},
    "stores": {"ratio", "put_GBps", "get_GBps", "fallbacks", "bit_identical"},
    "demotion": {"demote_GBps", "slowdown", "hidden", "compute_s", "bit_identical"},
    "resume": {"ttft_s", "open_s", "get_GBps", "ratio", "logits_equal", "bit_identical"},
}
CEILINGS = {"device copy", "pinned copy", "recompute", "CPU, as many threads"}
# The benchmark, without what triton's interpreter does for nothing.
DRY = """
import runpy
from benchmarks.common import use_helpers_of_tests
use_helpers_of_tests()
import interpreter
interpreter.replace_once()
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_every_section_is_tried() -> None:
    assert set(METRICS) == set(gpu.SECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted(METRICS) if FULL else ["stores"])
def test_every_section_runs_dry(section: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-c", DRY, "--dry-run", "--section", section, "--json", str(path)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(path.read_text())
    assert [json.loads(line) for line in done.stdout.splitlines()] == rows
    assert {row["metric"] for row in rows} == METRICS[section]
    speeds = [row for row in rows if row["metric"] in ("encode_GBps", "decode_GBps", "put_GBps", "get_GBps")]
    assert {row["peer"] for row in speeds} <= CEILINGS
    assert all(row["value"] > 0 for row in speeds)


def options(**changes: Any) -> argparse.Namespace:
    given = {"only": None, "quick": False, "dry_run": True, "published": None, "seconds": 400.0, "json": None}
    return argparse.Namespace(**{**given, **changes})


def test_a_section_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(command: list[str], limit_s: float) -> tuple[list[dict[str, Any]], str | None]:
        section = command[command.index("--section") + 1]
        assert 0 < limit_s <= gpu.SECTIONS[section]
        assert "--dry-run" in command
        return [{"case": section}], "it broke" if section == "predictive" else None

    monkeypatch.setattr(gpu, "in_a_process", one)
    path = tmp_path / "new" / "report.json"
    report = gpu.run(options(json=path))
    assert [row["case"] for row in report["rows"]] == list(gpu.SECTIONS)
    assert report["failed"] == {"predictive": "it broke"}
    assert json.loads(path.read_text()) == report
    assert {"device", "driver", "torch", "triton", "date"} <= set(report["header"])
    assert [row["case"] for row in gpu.run(options(only=["donor"]))["rows"]] == ["donor"]


def test_a_section_for_which_no_time_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "in_a_process", lambda *_: pytest.fail("it was begun"))
    report = gpu.run(options(seconds=3.0))
    assert set(report["failed"]) == set(gpu.SECTIONS)
    assert report["failed"]["donor"].startswith("not begun: of 3 seconds")


PROGRAM = """
import json, sys, time
from pathlib import Path
Path(sys.argv[-1]).write_text(json.dumps([{"case": "before"}]))
print("what went wrong", file=sys.stderr, flush=True)
"""


def test_what_a_section_measured_before_it_failed_is_kept() -> None:
    for end, why in (("sys.exit(3)", "status 3: "), ("time.sleep(600)", "took longer than 5 s: ")):
        limit = 5 if "sleep" in end else 300
        # -I -S: it starts in no time, so that it has written its rows long before its limit on any machine.
        found, said = gpu.in_a_process([sys.executable, "-I", "-S", "-c", PROGRAM + end], limit)
        assert found == [{"case": "before"}]
        assert said == why + "what went wrong"
    assert gpu.in_a_process([sys.executable, "-c", PROGRAM], 300) == ([{"case": "before"}], None)
    assert gpu.in_a_process([sys.executable, "-c", "pass"], 300) == ([], "no rows: ")


def test_one_wrong_bit_is_seen() -> None:
    machine = machines.Machine(dry=True, quick=True)
    layers = machine.cache(2, 5)
    back = [(k[None].clone(), v.clone()) for k, v in layers]
    machines.check(back, layers, "all")
    back[1][1].view(torch.int16)[0, 4, 3] ^= 1
    with pytest.raises(machines.WrongBits, match="all: layer 1"):
        machines.check(back, layers, "all")
    with pytest.raises(machines.WrongBits, match="layer 0"):
        machines.check([(k[:, :4], v) for k, v in layers], layers, "all")
    machines.check_bytes(b"abc", b"abc", "bytes")
    with pytest.raises(machines.WrongBits, match="the first to differ is 1"):
        machines.check_bytes(b"abc", b"aXc", "bytes")
    with pytest.raises(machines.WrongBits, match="3 bytes, the CPU writes 4"):
        machines.check_bytes(b"abc", b"abcd", "bytes")


def test_a_dry_machine_codes_views_by_kernels_only() -> None:
    machine = machines.Machine(dry=True, quick=False)
    layers = machine.cache(1, 3)
    assert not machine.view(machine.layout(1), layers).on_cpu
    assert machine.choose(1, 2, 3) == 3
    assert machines.Machine(dry=True, quick=True).rounds == 1
    assert machine.graph(machine.wait) == machine.wait
