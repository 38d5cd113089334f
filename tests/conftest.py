"""What every test needs: one thread per test process, so that two workers do not fight over two cores."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def pytest_configure() -> None:
    """Locks are asserted; and `make test-asan` must not pass because the ordinary build was imported."""
    from kvstore.guard import Guard

    Guard.enforced = True
    if os.environ.get("KVSTORE_EXPECT_SANITIZED") == "1":
        from kvstore.codecs import _donor, _donor_steps, _lossy, _native, _predict, _rans
        from kvstore.trie import _content, _trie

        for module in (_donor, _donor_steps, _lossy, _native, _predict, _rans, _content, _trie):
            path = Path(str(module.__file__))
            if b"__asan_init" not in path.read_bytes():
                raise RuntimeError(f"{path} is not built with AddressSanitizer")
