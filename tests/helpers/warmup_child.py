"""A warmup that is killed: the program of `tests/integrations/test_warmup.py`.

Arguments: a folder, and for each run after how many passes it is killed. Each run is a process of its own, forked from
one that has loaded everything, and has started no thread.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny
from warmupcases import CONFIG, product

from kvstore import KVStore, ModelIdentity
from kvstore.integrations.transformers import warmup


def run(folder: str, model: Any, passes: int) -> None:
    def kill(report: Any) -> None:
        if report.passes == passes:
            os.kill(os.getpid(), signal.SIGKILL)

    with KVStore(Path(folder), ModelIdentity.from_transformers(model), CONFIG) as store:
        warmup(store, model, product(3, 3, 3), batch_tokens=100, progress=kill)


def main(folder: str, kills: list[int]) -> None:
    torch.set_num_threads(1)
    model = tiny("llama")
    for passes in kills:
        pid = os.fork()
        if pid == 0:
            try:
                run(folder, model, passes)
            finally:
                os._exit(1)  # it was not killed
        _, status = os.waitpid(pid, 0)
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(passes) for passes in sys.argv[2:]])
