"""The exact mode of predictive on the GPU that holds the cache, against a copy on the device.

The model has random weights, and the values are what it predicts with noise of the size that it expects: so times are
those of a real cache of these shapes, and the ratio is of these values and no claim. Blocks of 64 tokens, 8 layers of
8 heads of 128; 32 blocks are coded in one call, as when a long prompt is stored, or one, as when an answer grows.
Wall-clock time, with what the host does between kernels. `threads`: as a store's threads code, each a block at a time,
beside the CPU by as many.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import Rows, use_helpers_of_tests
from benchmarks.device.machine import Layers, Machine, WrongBits, check, check_bytes, like, nbytes
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.device_mode import DeviceMode
from kvstore.codecs.predictive.exact import ExactMode
from kvstore.core.layout import KVLayout

use_helpers_of_tests()  # models with random arrays, and blocks that they predict

Made = tuple[np.ndarray[Any, Any], Layers]
NO_LIMIT = 1 << 40
MADE = 2  # blocks that are made; they take a second each, and are coded again and again


def measure(machine: Machine, rows: Rows) -> None:
    import predictcases

    from kvstore.codecs.predictive.kernels import blocks as kernels
    from kvstore.codecs.predictive.kernels import launch

    if machine.dry:
        kernels.TRIAL_TOKENS = 4  # the interpreter takes its time
    layers = machine.choose(8, 4, 2)
    shape = machine.choose((8, 128, 128), (8, 128, 128), (1, 8, 8))
    model = predictcases.model_of([shape] * layers, True, 5)
    made = [made_block(machine, model, number, predictcases) for number in range(machine.choose(MADE, MADE, 1))]
    trial(machine, rows, "predictive", PredictiveCodec(model), model, made[0])
    native = predictcases.native(model)

    def encoded(tokens: np.ndarray[Any, Any], view: KVView) -> list[bytes]:
        return predictcases.encoded(native, tokens, 0, view, "scalar")

    blocks = Blocks("predictive", kernels.load(model, machine.device), launch, encoded, made)
    for count in machine.choose((1, 8, 32), (1, 8), (1,)):
        blocks.measure(machine, rows, count)
    measure_threads(machine, rows, "predictive", ExactMode(model), made[0])


def made_block(machine: Machine, model: Any, number: int, cases: Any) -> Made:
    """Tokens, and the tensors of a block that the model predicts, on the CPU. cases: what makes models of this kind."""
    import predictcases

    count = machine.choose(64, 64, 3)
    tokens = np.random.default_rng(number).integers(0, predictcases.VOCABULARY, count).astype(np.int64)
    tensors = predictcases.view_of(model, cases.block_of(model, "predicted", tokens, 0, number)).tensors()
    return tokens, list(zip(tensors[::2], tensors[1::2], strict=True))


def trial(machine: Machine, rows: Rows, name: str, codec: PredictiveCodec, model: Any, made: Made) -> None:
    """The device passes the codec's own trial; the store's way through the codec gives back every bit."""
    tokens, layers = made
    info = BlockInfo(model.layout, tokens.astype(np.uint32), 0)
    if not codec.codes_on(machine.device, "bfloat16"):
        raise WrongBits(f"{name}: the device does not pass the codec's trial; the CPU codes instead")
    outs = [memoryview(bytearray(codec.bound(info))) for _ in range(2)]
    there = moved(machine, layers)
    views = (KVView.of_layers(info.layout, layers), machine.view(info.layout, there))
    sizes = [codec.encode(info, view, out) for view, out in zip(views, outs, strict=True)]
    if sizes[0] is None or sizes[0] != sizes[1]:
        raise WrongBits(f"{name}: the layers have {sizes[1]} bytes, the CPU's {sizes[0]}")
    payload = outs[1][: sum(sizes[0])]
    check_bytes(bytes(payload), bytes(outs[0][: len(payload)]), name)
    back = like(there)
    codec.decode(info, payload, sizes[0], machine.view(info.layout, back))
    check(back, layers, name)
    rows.add(f"{name}/trial", "passed", 1, "1 = yes")


def measure_threads(machine: Machine, rows: Rows, name: str, mode: DeviceMode, made: Made) -> None:
    """Threads that code blocks at the same time, as those of a store do: on the device, where what waits is coded in
    one call, and on the CPU, from and to its own memory."""
    tokens, layers = made
    threads, count = machine.choose((16, 96), (16, 48), (2, 2))
    layout = KVLayout.uniform(len(layers), layers[0][0].shape[0], layers[0][0].shape[2], "bfloat16")
    info, nbytes_of = BlockInfo(layout, tokens.astype(np.uint32), 0), nbytes(layers)
    # Each has memory of its own: what encodes writes there before it knows the place of everything.
    places = {
        "device": [machine.view(layout, moved(machine, layers)) for _ in range(count)],
        "CPU": [KVView.of_layers(layout, [(k.clone(), v.clone()) for k, v in layers]) for _ in range(count)],
    }
    rooms = [memoryview(bytearray(2 * nbytes_of)) for _ in range(count)]
    machine.wait()
    _, sizes = mode.encode(info, places["CPU"][0], rooms[0], NO_LIMIT)
    if not isinstance(sizes, tuple):
        raise WrongBits(f"{name}: a block without a limit was not coded")
    payload = memoryview(bytes(rooms[0][: sum(sizes)]))

    def encode(views: list[KVView], number: int) -> None:
        if mode.encode(info, views[number], rooms[number], NO_LIMIT)[1] != sizes:
            raise WrongBits(f"{name}: a block that threads code together takes other bytes than alone")

    def decode(views: list[KVView], number: int) -> None:
        mode.decode(info, payload, sizes, views[number])

    with ThreadPoolExecutor(threads) as pool:
        found = machine.interleave(
            {
                f"{place} {way.__name__}": machine.by_clock(
                    lambda views=views, way=way: list(pool.map(partial(way, views), range(count)))
                )
                for place, views in places.items()
                for way in (encode, decode)
            },
            machine.choose(5, 3, 1),
        )
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(encode, places["device"]), range(count)))
    for view, room in zip(places["device"], rooms, strict=True):
        check_bytes(bytes(room[: len(payload)]), bytes(payload), name)
        kv = view.tensors()
        check(list(zip(kv[::2], kv[1::2], strict=True)), layers, name)
    for way in ("encode", "decode"):
        seconds, on_cpu = found[f"device {way}"], found[f"CPU {way}"]
        case = f"{name}/{threads}threads"
        rows.add(
            case, f"{way}_GBps", count * nbytes_of / seconds / 1e9, "GB/s", "CPU, as many threads", on_cpu / seconds
        )


@dataclass
class Blocks:
    """What is coded and timed. launch: has `encode_blocks` and `decode_blocks`; encoded: the layers as the CPU writes
    them."""

    name: str
    device: Any
    launch: Any
    encoded: Callable[[np.ndarray[Any, Any], KVView], list[bytes]]
    made: list[Made]

    def measure(self, machine: Machine, rows: Rows, count: int) -> None:
        made = [self.made[number % len(self.made)] for number in range(count)]
        tokens, starts = [of for of, _ in made], [0] * count
        blocks = [moved(machine, layers) for _, layers in made]
        payload, sizes = self.launch.encode_blocks(self.device, blocks, tokens, starts, [NO_LIMIT] * count)
        known = [of for of in sizes if of is not None]
        if len(known) < count:
            raise WrongBits(f"{self.name}: a block without a limit was not coded")
        layout = self.device.layout
        right = [b"".join(self.encoded(of, KVView.of_layers(layout, layers))) for of, layers in self.made]
        expected = b"".join(right[number % len(right)] for number in range(count))
        check_bytes(payload.cpu().numpy().tobytes(), expected, self.name)
        out = [like(layers) for layers in blocks]
        if self.launch.decode_blocks(self.device, payload, known, tokens, starts, out).any():
            raise WrongBits(f"{self.name}: the kernel refuses what it wrote")
        for found, layers in zip(out, blocks, strict=True):
            check(found, layers, self.name)
        raw, coded = sum(map(nbytes, blocks)), payload.numel()
        source, target = machine.empty(raw), machine.empty(raw)
        functions: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(source),
            "encode": lambda: self.launch.encode_blocks(self.device, blocks, tokens, starts, [NO_LIMIT] * count),
            "decode": lambda: self.launch.decode_blocks(self.device, payload, known, tokens, starts, out),
        }
        found_s = machine.interleave({name: machine.by_clock(function) for name, function in functions.items()})
        case, copied = f"{self.name}/{count}blocks", 2 * raw / found_s["copy"]
        rows.add(case, "ratio", raw / coded, "x, of values that a random model predicts")
        rows.add(case, "copy_GBps", raw / found_s["copy"] / 1e9, "GB/s")
        for way in ("encode", "decode"):
            share = (raw + coded) / found_s[way] / copied
            rows.add(case, f"{way}_GBps", raw / found_s[way] / 1e9, "GB/s", "device copy", share)
            rows.add(case, f"{way}_block_us", found_s[way] / count * 1e6, "us")
        rows.add(case, "bit_identical", 1, "1 = yes")


def moved(machine: Machine, layers: Layers) -> Layers:
    """The tensors on the device, with memory of their own."""
    return [(k.to(machine.device, copy=True), v.to(machine.device, copy=True)) for k, v in layers]
