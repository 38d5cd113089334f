"""The donor codec with tensors on a GPU: coded by the CPU, so that the way there and back is part of the time, and in
groups by kernels, to which the donor's rows are sent.

A block of 64 tokens whose rows all have a donor: the same tokens behind another prefix, 7 positions further. 0.4 % of
each value is what the prefix changes. The peer is a copy of the raw block between the device and pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.common import Rows, use_helpers_of_tests
from benchmarks.device.machine import Layers, Machine, WrongBits, check, check_bytes, like, nbytes, on_cpu
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.entropy.codec import EntropyCodec

ROPE = '{"rope_theta": 10000.0, "rope_type": "default"}'
SHIFT, START = 7, 256
NOISE = 0.004

use_helpers_of_tests()  # models with random arrays


def measure(machine: Machine, rows: Rows) -> None:
    layers, count = machine.choose(32, 8, 2), machine.choose(64, 64, 16)
    layout = machine.layout(layers, rope=ROPE)
    donor = on_cpu(machine.cache(layers, count))
    block = near(machine, KVView.of_layers(layout, donor), donor)
    info = BlockInfo(layout, np.arange(count, dtype=np.uint32), START)
    donor_view = KVView.of_layers(layout, donor)
    spans = [DonorRows.of(Span(0, count, 0, 0, SHIFT), donor_view)]
    measure_codec(machine, rows, f"donor/{layers}layers", DonorCodec(EntropyCodec()), info, spans, block)
    in_groups = groups_codec(machine, info)
    if not in_groups.codes_on(machine.device, "bfloat16"):
        raise WrongBits("donor/groups: the device does not pass the codec's trial; the CPU codes instead")
    measure_codec(machine, rows, f"donor/groups/{layers}layers", in_groups, info, spans, block)
    if not in_groups.codes_on(machine.device, "bfloat16"):
        raise WrongBits("donor/groups: the device failed; the CPU coded instead")


def groups_codec(machine: Machine, info: BlockInfo) -> DonorCodec:
    """With a model of random weights."""
    import groupcases

    from kvstore.codecs.donor.groups.model import model_of_section
    from kvstore.codecs.predictive.kernels import blocks

    if machine.dry:
        blocks.TRIAL_TOKENS = 4  # the interpreter takes its time
    shapes = [(x.heads, x.key_dim, x.value_dim) for x in info.layout.layers]
    model = model_of_section(info.layout, groupcases.arrays_of(shapes, True, 1, 5))
    return DonorCodec(EntropyCodec(), groups=lambda: model)


def measure_codec(
    machine: Machine,
    rows: Rows,
    case: str,
    codec: DonorCodec,
    info: BlockInfo,
    spans: Sequence[DonorRows],
    block: Layers,
) -> None:
    """First the bytes of the CPU, and every bit back; then what both directions take. spans: of one donor."""
    layout, donor_view = info.layout, spans[0].view
    view = machine.view(layout, block)
    room = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, view, spans, room)
    if sizes is None:
        raise WrongBits(f"{case}: a block takes more than its bound")
    payload = bytes(room[: sum(sizes)])
    other = memoryview(bytearray(codec.bound(info)))
    if codec.encode(info, KVView.of_layers(layout, on_cpu(block)), spans, other) != sizes:
        raise WrongBits(f"{case}: layers of a block on the device have other sizes than on the CPU")
    check_bytes(payload, bytes(other[: len(payload)]), case)
    back = like(block)
    target = machine.view(layout, back)
    codec.decode(info, memoryview(payload), sizes, [donor_view], target)
    machine.wait()
    check(back, block, case)
    raw = nbytes(block)
    pinned, flat = machine.pinned(raw), machine.empty(raw)
    functions: dict[str, Callable[[], object]] = {
        "to host": lambda: pinned.copy_(flat, non_blocking=True),
        "to device": lambda: flat.copy_(pinned, non_blocking=True),
        "encode": lambda: codec.encode(info, view, spans, room),
        "decode": lambda: codec.decode(info, memoryview(payload), sizes, [donor_view], target),
    }
    found = machine.interleave({name: machine.by_clock(function) for name, function in functions.items()})
    rows.add(case, "ratio", raw / len(payload), "x, of values that differ by 0.4 %")
    for way, copy in (("encode", "to host"), ("decode", "to device")):
        rows.add(case, f"{way}_GBps", raw / found[way] / 1e9, "GB/s", "pinned copy", found[copy] / found[way])
    rows.add(case, "bit_identical", 1, "1 = yes")


def near(machine: Machine, view: KVView, donor: Layers) -> Layers:
    """What another prefix makes of the donor's rows, on the device: keys rotated by SHIFT, all with a little noise."""
    copy = [(k.clone(), v.clone()) for k, v in donor]
    rotate_keys(KVView.of_layers(view.layout, copy), SHIFT)
    generator = torch.Generator().manual_seed(1)

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * NOISE
        return (tensor.float() * (1 + noise)).bfloat16().to(machine.device)

    return [(noisy(k), noisy(v)) for k, v in copy]
