"""A warmup that is killed: the program of `tests/integrations/test_warmup.py`. Arguments: folder, passes to make."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tiny_models import tiny
from warmupcases import CONFIG, product

from kvstore import KVStore, ModelIdentity
from kvstore.integrations.transformers import warmup


def main(folder: str, passes: int) -> None:
    def kill(report: Any) -> None:
        if report.passes == passes:
            os.kill(os.getpid(), signal.SIGKILL)

    model = tiny("llama")
    with KVStore(Path(folder), ModelIdentity.from_transformers(model), CONFIG) as store:
        warmup(store, model, product(3, 3, 3), batch_tokens=200, progress=kill)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
