"""Work on several windows at once, for small steps on one core each keep more cores busy than a step on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def in_parallel(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Calls `work` with every item, on as many threads as torch uses, each of which computes on one core. Raises what
    a call raised first. Not for use by two threads at once: torch's number of threads is the process's."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "kvstore-fit", torch.set_num_threads, (1,)) as pool:
            for _ in pool.map(work, items):
                pass
    finally:
        torch.set_num_threads(threads)
