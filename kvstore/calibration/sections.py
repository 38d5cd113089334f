"""The sections of a profile: what each fits to a dump, and what it measures on the windows that it did not see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any

import numpy.typing as npt

from kvstore.calibration.dump import KVDump, Progress
from kvstore.codecs.group_sections import joined
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.errors import ConfigError

Arrays = Mapping[str, npt.NDArray[Any]]
Report = dict[str, Any]
NAMES = ("lossless", "levels", "aqua", "lossy", "donor", "approximate")
DEFAULT = ("lossless", "levels", "lossy")  # AQUA-KV is there to be compared with; the last two run the model again
_AQUA_BITS = 2  # whose errors the predictors are fitted to; they serve 3 and 4 bits as well
_LADDER = (0.5, 0.75, 1.1, 1.6, 2.4, 3.4)  # of the steps that the lossy part is fitted at


@dataclass(frozen=True)
class FitTask:
    """A fit to `dump.fit_windows`. model: that the dump was made with. made: the sections that were fitted before.
    scratch: a folder for files, removed afterwards."""

    dump: KVDump
    model: Any
    made: Mapping[str, Arrays]
    progress: Progress
    scratch: Path


class ProfileSection(ABC):
    """A section of the profile; `has_curve`: whether its held-out figure tells how much text is enough."""

    has_curve = True

    @abstractmethod
    def fit(self, task: FitTask) -> Arrays:
        """The section's arrays."""

    def fits(self, task: FitTask, counts: Sequence[int]) -> Iterator[Arrays]:
        """Those of fits to the first so many windows, for each of `counts`, ascending."""
        for count in counts:
            yield self.fit(replace(task, dump=task.dump.first(count)))

    def finish(self, task: FitTask, arrays: Arrays) -> Arrays:
        """The arrays with what only a profile needs, and a learning curve does not."""
        return arrays

    @abstractmethod
    def report(self, task: FitTask, arrays: Arrays) -> Report:
        """Plain JSON values measured on `dump.held_out`; of a codec "bits_per_value" too, payloads without records."""


def section(name: str) -> ProfileSection | None:
    """The section with this name; None if this version lacks what fits it. Raises `ConfigError` for another name."""
    if name not in NAMES:
        raise ConfigError(f"parts: expected some of {', '.join(NAMES)}, found {name!r}")
    package, kind = _FITS[name]
    return kind() if util.find_spec(f"kvstore.calibration.{package}") is not None else None


class _Lossless(ProfileSection):
    """The predictive codec, exact."""

    def fit(self, task: FitTask) -> Arrays:
        (arrays,) = self.fits(task, [len(task.dump.fit_windows)])
        return arrays

    def fits(self, task: FitTask, counts: Sequence[int]) -> Iterator[Arrays]:
        """In one pass over the windows, for each group of layers."""
        from kvstore.calibration.predictive.fit import fits

        groups = [fits(dump, counts, task.progress) for dump in task.dump.groups()]
        for parts in zip(*groups, strict=True):
            yield joined(parts) if task.dump.layout.is_grouped else parts[0]

    def report(self, task: FitTask, arrays: Arrays) -> Report:
        from kvstore.calibration.predictive.quality import report

        return report(task.dump, dict(arrays))


class _Levels(ProfileSection):
    """The levels of the exact predictive codec, which stand on its tables of tokens and angles."""

    has_curve = False  # that of the section "lossless" tells as much

    def fit(self, task: FitTask) -> Arrays:
        from kvstore.calibration.predictive.levels import fit
        from kvstore.calibration.predictive.quality import part_of

        lossless = task.made["lossless"]
        parts = [
            fit(dump, part_of(task.dump, lossless, number), progress=task.progress)
            for number, dump in enumerate(task.dump.groups())
        ]
        return joined(parts) if task.dump.layout.is_grouped else parts[0]

    def report(self, task: FitTask, arrays: Arrays) -> Report:
        """Of the highest level; "levels": of each, bits a value."""
        from kvstore.calibration.predictive.quality import level_bits, over_groups, part_of
        from kvstore.codecs.predictive.levels.model import levels_of

        def bits_of(level: int) -> float:
            def of(dump: KVDump, number: int) -> float:
                lossless, levels = (part_of(task.dump, made, number) for made in (task.made["lossless"], arrays))
                return level_bits(dump, lossless, levels, level)

            return over_groups(task.dump, of)

        bits = {str(level): bits_of(level) for level in levels_of(part_of(task.dump, arrays, 0))}
        best = bits[max(bits)]
        return {"bits_per_value": best, "ratio": 16 / best, "levels": bits}


class _Lossy(ProfileSection):
    """The predictive codec with loss, which stands on the exact one."""

    has_curve = False  # it would take minutes; the exact part's tells as much

    def fit(self, task: FitTask) -> Arrays:
        from kvstore.calibration.lossy.fit import fit

        return fit(task.dump, self._base(task), task.progress, task.scratch, model=task.model)

    def finish(self, task: FitTask, arrays: Arrays) -> Arrays:
        """With the ladder of qualities."""
        from kvstore.calibration.lossy.fit import MIDDLE
        from kvstore.calibration.lossy.quality import measure, with_ladder

        levels = [(MIDDLE[0] * share, MIDDLE[1] * share) for share in _LADDER]
        ladder = measure(task.model, task.dump, self._base(task), dict(arrays), levels, progress=task.progress)
        return with_ladder(dict(arrays), ladder)

    def report(self, task: FitTask, arrays: Arrays) -> Report:
        """At the steps that the fit was made for; "ladder": steps of K and V, bits a value, and both KLs."""
        from kvstore.calibration.lossy.fit import MIDDLE
        from kvstore.calibration.lossy.quality import bits_per_value

        bits = bits_per_value(task.dump, self._base(task), dict(arrays), task.dump.held_out, MIDDLE)
        return {"bits_per_value": bits, "ladder": arrays["ladder"].tolist()}

    def _base(self, task: FitTask) -> PredictiveModel:
        return PredictiveModel.from_arrays(task.dump.layout, task.made["lossless"])


class _Donor(ProfileSection):
    """How differences from donors go on from layer to layer, and within a layer."""

    has_curve = False  # every fit runs the model again

    def fit(self, task: FitTask) -> Arrays:
        from kvstore.calibration.donor.fit import fit

        return fit(task.model, task.dump, task.scratch, task.progress)

    def report(self, task: FitTask, arrays: Arrays) -> Report:
        """Of passages behind another beginning; "without": by the donor alone."""
        from kvstore.calibration.donor.quality import report

        return report(task.model, task.dump, dict(arrays))


class _Approximate(ProfileSection):
    """What reuse behind other tokens loses."""

    has_curve = False  # every fit runs the model again

    def fit(self, task: FitTask) -> Arrays:
        from kvstore.calibration.approximate.fit import fit

        return fit(task.model, task.dump, task.progress)

    def report(self, task: FitTask, arrays: Arrays) -> Report:
        """How often the bound of the KL holds on windows that it was not fitted to."""
        from kvstore.calibration.approximate.fit import report

        return report(task.model, task.dump, dict(arrays))


class _Aqua(ProfileSection):
    """AQUA-KV's predictors. Its rate is given; what more text improves is the error."""

    has_curve = False

    def fit(self, task: FitTask) -> Arrays:
        from kvstore.calibration.aqua.fit import DumpWindows, fit

        layers = len(task.dump.layout.layers)
        watched = DumpWindows(task.dump, lambda layer: task.progress("aqua: fitting layers", layer, layers))
        arrays = fit(watched, _AQUA_BITS, scratch=task.scratch).to_arrays()
        task.progress("aqua: fitting layers", layers, layers)
        return arrays

    def report(self, task: FitTask, arrays: Arrays) -> Report:
        from kvstore.calibration.aqua.quality import report

        return report(task.dump, arrays, _AQUA_BITS)


_FITS: dict[str, tuple[str, type[ProfileSection]]] = {  # package, section
    "lossless": ("predictive", _Lossless),
    "levels": ("predictive", _Levels),
    "aqua": ("aqua", _Aqua),
    "lossy": ("lossy", _Lossy),
    "donor": ("donor", _Donor),
    "approximate": ("approximate", _Approximate),
}
