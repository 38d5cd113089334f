"""The rANS kernels: compiled for GPUs that are not there, and on one that is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernelruns import FULL, Compiled, needs_triton, on_a_gpu
from ranscases import random_freqs, random_symbols

from kvstore.codecs.rans.coder import RansTables

pytestmark = needs_triton
SCRIPT = "compiled_rans.py"


@pytest.mark.slow
def test_compiled_kernels_keep_everything_in_registers(compiled: Compiled) -> None:
    compiled.keep_everything_in_registers(12 if FULL else 4)
    for row in compiled.rows:
        assert row["registers"] <= 64, row  # as many warps as a multiprocessor has places for programs


def test_lanes_talk_within_their_warp_alone(compiled: Compiled) -> None:
    """A step's words are dealt out by one sum over the warp and two counts of bits; nothing waits for shared memory."""
    for row in compiled.rows:
        assert (row["warps"], row["shared_bytes"], row["barriers"]) == (1, 0, 0), row
        assert (row["warp_sums"], row["bit_counts"], row["divisions"]) == (1, 2, 0), row


@on_a_gpu
@pytest.mark.parametrize("bits", [11, 12])
def test_the_gpu_s_streams_are_the_cpu_s(bits: int) -> None:
    from kvstore.codecs.rans.kernels.launch import DeviceDecoder, DeviceTables, encode

    rng = np.random.default_rng(bits)
    freqs = random_freqs(rng, 60, bits)
    tables = RansTables(freqs, bits)
    lengths = rng.integers(0, 3000, (300, 3))
    lengths[0] = 200_001, 0, 77
    ends = lengths.cumsum().reshape(lengths.shape)
    places = np.stack([ends - lengths, lengths], axis=-1)
    classes = rng.integers(0, 60, int(ends[-1, -1]), dtype=np.uint8)
    symbols = random_symbols(rng, freqs, classes, len(classes))
    sizes = 128 + 2 * lengths.sum(axis=1)
    rooms = np.stack([sizes.cumsum() - sizes, sizes], axis=-1)
    on_device = DeviceTables(tables, "cuda")
    sent = [torch.from_numpy(array).cuda() for array in (symbols, classes, places)]
    out = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cuda")
    done = encode(on_device, *sent, out, torch.from_numpy(rooms).cuda())
    assert not done.status.any()
    buffer = out.cpu().numpy()
    for (begin, size), after, of in zip(done.streams.tolist(), done.after.tolist(), places.tolist(), strict=True):
        parts = [slice(first, first + count) for first, count in of]
        stream, at = tables.encode_parts([symbols[part] for part in parts], [classes[part] for part in parts])
        assert buffer[begin : begin + size].tobytes() == stream
        assert not stream or [size - bytes_after for bytes_after in after] == at
    found = torch.zeros(len(symbols), dtype=torch.uint8, device="cuda")
    decoder = DeviceDecoder(on_device, out, done.streams)
    for part in range(3):
        status = decoder.parts(sent[1], sent[2][:, part : part + 1].contiguous(), found)
    assert not status.any()
    assert torch.equal(found, sent[0])
    # One word of one stream is lost: its own status says so.
    cut = done.streams.clone()
    cut[7, 1] -= 2
    status = DeviceDecoder(on_device, out, cut).parts(sent[1], sent[2], found)
    assert status.nonzero().flatten().tolist() == [7]


def test_the_launch_code_refuses_tensors_on_the_host() -> None:
    from kvstore.codecs.rans.kernels.launch import DeviceDecoder, DeviceTables
    from kvstore.errors import CodecError

    tables = DeviceTables(RansTables(np.array([[2048]], np.uint16), 11), "cpu")
    with pytest.raises(CodecError, match="kernels"):
        DeviceDecoder(tables, torch.zeros(128, dtype=torch.uint8), torch.tensor([[0, 128]]))
