"""Fits the lossy mode of the predictive codec.

`gradients` and `costs` say what an error costs, `transform` and `tables` follow from that, `closed_loop` gives the
inputs that a decoder would have, `quality` measures bits and loss. `fit` runs them in order.
"""
