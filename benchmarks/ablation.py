"""What does each part of the lossless predictor bring? `python -m benchmarks.ablation [--windows 32]`

Fits the predictor with one part removed at a time, and prints the code length of held-out windows: bits a value,
payloads without records. Text: of ShareGPT's conversations those for calibration, an eighth of the windows held out;
or `--text FILE`. `peer` is the whole predictor; ratio below 1 says by how much the part is worth having.
`expected-token` has the mean of the token table under the model's own prediction in place of the row of the token that
came: what coding without the tokens could know (the sequential KV paper, section 7.1, whose linear
approximation is exact here, for the table is linear in the distribution).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Rows
from benchmarks.peers.quality.data import dump_arguments, dumped
from kvstore.calibration.dump import KVDump, floats
from kvstore.calibration.predictive.fit import fit
from kvstore.calibration.predictive.inputs import Wiring
from kvstore.calibration.predictive.quality import bits_per_value

AT_ONCE = 64  # tokens whose distributions are looked at together
CASES = {
    "all": Wiring(),
    "without/token-table": Wiring(tokens=False),
    "without/second-layer": Wiring(layers=1),
    "without/own-keys": Wiring(own_keys=False),
    "without/adaptation": Wiring(adapt=False),
    "aqua-wiring": Wiring(layers=1, values=False),
    "aqua-wiring/without/adaptation-and-tokens": Wiring(tokens=False, layers=1, values=False, adapt=False),
}


@dataclass(frozen=True)
class ExpectedTokens(KVDump):
    """A dump whose every position has a token of its own: the model's expectation of what the table says."""

    table: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))

    @classmethod
    def of(cls, dump: KVDump, model: Any) -> ExpectedTokens:
        rows = torch.from_numpy(floats(np.asarray(dump.first_layer)))
        found = []
        for window in range(dump.windows):
            ids = torch.from_numpy(dump.tokens(window))
            with torch.inference_mode():
                logits = model(ids[None]).logits[0, :-1]
            expected = torch.cat([(part.float().softmax(-1) @ rows) for part in logits.split(AT_ONCE)])
            found += [rows.mean(0, keepdim=True), expected]  # of the first token nothing is known
        table = torch.cat(found).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return cls(dump.folder, dump.layout, dump.windows, dump.length, dump.limit, table)

    def tokens(self, window: int) -> npt.NDArray[np.int64]:
        return np.arange(window * self.length, (window + 1) * self.length)

    @property
    def first_layer(self) -> npt.NDArray[np.uint16]:  # type: ignore[override]
        return self.table


def main() -> None:
    args = dump_arguments("Bits a value of the lossless predictor with one part removed at a time.")
    rows = Rows("ablation", args.json)
    with dumped(args, "ablation") as (model, dump):
        whole = 0.0
        for name, wiring in CASES.items():
            bits = bits_per_value(dump, fit(dump, wiring=wiring), dump.held_out)
            whole = whole or bits
            rows.add(f"predictive/lossless/{name}", "bits_per_value", bits, "bits", "all", whole / bits)
        expected = ExpectedTokens.of(dump, model)
        bits = bits_per_value(expected, fit(expected), dump.held_out)
        rows.add("predictive/lossless/expected-token", "bits_per_value", bits, "bits", "all", whole / bits)
    rows.main_exit()


if __name__ == "__main__":
    main()
