"""What is built can be used: the sdist holds the sources, the wheel holds the package, and the names import."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from length import FULL
from once import once
from threadruns import HANGS_S

import kvstore

ROOT = Path(__file__).parents[1]
SOURCES = ["kvstore", "trie", "codecs", "csrc", "ci", "tests", "tools", "benchmarks", "docs"]
FILES = [
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "Makefile",
    "LICENSE",
    "README.md",
    "ARCHITECTURE.md",
    "FORMAT.md",
]
FILES += ["CHANGELOG.md"]


def test_the_codecs_package_is_not_the_standard_library_s() -> None:
    import codecs

    import kvstore.codecs

    assert codecs.lookup("utf-8").name == "utf-8"
    assert kvstore.codecs is not codecs


@pytest.mark.parametrize(
    "name",
    ["kvstore", "kvstore.trie", "kvstore.codecs", "kvstore.tiers.disk", "kvstore.integrations", "kvstore.calibration"],
)
def test_every_package_imports(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("name", ["trie", "codecs"])
def test_the_symlinks_point_at_the_top_level_folders(name: str) -> None:
    link = ROOT / "kvstore" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_the_package_is_typed() -> None:
    assert (Path(str(kvstore.__file__)).parent / "py.typed").exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with nothing built in it."""
    copy = tmp_path_factory.mktemp("source")
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", ".hypothesis")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=built)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel built from it."""

    def make(out: Path) -> None:
        # Not isolated: the checks must not depend on a network, and the build requirements are installed.
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=_quickly(out))
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    return once(tmp_path_factory, "dist", make)


# In place of a compiler: sources must be there, and modules are those of this checkout, which were compiled as setup.py
# says. Their names follow the last folder of the package's name.
_COMPILED = """#!/bin/sh -e
for word; do
  case "$word" in *.cc) test -f "$word";; esac
  if [ "$before" = -o ]; then made=$word; fi
  before=$word
done
case "$made" in
  *.o) : > "$made";;
  *) cp "{package}/${{made##*/kvstore/}}" "$made";;
esac
"""


def _quickly(folder: Path) -> dict[str, str]:
    """An environment in which nothing is compiled again, but in `make test-long`."""
    if FULL:
        return dict(os.environ)
    compiler = folder / "compiler"
    compiler.write_text(_COMPILED.format(package=ROOT / "kvstore"))
    compiler.chmod(0o755)
    return {**os.environ, "CC": str(compiler), "CXX": str(compiler)}


@pytest.mark.slow
def test_the_sdist_holds_all_sources(dist: Path, source: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        path.relative_to(source).as_posix() for path in (source / "csrc").rglob("*") if path.suffix in (".cc", ".h")
    }
    for folder in ("kvstore", "trie", "codecs", "tests", "tools", "benchmarks"):
        for path in (source / folder).rglob("*"):
            inner = path.relative_to(source)
            if path.suffix in (".py", ".pyi", ".typed") and inner.parts[:2] not in (
                ("kvstore", "trie"),
                ("kvstore", "codecs"),
            ):
                wanted.add(inner.as_posix())
    for path in (*(source / "docs").rglob("*.md"), *(source / "ci").iterdir()):
        wanted.add(path.relative_to(source).as_posix())
    assert wanted | set(FILES) <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(dist: Path, source: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    modules = {path.relative_to(source).as_posix() for path in (source / "kvstore").rglob("*.py")}
    modules = {name for name in modules if name.split("/")[1] not in ("trie", "codecs")}  # the symlinks
    for folder in ("trie", "codecs"):
        modules |= {
            f"kvstore/{path.relative_to(source).as_posix()}"
            for path in (source / folder).rglob("*")
            if path.suffix in (".py", ".pyi", ".bin")
        }
    assert modules | {"kvstore/py.typed"} <= names
    extensions = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert {"kvstore/trie/_trie", "kvstore/codecs/_native", "kvstore/codecs/donor/_donor"} <= extensions
    assert extensions == {name.removesuffix(".pyi") for name in names if name.endswith(".pyi")}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kvstore", "kvstore_lm"}


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the wheel is installed; what it needs is taken from this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=HANGS_S)
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(next(dist.glob("*.whl")))], check=True, timeout=HANGS_S)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def _run(*words: object, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS_S, env=env)


@pytest.mark.slow
def test_the_wheel_works_where_it_is_installed(environment: Path, tmp_path: Path) -> None:
    """Its own files are imported, not those of the checkout, and a block goes through the store."""
    code = """
import sys, pathlib, numpy as np, torch
import kvstore, kvstore.trie, kvstore.codecs
for module in (kvstore, kvstore.trie, kvstore.codecs):
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
identity = kvstore.ModelIdentity("m", "r", "w", "t", kvstore.KVLayout.uniform(2, 2, 8))
layers = [(torch.randn(1, 2, 70, 8).bfloat16(), torch.randn(1, 2, 70, 8).bfloat16()) for _ in range(2)]
with kvstore.KVStore("store", identity) as store:
    store.put(np.arange(70, dtype=np.uint32), layers)
with kvstore.KVStore("store", identity) as store:
    hit = store.get(np.arange(70, dtype=np.uint32))
assert hit.tokens == 70
assert all(torch.equal(a, b) for x, y in zip(hit.layers, layers) for a, b in zip(x, y))
"""
    done = _run(environment / "bin" / "python", "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = _run(environment / "bin" / "kvstore", "ls", "store", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sequences"][0]["tokens"] == 70
    done = _run(environment / "bin" / "kvstore", "--version", folder=tmp_path)
    assert done.stdout == f"kvstore {kvstore.__version__}\n"


@pytest.mark.slow
def test_extension_modules_that_are_missing_are_told(environment: Path, tmp_path: Path) -> None:
    (site,) = environment.glob("lib/python3*/site-packages")
    shutil.copytree(site / "kvstore", tmp_path / "kvstore", ignore=shutil.ignore_patterns("*.so"))
    python = environment / "bin" / "python"
    done = _run(python, "-c", "from kvstore import KVStore", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stderr.splitlines()[-1].startswith("ImportError: kvstore.")
    assert "is not compiled; run `make setup` in the source tree, or `pip install kvstore-lm`" in done.stderr


@pytest.mark.slow
def test_a_missing_compiler_is_told_in_the_last_line(source: Path, tmp_path: Path) -> None:
    nowhere = {"CC": "/nonexistent", "CXX": "/nonexistent"}
    build = ("setup.py", "-q", "build_ext", "--build-temp", tmp_path / "a", "--build-lib", tmp_path / "b")
    done = _run(sys.executable, *build, folder=source, **nowhere)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: kvstore could not be compiled (")
    assert "It needs a C++17 compiler and the headers of Python" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_another_version_of_python_is_refused(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    assert {"Name: kvstore-lm", f"Version: {kvstore.__version__}", "Requires-Python: >=3.11"} <= set(lines)


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("kvstore.events.publish", "zmq", "events"),
        ("kvstore.exporter", "prometheus_client", "prometheus"),
        ("kvstore.integrations.ray", "ray", "ray"),
        ("kvstore.integrations.transformers", "transformers", "transformers"),
    ],
)
def test_an_extra_that_is_missing_is_named(
    module: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"pip install 'kvstore-lm[{extra}]'")) as raised:
        importlib.import_module(module)
    assert raised.value.name == missing
