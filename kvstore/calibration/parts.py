"""The parts of a profile: what each fits to a dump, and what it measures on the windows that it did not see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import KVDump, Progress, floats
from kvstore.codecs.predictive_model import PredictiveModel
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

Arrays = Mapping[str, npt.NDArray[Any]]
Report = dict[str, Any]
NAMES = ("lossless", "aqua", "lossy", "donor")
DEFAULT = ("lossless", "lossy")  # AQUA-KV is there to be compared with, and the donors' part runs the model again
_AQUA_BITS = 2  # whose errors the predictors are fitted to; they serve 3 and 4 bits as well
_LADDER = (0.5, 0.75, 1.1, 1.6, 2.4, 3.4)  # of the steps that the lossy part is fitted at


@dataclass(frozen=True)
class Task:
    """A fit to `dump.fit_windows`. model: that the dump was made with. made: the sections that were fitted before.
    scratch: a folder for files, removed afterwards."""

    dump: KVDump
    model: Any
    made: Mapping[str, Arrays]
    progress: Progress
    scratch: Path


class Part(ABC):
    """A section of the profile; `has_curve`: whether its held-out figure tells how much text is enough."""

    has_curve = True

    @abstractmethod
    def fit(self, task: Task) -> Arrays:
        """The section's arrays."""

    def fits(self, task: Task, counts: Sequence[int]) -> Iterator[Arrays]:
        """Those of fits to the first so many windows, for each of `counts`, ascending."""
        for count in counts:
            yield self.fit(replace(task, dump=task.dump.first(count)))

    def finish(self, task: Task, arrays: Arrays) -> Arrays:
        """The arrays with what only a profile needs, and a learning curve does not."""
        return arrays

    @abstractmethod
    def report(self, task: Task, arrays: Arrays) -> Report:
        """Plain JSON values measured on `dump.held_out`; among them "bits_per_value", payloads without records."""


def part(name: str) -> Part | None:
    """The part with this name; None where this version lacks it. Raises `ConfigError` for another name."""
    if name not in NAMES:
        raise ConfigError(f"parts: expected some of {', '.join(NAMES)}, found {name!r}")
    if util.find_spec(f"kvstore.calibration.{name}") is None:
        return None
    made: dict[str, Callable[[], Part]] = {"lossless": _Lossless, "aqua": _Aqua, "lossy": _Lossy, "donor": _Donor}
    return made[name]()


class _Lossless(Part):
    """The predictive codec, exact."""

    def fit(self, task: Task) -> Arrays:
        from kvstore.calibration.lossless import fit

        return fit(task.dump, task.progress)

    def fits(self, task: Task, counts: Sequence[int]) -> Iterator[Arrays]:
        """In one pass over the windows."""
        from kvstore.calibration.lossless import fits

        return fits(task.dump, counts, task.progress)

    def report(self, task: Task, arrays: Arrays) -> Report:
        from kvstore.calibration.lossless import report

        return report(task.dump, dict(arrays))


class _Lossy(Part):
    """The predictive codec with loss, which stands on the exact one."""

    has_curve = False  # it would take minutes; the exact part's tells as much

    def fit(self, task: Task) -> Arrays:
        from kvstore.calibration.lossy import fit

        return fit(task.dump, self._base(task), task.progress, task.scratch, model=task.model)

    def finish(self, task: Task, arrays: Arrays) -> Arrays:
        """With the ladder of qualities."""
        from kvstore.calibration.lossy import MIDDLE, measure, with_ladder

        levels = [(MIDDLE[0] * share, MIDDLE[1] * share) for share in _LADDER]
        ladder = measure(task.model, task.dump, self._base(task), dict(arrays), levels, progress=task.progress)
        return with_ladder(dict(arrays), ladder)

    def report(self, task: Task, arrays: Arrays) -> Report:
        """At the steps that the fit was made for; "ladder": steps of K and V, bits a value, and both KLs."""
        from kvstore.calibration.lossy import MIDDLE, bits_per_value

        bits = bits_per_value(task.dump, self._base(task), dict(arrays), task.dump.held_out, MIDDLE)
        return {"bits_per_value": bits, "ladder": arrays["ladder"].tolist()}

    def _base(self, task: Task) -> PredictiveModel:
        return PredictiveModel.from_arrays(task.dump.layout, task.made["lossless"])


class _Donor(Part):
    """What the donor codec carries from layer to layer."""

    has_curve = False  # every fit runs the model again

    def fit(self, task: Task) -> Arrays:
        from kvstore.calibration.donor import fit

        return fit(task.model, task.dump, task.progress)

    def report(self, task: Task, arrays: Arrays) -> Report:
        """Of passages behind another beginning; "without": by the donor alone."""
        from kvstore.calibration.donor import report

        return report(task.model, task.dump, dict(arrays))


class _Aqua(Part):
    """AQUA-KV's predictors. Its rate is given; what more text improves is the error."""

    has_curve = False

    def fit(self, task: Task) -> Arrays:
        from kvstore.calibration.aqua import fit

        layers = len(task.dump.layout.layers)
        watched = _AsNumbers(task.dump, lambda layer: task.progress("aqua: fitting layers", layer, layers))
        arrays = fit(watched, _AQUA_BITS, scratch=task.scratch).to_arrays()
        task.progress("aqua: fitting layers", layers, layers)
        return arrays

    def report(self, task: Task, arrays: Arrays) -> Report:
        """Of 2 bits; "error": mean square of what is lost, relative to the values', of K and of V."""
        import torch

        from kvstore.codecs.aqua import AquaCodec
        from kvstore.codecs.aqua_predictors import AquaPredictors
        from kvstore.codecs.base import BlockInfo
        from kvstore.codecs.view import KVView

        dump = task.dump
        codec = AquaCodec(AquaPredictors.from_arrays(dump.layout, arrays), _AQUA_BITS)
        spent, lost, power = 0, np.zeros(2), np.zeros(2)
        for window in dump.held_out:
            info = BlockInfo(dump.layout, dump.tokens(window).astype(np.uint32), 0)
            layers = dump.tensors(window)
            decoded = [(torch.empty_like(k), torch.empty_like(v)) for k, v in layers]
            payload = memoryview(bytearray(codec.bound(info)))
            sizes = codec.encode(info, KVView.of_layers(dump.layout, layers), payload)
            assert sizes is not None
            spent += sum(sizes)
            codec.decode(info, payload[: sum(sizes)], sizes, KVView.of_layers(dump.layout, decoded))
            for pair, found in zip(layers, decoded, strict=True):
                for which in range(2):
                    x = pair[which].double()
                    lost[which] += (x - found[which].double()).pow(2).sum().item()
                    power[which] += x.pow(2).sum().item()
        tokens = len(dump.held_out) * dump.length
        rate = 8 * spent / (tokens * dump.layout.bytes_per_token / dump.layout.item_bytes)
        return {"bits_per_value": rate, "error": (lost / power).tolist()}


class _AsNumbers:
    """The windows to fit to, as float32 numbers; `watch` is told the layer when its first window is read."""

    def __init__(self, dump: KVDump, watch: Any) -> None:
        self._dump, self._watch = dump, watch
        self.layout: KVLayout = dump.layout
        self.windows, self.length = len(dump.fit_windows), dump.length

    def layer(self, layer: int, window: int) -> tuple[Any, Any]:
        if window == 0:
            self._watch(layer)
        keys, values = self._dump.layer(layer, self._dump.fit_windows[window])
        return floats(keys), floats(values)
