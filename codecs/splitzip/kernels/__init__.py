"""Codecs on the device that the tensors are on, in Triton: one file per kernel, `*_gpu.py` launches them, and
`blocks.py` is what the store's codecs call.

Importing this package costs nothing; the modules in it import triton, which is an optional dependency
(`pip install kvstore[gpu]`), and are themselves imported only when a tensor on a device is coded, or under
TRITON_INTERPRET=1.
"""
