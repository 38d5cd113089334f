"""The C++ core on aarch64, under qemu-user: it compiles without a warning, and its twins agree with each other, on
processors with dot products and without, and with what x86-64 makes of the same inputs, byte by byte.

`make test-aarch64` installs what is needed, and runs this at full length: all parts as they ship, and x86-64 beside
them. Otherwise it is the parts that have NEON by hand, on aarch64 alone, where the tools are there already.
"""

from __future__ import annotations

import os
from pathlib import Path

import machines
import pytest
from cpulevels import cpu_levels
from machines import Program

pytestmark = pytest.mark.native

FULL = os.environ.get("KVSTORE_AARCH64") == "full"
OLD, NEW = "cortex-a57", "max"  # qemu's processors without dot products of bytes, and with them
CASES = 400 if FULL else 30
Runs = list[tuple[Path, str, str | None]]  # program, level, processor


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    if not machines.tools():
        if FULL:
            pytest.fail(f"{machines.CROSS} or {machines.EMULATOR} is missing: make test-aarch64 installs them")
        pytest.skip("there is no compiler for aarch64 with qemu-user; make test-aarch64 installs them")


def check(folder: Path, parts: int, runs: Runs) -> None:
    """Every run is at its level, and gives what the first gave."""
    for number, (program, level, processor) in enumerate(runs):
        name = f"{level} on {processor or 'this machine'}"
        said = machines.outputs(program, folder / str(number), CASES, level, processor)
        assert len(said.splitlines()) == parts, said
        assert all(line.endswith(f"level={level}") for line in said.splitlines()), said
        print(f"{name}\n{said}")
        found = machines.first_difference(folder / "0", folder / str(number))
        assert found is None, f"{name} differs from {runs[0][1]} on {runs[0][2] or 'this machine'} from case {found} on"


def test_machines_and_twins_agree(tmp_path: Path) -> None:
    parts, core = (machines.PARTS, "-O3") if FULL else (machines.BY_HAND, "-O1")
    arm = Program(machines.CROSS, parts, core).build()
    runs: Runs = [(arm, "scalar", NEW), (arm, "neon", NEW), (arm, "neon", OLD)]
    if FULL:
        here = Program("g++", parts, core).build()
        runs = [*((here, level, None) for level in cpu_levels()), *runs]
    check(tmp_path, len(parts) + 1, runs)


def test_a_difference_is_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"rans 0 3\nabcrans 7 2\n\n\n")
    for text, found in [
        (b"rans 0 3\nabcrans 7 2\n\n\n", None),
        (b"rans 0 3\nabcrans 7 2\n\n.", "rans 7 2 / rans 7 2"),
        (b"rans 0 3\nabcrans 8 2\n\n\n", "rans 7 2 / rans 8 2"),
        (b"rans 0 3\nabc", "rans 7 2 / "),
    ]:
        two.write_bytes(text)
        assert machines.first_difference(one, two) == found
