"""Decodes the blocks of a hit layer by layer, while a model runs through the layers that are there already."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from kvstore.codecs import KVView
from kvstore.codecs.base import CodedBlock, LayersOfBlocks
from kvstore.codecs.by_layers import by_turns
from kvstore.codecs.registry import codec_label
from kvstore.config import MIB
from kvstore.core import late_work
from kvstore.core.workers import Workers
from kvstore.errors import LayerLost, StoreForked
from kvstore.gate.gate import Gate
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.read.decode import ByLayers
from kvstore.read.stripes import DECODING, Lost, Stripe, StripedBlock, Striping
from kvstore.residency.lifecycle import interrupted
from kvstore.residency.residency import Residency
from kvstore.tiers.base import SealedSource

# The get itself decodes at least this share of the layers while it reads, so that the threads are ahead of the model.
# The rest comes in so many steps, and of about so many raw bytes at a time.
_LEAST_SHARE = 0.1
_STEPS = 8
_UNIT_BYTES = 4 * MIB
# This share of the time that threads wait for reads can be used to decode. A pass of a model on a CPU takes that long.
_SPARE = 0.6
_PASS_S = 0.05


@dataclass(frozen=True)
class HeldBlock:
    """A record in memory, read and checked, of which the first layers are decoded."""

    read: BlockRead
    record: SealedSource
    by: ByLayers
    coded: CodedBlock
    seconds: float  # of processor time, that the first layers took


class _Unit:
    """Some layers of some blocks. Whoever needs them decodes them; `lock` is held meanwhile, however that ends.

    work: decodes them, and returns which cannot be had. It keeps what it reads, and goes once it has returned, so that
    memory goes back to the pool with the last unit that has it.

    thread: has the lock; 0 for none.
    """

    __slots__ = ("done", "layers", "lock", "lost", "thread", "work")

    def __init__(self, layers: range, work: Callable[[], Sequence[Lost]]) -> None:
        self.layers = layers
        self.work: Callable[[], Sequence[Lost]] | None = work
        self.done = False
        self.lost = False  # one of the blocks cannot be decoded
        self.lock = threading.Lock()
        self.thread = 0

    @property
    def is_here(self) -> bool:
        """Whether this thread is inside, interrupted by the code that asks."""
        return self.thread == threading.get_ident() and self.lock.locked()


class LayerDecode:
    """The layers of one hit that are still to be decoded. Thread-safe.

    Records are in memory, whole and checked; or their other layers are still read (stripes.py), and their place in
    storage is held until then. The store's threads decode layer after layer. Who waits for a layer decodes, too, so
    that it comes even if the store is closed meanwhile, which reads the rest first (`finish`). Once nobody refers to
    this any more, the threads leave off.

    Args:
        residency: is told of records that turn out to be damaged.
        executor: its threads decode.
        threads: how many of them at once at most; no more than torch leaves processors to, but one.
        gate: is told what decoding took.
        layers: how many the layout has.
        share: of them, which the get decodes itself; see `first_share`.
        stripes: makes what reads layers later, if some are; in how many parts a record is read then.

    Attributes:
        first: the layers that the get decodes itself.
    """

    def __init__(
        self,
        residency: Residency,
        executor: Workers,
        threads: int,
        gate: Gate,
        layers: int,
        share: float,
        stripes: Striping | None = None,
    ) -> None:
        first, *self._steps = steps_of(layers, share, _STEPS if stripes is None else stripes.parts)
        self.first = first
        self._striping = stripes
        self._striped: deque[tuple[StripedBlock, float]] = deque()  # until `begin`
        self._residency = residency
        self._executor = executor
        self._threads = max(1, min(threads, free_processors()))
        self._gate = gate
        self._pid = os.getpid()
        self._held: deque[HeldBlock] = deque()  # until `begin`
        self._units: list[_Unit] = []
        self._queue: deque[_Unit] = deque()
        self._ready = first.stop  # so many layers need not be waited for
        self._seconds: deque[float] = deque()  # what each unit took, and the get's own share
        self._telling = threading.Lock()  # taken once
        self._tokens: dict[str, int] = {}  # by codec

    def hold(self, block: HeldBlock) -> None:
        """Decode the other layers of this block later."""
        self._held.append(block)

    def hold_striped(self, block: StripedBlock, seconds: float) -> None:
        """Read and decode the other layers of this block later. seconds: of processor time that its first one took."""
        self._striped.append((block, seconds))

    def begin(self, out: KVView, tokens: int) -> bool:
        """Let the threads begin with the blocks among the first `tokens` tokens of `out`; False if there are none."""
        held = sorted((b for b in self._held if b.read.start < tokens), key=lambda block: block.read.start)
        striped = sorted((b for b in self._striped if b[0].read.start < tokens), key=lambda b: b[0].read.start)
        self._held.clear()
        self._striped.clear()
        if not ((held or striped) and self._steps):
            return False
        self._units = self._units_of(held, out) + self._units_of_stripes([block for block, _ in striped], out)
        self._units.sort(key=lambda unit: unit.layers.start)
        for read, codec in [
            *((block.read, block.record.header.codec) for block in held),
            *((block.read, block.header.codec) for block, _ in striped),
        ]:
            name = codec_label(codec)
            self._tokens[name] = self._tokens.get(name, 0) + len(read.tokens)
        self._seconds.append(sum(block.seconds for block in held) + sum(seconds for _, seconds in striped))
        self._queue.extend(self._units)
        for _ in range(self._threads):
            self._line_up()
        return True

    def _units_of(self, blocks: Sequence[HeldBlock], out: KVView) -> list[_Unit]:
        """In the order in which a model needs them."""
        apart: dict[int, list[HeldBlock]] = {}
        for block in blocks:
            apart.setdefault(id(block.by.codec), []).append(block)
        groups = [(same, _layers_of(same, out)) for same in apart.values()]
        return [
            _Unit(layers, partial(_decode_held, same, decode, layers, numbers))
            for layers in self._steps
            for same, decode in groups
            for numbers in _ranges(len(same), _blocks_of_unit(layers, same[0].read, out))
        ]

    def _units_of_stripes(self, blocks: Sequence[StripedBlock], out: KVView) -> list[_Unit]:
        """The same, of blocks that are still to be read."""
        if not blocks or self._striping is None:
            return []
        stripes = [
            Stripe(layers, blocks[numbers.start : numbers.stop])
            for layers in self._steps
            for numbers in _ranges(len(blocks), _blocks_of_unit(layers, blocks[0].read, out))
        ]
        self._striping.finishing.add(self)
        reader = self._striping.reader(stripes, out)
        self._striping = None  # what reads goes with the last stripe
        return [_Unit(stripe.layers, partial(reader.decode, number)) for number, stripe in enumerate(stripes)]

    def ready(self, number: int) -> None:
        """Return when layer `number` is decoded, for all blocks; helps with it.

        Raises:
            LayerLost: a record is damaged, or could not be read when its turn came.
            StoreBusy: this thread is decoding a layer already, and was interrupted by whoever calls this.
            StoreForked: this is a child process, where the threads are missing that had begun with it.
        """
        if number < self._ready:
            return
        units = [unit for unit in self._units if unit.layers.start <= number]
        if os.getpid() != self._pid and not all(unit.done for unit in units):
            raise StoreForked("a layer was still being decoded when the process forked; get the cache in this process")
        for unit in units:
            if not (unit.done or unit.lock.locked()):
                late_work.run(self._finish, unit)
        for unit in units:
            if not unit.done:
                late_work.run(self._finish, unit)
        if any(unit.lost for unit in units):
            self._give_up()
            self._residency.metrics.add(Metric.FALLBACK_LAYER_LOST)
            raise LayerLost(
                f"layer {number} cannot be decoded: a record is damaged, or cannot be read; get the cache again, "
                "without lazy"
            )
        self._ready = max(self._ready, max(unit.layers.stop for unit in units))

    def _give_up(self) -> None:
        """Decode nothing more: whoever hears that a layer is lost may fill it, and those behind it, in another way."""
        for unit in self._units:
            with unit.lock:
                if not unit.done:
                    unit.work, unit.lost, unit.done = None, True, True

    def _line_up(self) -> None:
        self._executor.start(partial(_drive, weakref.ref(self)))

    def step(self) -> None:
        """Decode one unit on a thread of the store, and line up behind what others want of it.

        Not one that is decoded elsewhere: this thread would wait for it, and then for the next, which the same thread
        has begun meanwhile.
        """
        try:
            unit = self._queue.popleft()
            while unit.done or unit.lock.locked():
                unit = self._queue.popleft()
        except IndexError:
            return
        with contextlib.suppress(Exception):  # whoever waits for the unit meets it again
            self._finish(unit)
        self._line_up()

    def finish(self) -> None:
        """Decode everything that is left. What cannot be is told to whoever waits for it."""
        if os.getpid() == self._pid:
            for unit in self._units:
                with contextlib.suppress(Exception):
                    self._finish(unit)

    @property
    def is_here(self) -> bool:
        """Whether this thread is decoding a layer, and was interrupted by the code that asks."""
        return any(unit.is_here for unit in self._units)

    def _finish(self, unit: _Unit) -> None:
        if unit.done:
            return
        if unit.is_here:
            raise interrupted(DECODING)
        thread = threading.get_ident()
        with unit.lock:  # no call stands before the `try`, or behind its end, so no interrupt comes there
            unit.thread = thread
            try:
                if not unit.done:
                    if unit.work is not None:  # else whoever decoded it was interrupted behind that
                        self._decode(unit, unit.work)
                    unit.done = True
            finally:
                unit.thread = 0

    def _decode(self, unit: _Unit, work: Callable[[], Sequence[Lost]]) -> None:
        begin = time.thread_time()  # the model computes on the same processors
        for read, why in work():
            unit.lost = True
            if why is not None:
                self._executor.start(partial(_reject, self._residency, read, why))
        unit.work = None
        self._seconds.append(time.thread_time() - begin)
        if len(self._seconds) > len(self._units) and self._telling.acquire(blocking=False):
            for name, tokens in self._tokens.items():
                share = tokens / sum(self._tokens.values())
                self._gate.observe_decode(name, tokens, share * sum(self._seconds))


def _blocks_of_unit(layers: range, read: BlockRead, out: KVView) -> int:
    """How many blocks like this are decoded at a time."""
    part = sum(x.heads * (x.key_dim + x.value_dim) for x in out.layout.layers[layers.start : layers.stop])
    return max(1, _UNIT_BYTES // max(1, part * out.layout.item_bytes * len(read.tokens)))


def _ranges(count: int, each: int) -> list[range]:
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


def _decode_held(blocks: Sequence[HeldBlock], decode: LayersOfBlocks, layers: range, numbers: range) -> list[Lost]:
    return [(blocks[number].read, Metric.DAMAGED_CODEC) for number in decode(layers, numbers)]


def _layers_of(blocks: Sequence[HeldBlock], out: KVView) -> LayersOfBlocks:
    """What decodes blocks of one codec, or blocks that are decoded in order."""
    codec = blocks[0].by.codec
    if codec is not None:
        return codec.by_layers([block.coded for block in blocks], out)
    return by_turns([block.by.in_order for block in blocks if block.by.in_order is not None])


def _drive(ref: weakref.ref[LayerDecode]) -> None:
    found = ref()
    if found is not None:
        found.step()


def _reject(residency: Residency, read: BlockRead, why: Metric) -> None:
    with contextlib.suppress(Exception):  # on a thread of the store, whose next get finds the same
        residency.reject(read.record, read.source, why)


def free_processors() -> int:
    """Return how many processors of this process torch leaves to other threads."""
    return max(0, len(os.sched_getaffinity(0)) - torch.get_num_threads())


def first_share(reading_s: float, decoding_s: float, threads: int, free: int) -> float:
    """Return which share of the layers a get decodes before it returns.

    While it reads, threads have time to decode, and what they do then need not be done beside the model. They do no
    more than is too much to be done beside it: a get of all layers takes longer than one of the first.

    Args:
        reading_s, decoding_s: of the blocks; decoding on one thread.
        threads: that decode for the get.
        free: processors that the model leaves.

    Example:
        >>> first_share(0.07, 0.17, 2, 1), first_share(0.02, 0.04, 2, 1)
        (0.49, 0.1)
    """
    wanted = min(_SPARE * threads * reading_s, decoding_s - free * _PASS_S)
    return min(1.0, max(_LEAST_SHARE, round(wanted / max(decoding_s, 1e-9), 2)))


def steps_of(layers: int, share: float = _LEAST_SHARE, steps: int = _STEPS) -> list[range]:
    """Return which layers are decoded together; the first of them, this share of all or one, by the get itself.

    steps: in how many the others are decoded, at most.

    Example:
        >>> steps_of(30)  # doctest: +ELLIPSIS
        [range(0, 3), range(3, 6), range(6, 9), range(9, 13), ..., range(26, 30)]
    """
    first = max(1, math.ceil(layers * share))
    rest = layers - first
    ends = [first + rest * number // steps for number in range(steps + 1)]
    return [range(first), *(range(a, b) for a, b in pairwise(ends) if a < b)]
