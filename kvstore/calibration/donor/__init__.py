"""Fits what the donor codec carries from layer to layer.

`passages` makes pairs of the same passage in two contexts, `differences` fits to what rows differ in, be they a model's
or a store's, `fit` does so with a model, `quality` measures that on held-out windows. `propagated` fits simpler maps,
which profiles had before, and speculative archives have.
"""
