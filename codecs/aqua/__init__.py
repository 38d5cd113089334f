"""Codec 5, aqua: AQUA-KV as published, lossy, from a profile; the baseline of comparisons.

`codec` codes blocks, `predictors` predicts a layer from the one before, `higgs` and `minmax` quantise what is left.
docs/codecs/aqua.md has figures.
"""
