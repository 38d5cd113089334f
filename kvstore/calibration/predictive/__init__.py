"""Fits the exact mode of the predictive codec.

`sums` goes over the windows once, `fit` solves the regressions, `tables` makes the rest of the section, `quality`
measures it on held-out windows.
"""
