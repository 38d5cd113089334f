"""An S3 that somebody else wrote, where it is installed (`make test-remote`)."""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
import urllib.request
from functools import cache

from threadruns import HANGS_S
from valkeys import free_port


@cache
def shared_moto() -> str:
    """The URL of a moto server; it ends with this process."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + HANGS_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=HANGS_S).close()
            return url
        except OSError:
            assert process.poll() is None, "moto does not start"
            assert time.monotonic() < end, "moto does not answer"
            time.sleep(0.02)


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=HANGS_S).close()
