"""Fits what the donor codec carries from layer to layer.

`passages` makes pairs of the same passage in two contexts, `fit` the maps, `quality` measures them on held-out windows.
"""
