"""The entropy coder of symbols: interleaved rANS streams. Not a codec: entropy, predictive and donor stand on it.

Symbols and tables come in, bytes go out, and back. `coder` calls the C++, `reference` is the same as a plain program.
"""
