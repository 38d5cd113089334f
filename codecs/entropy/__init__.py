"""Codec 7, entropy: without loss and without a model, by shipped tables and rANS. Takes every dtype.

`codec` codes blocks in C++, `reference` is the same as a plain program, `tables` reads the distributions, which are
part of the format. docs/codecs/entropy.md has the reasons and figures.
"""
