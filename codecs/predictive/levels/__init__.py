"""The exact mode in levels 1 to 3: inside a layer, channels are decoded in groups, each predicted from those before.

`model` is the section "levels" of a profile, `reference` the plain program; `mode` codes blocks by
csrc/levels/levels.h, or on a GPU by `kernels`.
"""
