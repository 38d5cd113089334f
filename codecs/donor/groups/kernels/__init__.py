"""The donor codec's mode in groups on a GPU, in Triton: the bytes of csrc/donor/groups.h.

`donors` is what donors predict, `encode` and `decode` the kernels of groups, `launch` runs them over blocks.
"""
