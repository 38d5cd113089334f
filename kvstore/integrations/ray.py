"""Warm-up on Ray: parts of the prompts are tasks of a Ray cluster. Needs the extra `kvstore-lm[ray]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import ray
except ModuleNotFoundError as error:
    what = "kvstore.integrations.ray needs ray; pip install 'kvstore-lm[ray]'"
    raise ModuleNotFoundError(what, name=error.name) from None

from kvstore.errors import KVStoreError
from kvstore.integrations.transformers.apart import Part, PartWorkers, fill
from kvstore.integrations.transformers.warming import WarmupReport


@dataclass(frozen=True)
class RayWorkers(PartWorkers):
    """Workers of `warmup` that are tasks of Ray: of the cluster that the program is connected to, or that RAY_ADDRESS
    names, else of one on this machine, which ends with the warm-up.

    Attributes:
        tasks: how many parts; None: as many as the cluster has processors for.
        cpus, gpus: that Ray reserves for a task.
        load: makes the model in a task; None: the model that `warmup` was given is sent to all of them.
    """

    tasks: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    load: Callable[[], Any] | None = None

    def count(self) -> int:
        if self.tasks is not None:
            return self.tasks
        with _connected():
            return max(1, int(ray.cluster_resources().get("CPU", 1.0) // max(self.cpus, 1.0)))

    def warm(self, *args: Any, **options: Any) -> int:
        with _connected():  # once, for what follows
            return super().warm(*args, **options)

    def run(self, parts: Sequence[Part], model: Any) -> Iterator[tuple[str, WarmupReport]]:
        with _connected():
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=1)(_fill)
            sent = None if self.load is not None else ray.put(model)
            left = [task.remote(part, sent, self.load) for part in parts]
            try:
                while left:
                    ready, left = ray.wait(left, num_returns=1)
                    yield _result(ready[0])
            finally:
                for each in left:
                    ray.cancel(each, force=True)


def _fill(part: Part, model: Any, load: Callable[[], Any] | None) -> tuple[str, WarmupReport]:
    return fill(part, model if load is None else load())


def _result(task: Any) -> tuple[str, WarmupReport]:
    try:
        folder, report = ray.get(task)
    except ray.exceptions.RayError as error:
        if isinstance(error, KVStoreError | ValueError):
            raise
        line = str(error).strip().splitlines()[-1:]
        raise KVStoreError(f"a task of the warm-up failed ({' '.join(line)}); what others did is stored") from error
    return folder, report


class _connected:
    """A connection to Ray that ends if it was made here."""

    def __enter__(self) -> None:
        self._mine = not ray.is_initialized()
        if self._mine:
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)

    def __exit__(self, *_: object) -> None:
        if self._mine:
            ray.shutdown()
