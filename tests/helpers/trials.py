"""Runs trials that may die: each in a process of its own, forked from a worker that has everything imported.

`run("module", "function", cases)` starts the worker (`python trials.py module`), which forks once per case, calls
`function(**case)` in the child and reports what it returned, what it raised, or which signal killed it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import seeds
import shim

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 600.0  # what no trial takes, however loaded the machine is


def run(module: Path, function: str, cases: Iterable[dict[str, Any]], preload: bool = False) -> list[dict[str, Any]]:
    """One row per case: the case itself, and `result`, or `error` (a traceback), or `signal` (a number).

    preload: with the library that makes file calls fail (helpers/shim.py), which needs a compiler."""
    jobs = list(cases)
    command = [sys.executable, str(HERE / "trials.py"), str(module), function]
    env = {**environment(), **(shim.preloaded() if preload else {})}
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(jobs), done.stderr[-4000:]
    return rows


def environment() -> dict[str, str]:
    """That of this process, with the helpers importable and one thread per library."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def failures(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What went wrong, with the case that makes it happen again; [] where nothing did."""
    bad = []
    for row in rows:
        if "signal" in row or "error" in row:
            bad.append(f"case {row['case']}: " + (row.get("error") or f"died by signal {row.get('signal')}"))
    return bad


def in_child(function: Callable[[], Any], timeout_s: float = TIMEOUT_S, group: bool = False) -> dict[str, Any]:
    """Calls `function` in a forked child: {"result": ...}, {"error": traceback} or {"signal": number}.

    group: whatever the child leaves behind is killed with it.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        if group:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever outlives the trial must not hold the worker's
        try:
            text = json.dumps({"result": function()})
        except SystemExit:
            raise  # a process that the trial itself forked, and that is to end as any program does
        except BaseException:
            text = json.dumps({"error": traceback.format_exc()[-4000:]})
        with os.fdopen(write, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(write)
    text = _read_all(read, pid, timeout_s)
    _, status = os.waitpid(pid, 0)
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    found: dict[str, Any] = json.loads(text)
    return found


def _read_all(fd: int, pid: int, timeout_s: float) -> str:
    parts, deadline = [], time.monotonic() + timeout_s
    with os.fdopen(fd, "rb") as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                return b"".join(parts).decode()
            parts.append(part)
    os.kill(pid, signal.SIGKILL)  # it hangs: report that as death by this signal
    return ""


def load(path: Path) -> Any:
    """The module at `path`, which need not be importable by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    module, function = load(Path(sys.argv[1])), sys.argv[2]
    seeds.fix(f"{Path(sys.argv[1]).stem}.{function}")
    for case in json.load(sys.stdin):
        call = getattr(module, function)
        row = {"case": case, **in_child(lambda call=call, case=case: call(**case), group=True)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
