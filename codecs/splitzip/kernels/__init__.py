"""splitzip on the device that the tensors are on, in Triton.

`blocks` is what the codec calls; `launch` starts the kernels of the other files, which other codecs share in part.

Importing this package costs nothing; the modules in it import triton, which is an optional dependency
(`pip install kvstore[gpu]`), and are themselves imported only when a tensor on a device is coded, or under
TRITON_INTERPRET=1.
"""
