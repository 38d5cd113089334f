"""A real Mooncake store on loopback: a master and one node, processes of their own, ended for certain."""

from __future__ import annotations

import atexit
import importlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

from threadruns import HANGS_S
from valkeys import free_port

_NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
node = MooncakeDistributedStore()
code = node.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else code, flush=True)
sys.stdin.read()
"""


def can_run() -> bool:
    """Whether the library is installed and can be loaded (it needs libibverbs)."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError:
        return False
    return True


class Mooncake:
    """`end` ends it; `node` may be killed alone."""

    def __init__(self, folder: Path) -> None:
        self._port, self._admin = free_port(), free_port()
        program = Path(sys.executable).with_name("mooncake_master")
        flags = [f"--rpc_port={self._port}", "--rpc_interface=lo", f"--metrics_port={self._admin}"]
        flags += ["--metrics_host=127.0.0.1", "--default_kv_lease_ttl=200"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
        self.master = subprocess.Popen([program, *flags], **quiet)  # type: ignore[call-overload]
        end = time.monotonic() + HANGS_S
        while True:
            assert self.master.poll() is None, "mooncake_master ended"
            assert time.monotonic() < end, "mooncake_master does not answer"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/get_all_keys", timeout=HANGS_S).close()
                break
            except OSError:
                time.sleep(0.05)
        command = [sys.executable, "-c", _NODE, f"127.0.0.1:{self._port}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "cwd": folder}
        self.node = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        said = self.node.stdout.readline()
        assert said == b"ready\n", said

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._port}?admin=http://127.0.0.1:{self._admin}&local=127.0.0.1"

    def end(self) -> None:
        for process in (self.node, self.master):
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=HANGS_S)
        for pipe in (self.node.stdin, self.node.stdout):
            pipe.close()


@cache
def shared_mooncake() -> Mooncake:
    """One for all tests of this process."""
    folder = tempfile.TemporaryDirectory()
    store = Mooncake(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(store.end)
    return store
