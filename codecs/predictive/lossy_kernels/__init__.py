"""The lossy mode of the predictive codec on the device that the tensors are on, in Triton: decoding.

`blocks` is what the codec calls; `launch` starts the kernels of the other files. Importing this package costs nothing;
its modules import triton, which is optional, when a tensor on a device is decoded.
"""
