"""`make test-wheel`: installs what was built into an environment of its own, and uses it there without the sources.

torch, which is large, is taken from the environment that runs this, with what it needs; everything else is installed
from the package index. Ends with the first thing that is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

TRIAL = """
import sys, numpy as np, torch, kvstore
from kvstore import KVLayout, KVStore, ModelIdentity
assert kvstore.__file__.startswith(sys.prefix), kvstore.__file__
identity = ModelIdentity("m", "r", "w", "t", KVLayout.uniform(2, 2, 8))
tokens = np.arange(70, dtype=np.uint32)
kv = [(torch.randn(2, 70, 8).bfloat16(), torch.randn(2, 70, 8).bfloat16()) for _ in range(2)]
with KVStore("store", identity) as store:
    store.put(tokens, kv)
with KVStore("store", identity) as store:
    hit = store.get(tokens)
    assert store.check(deep=True).ok
assert hit.tokens == 70
assert all(torch.equal(a[0], b) for x, y in zip(hit.layers, kv) for a, b in zip(x, y))
"""


def needed(name: str) -> set[str]:
    """A package, and all that it needs, as far as they are installed here."""
    found: set[str] = set()
    left = [name]
    while left:
        each = left.pop().lower()
        try:
            requires = distribution(each).requires or []
        except PackageNotFoundError:
            continue
        if each not in found:
            found.add(each)
            asked = (Requirement(line) for line in requires)
            left += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def link(name: str, site: Path) -> None:
    """Make the files of an installed package visible in another folder."""
    for file in distribution(name).files or []:
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution(name).locate_file(top))).resolve())


def run(words: list[str], folder: Path, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; it must end with `code`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | more
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=env)
    if done.returncode != code:
        raise SystemExit(f"{' '.join(words)}: ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done


def expect(what: str, text: str, wanted: str) -> None:
    """Say that something is so, or end."""
    if wanted not in text:
        raise SystemExit(f"{what}: expected {wanted!r}, found\n{text[-3000:]}")
    print(f"{what}: {' '.join(wanted.split())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dist", type=Path, required=True, help="Folder of the sdist and the wheel.")
    parser.add_argument("--work", type=Path, required=True, help="Folder for the environment; emptied.")
    given = parser.parse_args()
    work = given.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    (work / "shared").mkdir(parents=True)
    (wheel,), (sdist,) = (sorted(given.dist.resolve().glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    for name in sorted(needed("torch")):
        link(name, work / "shared")
    run([sys.executable, "-m", "venv", "env"], work)
    (site,) = work.glob("env/lib/python3*/site-packages")
    (site / "shared.pth").write_text(f"{work / 'shared'}\n")
    pip, python, command = ([str(work / "env" / "bin" / name)] for name in ("pip", "python", "kvstore"))

    run([*pip, "install", "-q", str(wheel)], work)
    run([*python, "-c", TRIAL], work)
    print(f"{wheel.name}: installed; a put and a get in a store of its own")
    told = run([*command, "--help"], work, 1).stderr
    expect("kvstore without its extra", told, "pip install 'kvstore-lm[cli]'")
    run([*pip, "install", "-q", f"{wheel}[cli]"], work)
    expect("kvstore --help", run([*command, "--help"], work).stdout, "sessions")
    (row,) = json.loads(run([*command, "ls", "store", "--json"], work).stdout)["sequences"]
    assert row["tokens"] == 70, row
    none = run([*command, "warmup", "s", "--model", "m", "--prompts", "p"], work, 1).stderr
    expect("warmup without transformers", none, "pip install 'kvstore-lm[transformers]'")
    none = run([*python, "-c", "import kvstore.exporter"], work, 1).stderr
    expect("exporter without its extra", none, "pip install 'kvstore-lm[prometheus]'")
    done = run([*pip, "wheel", "--no-deps", "-w", "none", str(sdist)], work, 1, CC="/nonexistent", CXX="/nonexistent")
    expect("sdist without a compiler", done.stdout + done.stderr, "kvstore could not be compiled")


if __name__ == "__main__":
    main()
