"""`make gpu`, on a machine that has no GPU: it says so, and what it does on one is tried here part by part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from threadruns import HANGS_S

ROOT = Path(__file__).parents[1]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
NO_GPU = r"no GPU: torch .* (was built without CUDA|finds no CUDA device); nothing was (tested or )?measured"
# Wherever torch with CUDA is.
THERE = {"torch", "triton"}
# What `make gpu` starts from: the package, what builds it, its tests; and of transformers, which one section needs.
ROOTS = ["numpy", "pybind11", "setuptools", "pytest", "pytest-xdist", "hypothesis"]
OPTIONAL = ["transformers"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_target", ROOT / "tools" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu = load()


@pytest.mark.slow
def test_without_a_gpu_make_gpu_says_so_and_fails() -> None:
    # `make test` may have called us: whoever is called by make says which folder it enters.
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=HIDDEN, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode != 0
    assert re.fullmatch(f"make gpu: {NO_GPU}", done.stdout.strip()), done.stdout + done.stderr
    assert "Error 3" in done.stderr


def test_without_a_gpu_the_benchmark_says_so_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=HIDDEN, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 3
    assert re.fullmatch(NO_GPU, done.stdout.strip())
    assert not path.exists()


# ---- wheels ----------------------------------------------------------------------------------------------------------


def closure(names: list[str]) -> set[str]:
    """The packages, and all that they need, as they say of themselves where they are installed here."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found | THERE:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


def test_the_list_has_whatever_is_needed_and_what_single_rows_need() -> None:
    """More than is installed here may stand there: newer versions need other packages than older ones."""
    listed = {canonicalize_name(name): needed for name, _, needed in gpu.wanted(gpu.LIST.read_text())}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    own = [Requirement(line).name for line in project["dependencies"]]
    assert "lmdb" in own
    needed = closure([*own, *ROOTS])
    assert needed <= {name for name, is_needed in listed.items() if is_needed}
    assert closure(OPTIONAL) <= set(listed)
    assert not THERE & set(listed)


def test_what_is_installed_is_not_asked_for_again(tmp_path: Path) -> None:
    assert gpu.is_here("numpy", "numpy>=1.26")
    assert gpu.is_here("PyYAML", "pyyaml")
    assert not gpu.is_here("numpy", "numpy>=999")
    assert not gpu.is_here("no-such-package-at-all", "no-such-package-at-all")
    assert not gpu.is_here("numpy", "numpy", [str(tmp_path)])


@pytest.mark.slow
def test_a_wheel_that_is_not_carried_is_named_if_nothing_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("numpy>=1.26  # is there\nno-such-package-a\n# optional\nno-such-package-b>=2\n")
    monkeypatch.setattr(gpu, "LIST", listed)
    assert gpu.install(tmp_path, tmp_path / "site") == ["no-such-package-a"]
    said = capfd.readouterr().err
    assert "no-such-package-a is not here" in said
    assert "no-such-package-b is not here" in said


# ---- tests -----------------------------------------------------------------------------------------------------------


def test_every_test_that_needs_a_gpu_is_where_make_gpu_looks() -> None:
    signs = ("on_a_gpu", "mark." + "gpu")
    found = {
        path.relative_to(ROOT).parts[1]
        for path in (ROOT / "tests").rglob("*.py")
        if any(sign in path.read_text() for sign in signs)
    }
    assert found <= {"kernels", "helpers", Path(__file__).name}
    assert "kernels" in found


@pytest.mark.slow
def test_the_mark_finds_the_tests_and_says_what_became_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TESTS_S", 3000.0)  # what no machine takes, however loaded
    found = gpu.run_tests(HIDDEN, tmp_path / "tests.xml", dry=True)
    assert found["skipped"] > 20
    assert (found["passed"], found["failed"]) == (0, [])


def test_what_pytest_says_is_counted() -> None:
    cases = '<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>'
    text = f"<testsuites><testsuite>{cases}<testcase name='d'><skipped/></testcase></testsuite></testsuites>"
    assert gpu.outcomes(text) == {"passed": 1, "skipped": 1, "failed": ["b", "c"]}


@pytest.mark.parametrize(
    ("status", "why"), [(0, ""), (1, r"they need a C\+\+17 compiler.*"), (124, "it took longer than .*")]
)
def test_why_nothing_was_built_is_said(status: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_status", lambda *_: status)
    assert re.fullmatch(why, gpu.why_not_built({}))


def test_tests_that_were_skipped_or_never_ran_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tests.xml"

    def skipped(*_: object) -> int:
        path.write_text("<testsuite><testcase name='d'><skipped/></testcase></testsuite>")
        return 0

    monkeypatch.setattr(gpu, "_status", skipped)
    assert gpu.run_tests({}, path, dry=False)["failed"] == ["1 tests that were skipped"]
    monkeypatch.setattr(gpu, "_status", lambda *_: 124)
    assert gpu.run_tests({}, path, dry=False)["failed"] == ["pytest (status 124)"]


def test_a_benchmark_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_status", lambda *_: 139)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    found = gpu.measure({}, gpu.argparse.Namespace(quick=False, dry_run=False), 100)
    assert found["failed"] == {"benchmarks.gpu": "status 139"}


def test_a_program_that_takes_too_long_is_ended() -> None:
    assert gpu._status([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), 0.1) == 124
    assert gpu._status([sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ), 300) == 7
