"""vLLM beside the tests: its Python, jobs in processes of their own, and a server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmodules import tool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JOB = ROOT / "tools" / "vllm_job.py"
PYTHON = os.environ.get("KVSTORE_VLLM", "")
"""Python of the environment that has vLLM; "" where there is none. `make test-vllm` sets it."""
MODEL = Path(os.environ.get("KVSTORE_VLLM_MODEL", ROOT / "build/model/SmolLM2-135M-Instruct"))
_START_S, _JOB_S = 300, 300


def environment(folder: Path, server: bool) -> dict[str, str]:
    """Of a process with vLLM: this tree's package, a small cache, and no threads bound to cores."""
    link = folder / "path"
    link.mkdir(exist_ok=True)
    if not (link / "kvstore").exists():
        (link / "kvstore").symlink_to(ROOT / "kvstore")
    return {
        **os.environ,
        "PYTHONPATH": str(link),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(server)),
    }


def run(folder: Path, rounds: Sequence[dict[str, Any]], connector: dict[str, Any] | None = None, **llm: Any) -> Any:
    """Run a job of `tools/vllm_job.py`, and return its result."""
    job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    job.write_text(json.dumps({"llm": {"model": str(MODEL), **llm}, "connector": connector, "rounds": list(rounds)}))
    with log.open("w") as out:
        command = [PYTHON, str(JOB), str(job), str(result)]
        subprocess.run(
            command, env=environment(folder, server=False), stdout=out, stderr=out, timeout=_JOB_S, check=False
        )
    if not result.exists():
        raise AssertionError(log.read_text()[-4000:])
    return json.loads(result.read_text())


class Server:
    """vLLM's server on a port of this machine, its scheduler and its worker in processes of their own."""

    def __init__(self, folder: Path, connector: dict[str, Any] | None = None, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        # What `vllm serve` runs; that command itself asks for a package named vllm, and here it is vllm-cpu.
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        command += ["--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16", "--max-model-len", "1024"]
        command += ["--max-num-seqs", "16", "--enforce-eager", "--enable-prompt-tokens-details", *options]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(tool("vllm_job").transfer(connector))]
        self.log = folder / "server.txt"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=environment(folder, server=True), stdout=out, stderr=out, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-4000:])

    def complete(self, ids: Sequence[int], new: int) -> tuple[str, int]:
        """Return the text that continues a prompt, and how many tokens of that were in a cache."""
        body = {"model": "model", "prompt": list(ids), "max_tokens": new, "temperature": 0}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=_JOB_S) as answer:
            told = json.load(answer)
        cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return told["choices"][0]["text"], cached

    def metrics(self) -> dict[str, float]:
        """Counters of the connector, from Prometheus' page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith("vllm:kvstore_")]
        return {
            name.split("{")[0].removeprefix("vllm:"): float(value) for name, value in found if "_created" not in name
        }

    def kill(self) -> None:
        """Kill every process of the server at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def server(folder: Path, connector: dict[str, Any] | None = None, *options: str) -> Iterator[Server]:
    """A server that answers; it is killed at the end."""
    started = Server(folder, connector, *options)
    try:
        started.wait()
        yield started
    finally:
        started.kill()
