"""Codec 7, entropy: bf16 without loss and without a model, by shipped tables and rANS.

`codec` codes blocks in C++, `reference` is the same as a plain program, `tables` reads the distributions, which are
part of the format. Other dtypes are coded by splitzip. docs/codecs/entropy.md has the reasons and figures.
"""
