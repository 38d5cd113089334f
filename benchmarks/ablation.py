"""What does each part of the lossless predictor bring? `python -m benchmarks.ablation [--windows 32]`

Fits the predictor with one part removed at a time, and prints the code length of held-out windows: bits a value,
payloads without records. Text: of ShareGPT's conversations those for calibration, an eighth of the windows held out;
or `--text FILE`. `peer` is the whole predictor; ratio below 1 says by how much the part is worth having.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import Rows, arguments, scratch
from benchmarks.conversations import load_model
from benchmarks.peers.quality_data import calibration_text
from kvstore.calibration.dump import KVDump
from kvstore.calibration.lossless import Wiring, bits_per_value, fit

CASES = {
    "all": Wiring(),
    "without/token-table": Wiring(tokens=False),
    "without/second-layer": Wiring(layers=1),
    "without/own-keys": Wiring(own_keys=False),
    "without/adaptation": Wiring(adapt=False),
    "aqua-wiring": Wiring(layers=1, values=False),
    "aqua-wiring/without/adaptation-and-tokens": Wiring(tokens=False, layers=1, values=False, adapt=False),
}


def main() -> None:
    parser = arguments("Bits a value of the lossless predictor with one part removed at a time.")
    parser.add_argument("--windows", type=int, help="of 1,024 tokens, an eighth of them held out (32)")
    parser.add_argument("--dir", type=Path, help="where raw caches are kept meanwhile (default: build/scratch)")
    args = parser.parse_args()
    windows = args.windows or (8 if args.quick else 32)
    rows = Rows("ablation", args.json)
    model, tokenizer = load_model(args.model)
    with scratch("ablation", args.dir) as folder:
        text = calibration_text(args.text, None, windows)
        dump = KVDump.make(model, tokenizer, text, folder / "dump", windows=windows)
        whole = 0.0
        for name, wiring in CASES.items():
            bits = bits_per_value(dump, fit(dump, wiring=wiring), dump.held_out)
            whole = whole or bits
            rows.add(f"predictive/lossless/{name}", "bits_per_value", bits, "bits", "all", whole / bits)
    rows.main_exit()


if __name__ == "__main__":
    main()
