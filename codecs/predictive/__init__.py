"""Codec 2, predictive: a cache is predicted from its tokens and the layers before; what the prediction misses is coded.

`codec` is the codec of both modes: `exact` (with `reference`, its plain program) and `lossy` (encoded by
`lossy_reference`). `model` and `lossy_model` are the sections of a profile. docs/codecs/predictive.md has the reasons
and figures.
"""
