"""What does each part of the lossy mode bring? `python -m benchmarks.ablation_lossy [--windows 32]`

Fits the lossy predictive codec with one part removed at a time. Each is measured at three steps as in protocol A of
`benchmarks.quality`, on held-out windows; a row says at how many bits a value it loses as little as the whole at its
middle step, by the KL over all scored tokens and by that over the first 64, of which the larger counts. `peer` is the
whole; ratio above 1 is what the part saves. `every-input`: parts use all inputs, whether they are worth their weights
or not, and then all but the tokens, or but the second layer before. Text: of ShareGPT's conversations those for
calibration, an eighth of the windows held out; or `--text FILE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.common import Rows
from benchmarks.peers.quality.data import dump_arguments, dumped
from benchmarks.peers.quality.frontier import bits_at
from kvstore.calibration.dump import KVDump
from kvstore.calibration.lossy.costs import Arrays, Costs, attention_costs, balanced, gradient_costs
from kvstore.calibration.lossy.fit import BALANCE_WINDOWS, COST_WINDOWS, MIDDLE, TABLE_ROUNDS, fit
from kvstore.calibration.lossy.quality import measure
from kvstore.calibration.lossy.tables import fit_tables
from kvstore.calibration.predictive import fit as exact
from kvstore.codecs.predictive import lossy_quantiser
from kvstore.codecs.predictive.lossy_model import input_groups
from kvstore.codecs.predictive.model import PredictiveModel

STEPS = (0.6, 1.0, 1.6)  # of the steps that are fitted at
TOKENS, SECOND_LAYER = (0,), (3, 4)  # kinds of inputs; see `input_groups`


class Ablation:
    """One text's dump, its costs, and the fits to it."""

    def __init__(self, model: Any, dump: KVDump) -> None:
        self.model, self.dump = model, dump
        self.base = PredictiveModel.from_arrays(dump.layout, exact.fit(dump))
        self.costs, self.focus = gradient_costs(model, dump, dump.some(COST_WINDOWS))
        self.unbalanced = self._fit(self.costs, focus=self.focus)
        self.whole = self._balanced(self.unbalanced)

    def cases(self) -> dict[str, Callable[[], Arrays]]:
        return {
            "without/balance": lambda: self.unbalanced,
            "without/row-steps": lambda: self._balanced(self._fit(self.costs)),
            "without/gradients": lambda: self._balanced(self._fit(attention_costs(self.dump))),
            "without/costs": lambda: self._balanced(self._fit(self._squares())),
            "without/transform": self._channels,
            "without/row-adaptation": self._still,
            "every-input": lambda: self._without_inputs(()),
            "every-input/without/tokens": lambda: self._without_inputs(TOKENS),
            "every-input/without/second-layer": lambda: self._without_inputs(SECOND_LAYER),
        }

    def curve(self, arrays: Arrays) -> np.ndarray[Any, Any]:
        """[steps, (bits a value, KL, KL of the first 64)]."""
        levels = [(MIDDLE[0] * share, MIDDLE[1] * share) for share in STEPS]
        windows = list(self.dump.held_out)
        return measure(self.model, self.dump, self.base, arrays, levels, windows)[:, 2:].astype(float)

    def _fit(self, costs: Costs, **options: Any) -> Arrays:
        return fit(self.dump, self.base, costs=costs, **options)

    def _balanced(self, arrays: Arrays) -> Arrays:
        return balanced(self.model, self.dump, self.base, arrays, self.dump.some(BALANCE_WINDOWS), MIDDLE)

    def _squares(self) -> Costs:
        """A square costs the same everywhere in a part, so much that parts have the cost of the whole's."""
        return [[np.eye(len(cost)) * np.trace(cost) / len(cost) for cost in pair] for pair in self.costs]

    def _channels(self) -> Arrays:
        """Components are channels, each with the step of its own cost."""
        arrays = dict(self.unbalanced)
        for number, pair in enumerate(self.costs):
            for which, cost in enumerate(pair):
                prefix = f"{number}.{'kv'[which]}."
                unit = 1 / np.sqrt(np.maximum(cost.diagonal(), 1e-12 * cost.diagonal().max()))
                arrays[prefix + "basis"] = 127 * np.eye(len(cost), dtype=np.int8)
                arrays[prefix + "unit"] = unit.astype(np.float32)
                arrays[prefix + "component"] = np.full(len(cost), 1 / 127, np.float32)
        for _ in range(TABLE_ROUNDS):
            fit_tables(self.dump, self.base, arrays)
        return self._balanced(arrays)

    def _still(self) -> Arrays:
        """Scales do not follow what was coded of the row."""
        return {name: np.zeros_like(x) if name.endswith(".adapt") else x for name, x in self.whole.items()}

    def _without_inputs(self, kinds: Sequence[int]) -> Arrays:
        """Of the first layers, which have no others, they stay."""
        uses = np.zeros((len(self.base.parts), 2), np.uint8)
        for number, which in np.ndindex(*uses.shape):
            groups = input_groups(self.base, number, which)
            uses[number, which] = sum(1 << kind for kind in [k for k in groups if k not in kinds] or groups)
        return self._balanced(self._fit(self.costs, focus=self.focus, uses=uses))


@contextmanager
def rounding() -> Iterator[None]:
    """Numbers are rounded to the nearest, whatever that costs in bits."""
    before = lossy_quantiser.LAGRANGE
    lossy_quantiser.LAGRANGE = 0.0
    try:
        yield
    finally:
        lossy_quantiser.LAGRANGE = before


def main() -> None:
    args = dump_arguments("Bits a value of the lossy mode, at equal loss, with one part removed at a time.")
    rows = Rows("ablation_lossy", args.json)
    with dumped(args, "ablation_lossy") as of:
        found = Ablation(*of)
        whole = found.curve(found.whole)
        middle = whole[len(STEPS) // 2]
        report(rows, "all", whole, middle)
        with rounding():
            report(rows, "without/price-of-bits", found.curve(found.whole), middle)
        for name, make in found.cases().items():
            report(rows, name, found.curve(make()), middle)
    rows.main_exit()


def report(rows: Rows, name: str, curve: np.ndarray[Any, Any], middle: np.ndarray[Any, Any]) -> None:
    """Bits at the whole's loss; where no step loses so little, what the finest takes, and how much it loses."""
    losses = [(bits, max(kl / middle[1], near / middle[2])) for bits, kl, near in curve]
    needed = bits_at(losses, 1.0)
    case = f"predictive/lossy/{name}"
    if needed is None:
        rows.add(case, "bits_per_value", losses[0][0], "bits")
        rows.add(case, "loss_at_that", losses[0][1], "of all's")
    else:
        rows.add(case, "bits_at_equal_kl", needed, "bits", "all", needed / middle[0])


if __name__ == "__main__":
    main()
