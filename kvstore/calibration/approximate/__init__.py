"""Fits the profile's section "approximate": what caches that are put together from donors lose on this model.

`cases` makes prompts whose tokens were computed before in other contexts, `measure` runs the model on them, `fit` finds
the constants of `Estimates`.
"""
