"""Blocks that are decoded together: the bits and the errors of those that are decoded one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import groupcases
import levelcases
import numpy as np
import pytest
import seeds
from cpulevels import cpu_levels
from damaged_layers import damaged
from donorcases import case_of
from length import part
from levelcases import block_of, model_of
from predictcases import SHAPES, Shapes, view_of
from threadruns import run_together

from kvstore.codecs import KVView
from kvstore.codecs.donor.groups.mode import native_coder
from kvstore.codecs.in_order import TOGETHER, Native, decode_together
from kvstore.codecs.predictive import _levels
from kvstore.codecs.predictive.levels.mode import native_model
from kvstore.errors import CodecError

pytestmark = pytest.mark.native
CPUS = cpu_levels()
ROWS = (64, 5, 1, 33, 64, 17, 64, 96, 8, 30)  # of the blocks
WIDE: Shapes = [(5, 64, 68)] * 3


class Blocks:
    """Blocks of one level that were coded, of two models in turns, and what they are decoded to."""

    def __init__(self, shapes: Shapes, level: int, seed: int) -> None:
        self.cpu = CPUS[0]
        self.models = [model_of(shapes, True, level, seed + which) for which in range(2)]
        self.coders = [native_model(model) for model in self.models]
        self.of = [(0, 0, 1, 0, 0, 0, 0, 0, 1, 1)[number] for number in range(len(ROWS))]
        self.blocks, self.layers = [], list[list[bytes]]()  # all twins write the same
        for number, (which, n) in enumerate(zip(self.of, ROWS, strict=True)):
            model = self.models[which]
            self.blocks.append(block_of(model, "predicted", np.arange(n), 3 * number, seed))
            view = view_of(model, self.blocks[-1])
            self.layers.append(levelcases.encoded(self.coders[which], np.arange(n), 3 * number, view, self.cpu))

    def target(self, number: int) -> KVView:
        return view_of(self.models[self.of[number]], [(0 * k, 0 * v) for k, v in self.blocks[number]])

    def begun(self, number: int, target: KVView, layers: Sequence[bytes]) -> Native:
        n, payload = ROWS[number], b"".join(layers)
        coder = self.coders[self.of[number]]
        sizes = list(map(len, layers))
        found = _levels.in_order(coder, np.arange(n), 3 * number, payload, sizes, target.rows, n, self.cpu)
        return Native(found, payload, target)

    def all_begun(self, layers: Sequence[Sequence[bytes]], cpu: str) -> tuple[list[KVView], list[Native]]:
        self.cpu = cpu
        targets = [self.target(number) for number in range(len(ROWS))]
        return targets, [self.begun(number, target, layers[number]) for number, target in enumerate(targets)]

    def right(self, number: int, target: KVView) -> bool:
        return levelcases.same(target, self.models[self.of[number]], self.blocks[number])


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[2], WIDE], ids=["narrow", "mixed", "wide"])
def test_blocks_of_any_length_and_progress_have_their_bits(shapes: Shapes, level: int) -> None:
    cases = Blocks(shapes, level, 7)
    for cpu in CPUS:
        targets, blocks = cases.all_begun(cases.layers, cpu)
        for number, block in enumerate(blocks):
            block.until(number % (len(shapes) + 1))
        for end in range(1, len(shapes) + 1):
            decode_together(blocks, end)
        assert all(cases.right(number, target) for number, target in enumerate(targets))
        for block in blocks:
            block.until(len(shapes))  # nothing is left to do, or wrong


def test_one_that_is_damaged_harms_no_other() -> None:
    cases, rng, found = Blocks(SHAPES[1], 2, 3), np.random.default_rng(seeds.nth(0)), 0
    for turn in range(part(90)):
        hurt = turn % len(ROWS)
        layers = [damaged(coded, turn, rng, 6) if at == hurt else coded for at, coded in enumerate(cases.layers)]
        targets, blocks = cases.all_begun(layers, CPUS[turn // len(ROWS) % len(CPUS)])
        decode_together(blocks, len(SHAPES[1]))
        wrong = [error_of(lambda block=block: block.until(len(SHAPES[1]))) for block in blocks]
        alone = error_of(lambda at=hurt, bad=layers[hurt]: cases.begun(at, cases.target(at), bad).until(len(SHAPES[1])))
        assert wrong == [alone if number == hurt else None for number in range(len(ROWS))]
        assert all(cases.right(number, target) for number, target in enumerate(targets) if number != hurt)
        found += alone is not None
    assert found > 10


def error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except CodecError as error:
        return str(error)
    return None


def test_threads_that_have_some_of_the_same_blocks_wait_for_each_other() -> None:
    cases = Blocks(SHAPES[0], 3, 5)
    for _ in range(20):
        targets, blocks = cases.all_begun(cases.layers, CPUS[-1])
        some: Sequence[tuple[slice, int]] = [(slice(0, 6), 1), (slice(3, 10), 3), (slice(0, 10), 2), (slice(5, 8), 3)]
        run_together(*[partial(decode_together, blocks[at], end) for at, end in some])
        for block in blocks:
            block.until(len(SHAPES[0]))
        assert all(cases.right(number, target) for number, target in enumerate(targets))


def test_at_most_a_few_are_decoded_with_one_call() -> None:
    """Else all of a long hit would need their memory at once."""
    calls = list[int]()

    class Kind:
        def __init__(self) -> None:
            self.done = 0

        @staticmethod
        def until(blocks: Sequence[Any], end: int) -> list[str | None]:
            calls.append(len(blocks))
            for block in blocks:
                block.done = end
            return [None] * len(blocks)

    kinds = [Kind() for _ in range(2 * TOGETHER + 1)]
    decode_together([Native(kind) for kind in kinds], 5)
    assert calls == [TOGETHER, TOGETHER, 1]
    assert all(kind.done == 5 for kind in kinds)


@pytest.mark.parametrize("cpu", CPUS)
def test_members_in_groups_have_their_bits(cpu: str) -> None:
    shapes: Shapes = [(2, 16, 16)] * 4
    model = groupcases.model_of(shapes, True, 2, 5)
    coder, cases = native_coder(model), [case_of(shapes, True, "near", n, n) for n in (40, 64, 9, 64, 25)]
    written = [groupcases.encoded(coder, case, cpu) for case in cases]
    layers = [found for found in written if found is not None]
    assert len(layers) == len(cases)
    begun = [groupcases.begun(coder, case, coded, cpu) for case, coded in zip(cases, layers, strict=True)]
    decode_together([block for block, _ in begun], 2)
    decode_together([block for block, _ in begun], 4)
    for case, coded, (block, found) in zip(cases, layers, begun, strict=True):
        block.until(4)
        want = groupcases.decoded(coder, case, coded, cpu)
        assert all(map(np.array_equal, chain(*found()), chain(*want)))
