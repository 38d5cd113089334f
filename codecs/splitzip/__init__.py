"""Codec 1, splitzip: 4-bit codes for exponents, without loss, at the speed of memory.

`codec` codes blocks in C++, `reference` is the same as a plain program, `kernels` codes tensors on a GPU.
docs/codecs/splitzip.md has the reasons and figures.
"""
