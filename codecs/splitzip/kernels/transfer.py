"""Coded blocks on their way from the device to the host, while the device goes on computing."""

from __future__ import annotations

import torch

from kvstore.codecs.splitzip.kernels.launch import Plan


class HostCopy:
    """A coded block that is being copied to pinned host memory. Made by `to_host`; used by one thread at a time.

    Planes have a known size and are on their way at once; escapes follow when `wait` knows how many there are. Layers
    lie in `host` as in the device's buffer, at `plan.offsets`.
    """

    def __init__(self, buffer: torch.Tensor, sizes: torch.Tensor, plan: Plan, stream: torch.cuda.Stream) -> None:
        self._buffer = buffer
        self._plan = plan
        self._stream = stream
        self.host = torch.empty(buffer.numel(), dtype=torch.uint8, pin_memory=True)
        self._sizes = torch.empty(sizes.numel(), dtype=torch.int64, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            self._sizes.copy_(sizes, non_blocking=True)
            self._sizes_known = stream.record_event()
            for begin, known in zip(plan.offsets, plan.known, strict=False):
                self._copy(begin, begin + known)
        # Their memory is not to be reused on the stream they were made on before the copies are done.
        buffer.record_stream(stream)
        sizes.record_stream(stream)

    def wait(self) -> list[torch.Tensor]:
        """Waits for the block; returns its layers, uint8, views of `host`. Safe to call again."""
        self._sizes_known.synchronize()
        sizes = self._sizes.tolist()
        with torch.cuda.stream(self._stream):
            for begin, known, size in zip(self._plan.offsets, self._plan.known, sizes, strict=False):
                self._copy(begin + known, begin + size)
            done = self._stream.record_event()
        done.synchronize()
        return [self.host[begin : begin + size] for begin, size in zip(self._plan.offsets, sizes, strict=False)]

    def _copy(self, begin: int, end: int) -> None:
        self.host[begin:end].copy_(self._buffer[begin:end], non_blocking=True)


def to_host(buffer: torch.Tensor, sizes: torch.Tensor, plan: Plan, stream: torch.cuda.Stream | None = None) -> HostCopy:
    """Starts to copy what `encode_block` returned to pinned host memory on `stream` (default: one of its own).

    Waits for nothing: the copies begin when the encoder, on the current stream, is done, and overlap with what is
    launched there afterwards. `buffer` must not be written to before `wait` has returned.
    """
    if stream is None:
        stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
    return HostCopy(buffer, sizes, plan, stream)
