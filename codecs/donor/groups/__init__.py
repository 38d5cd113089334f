"""The donor codec's mode in groups: differences are predicted as levels of the exact predictor predict blocks.

`model` is what it takes from a profile, `reference` the plain program; `mode` codes blocks by csrc/donor/groups.h,
or on a GPU by `kernels`.
"""
