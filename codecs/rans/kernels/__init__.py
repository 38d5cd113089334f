"""rANS on the device that the symbols are on, in Triton: `launch` starts `encode` and `decode`.

Importing this package costs nothing; its modules import triton, which is optional.
"""
