"""Load or recompute: what a get would take, what computing the same tokens would take, and which of them pays.

`curve` fits seconds to what was observed, `prefill` is the model's side, `load` the store's; `probe` times a short
read, `saved` keeps the estimates beside the store, and `gate` decides (docs/gate.md).
"""
