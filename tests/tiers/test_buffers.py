"""Page-aligned memory that comes back when nobody refers to it any more."""

from __future__ import annotations

import gc
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_memory import is_mapped
from threadruns import run_together

from kvstore.config import GIB, KIB, MIB, PAGE_BYTES
from kvstore.tiers import buffers
from kvstore.tiers.buffers import Buffer, BufferPool, size_class


def address(buffer: Buffer) -> int:
    return int(np.frombuffer(buffer.view, np.uint8).ctypes.data)


@given(st.integers(0, 4 * GIB))
def test_a_size_class_holds_the_size_in_whole_pages_and_wastes_at_most_an_eighth(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size % PAGE_BYTES == 0
    assert size >= max(nbytes, PAGE_BYTES)
    pages = max(1, -(-nbytes // PAGE_BYTES))
    assert size - pages * PAGE_BYTES <= pages * PAGE_BYTES // 8


@given(st.integers(1, 1 * GIB))
def test_a_size_class_is_its_own_class(nbytes: int) -> None:
    assert size_class(size_class(nbytes)) == size_class(nbytes)


@given(st.integers(0, 1 * GIB), st.integers(0, 1 * GIB))
def test_classes_grow_with_sizes(one: int, other: int) -> None:
    assert (one <= other) <= (size_class(one) <= size_class(other))


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 1, 3 * MIB])
def test_a_buffer_is_aligned_writable_and_as_long_as_asked(nbytes: int) -> None:
    buffer = BufferPool(0).take(nbytes)
    assert len(buffer.view) == nbytes
    assert address(buffer) % PAGE_BYTES == 0
    assert buffer.capacity == size_class(nbytes)
    buffer.view[:] = b"\xab" * nbytes
    assert bytes(buffer.view) == b"\xab" * nbytes


def test_a_buffer_of_nothing_is_a_buffer() -> None:
    assert len(BufferPool(0).take(0).view) == 0


def test_memory_comes_back_when_the_buffer_dies() -> None:
    pool = BufferPool(1 * MIB)
    buffer = pool.take(10 * KIB)
    before, capacity = address(buffer), buffer.capacity
    assert pool.free_bytes == 0
    del buffer
    assert pool.free_bytes == capacity
    again = pool.take(10 * KIB - 5)
    assert address(again) == before
    assert pool.free_bytes == 0


def test_two_living_buffers_never_share_memory() -> None:
    pool = BufferPool(1 * MIB)
    buffers = [pool.take(8 * KIB) for _ in range(20)]
    del buffers[::2]
    buffers += [pool.take(8 * KIB) for _ in range(20)]
    spans = sorted((address(b), address(b) + b.capacity) for b in buffers)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_no_more_is_kept_than_asked() -> None:
    pool = BufferPool(20 * KIB)
    buffers = [pool.take(8 * KIB) for _ in range(5)]
    del buffers
    gc.collect()
    assert pool.free_bytes == 16 * KIB


def test_a_pool_that_keeps_nothing_keeps_nothing() -> None:
    pool = BufferPool(0)
    del_me = pool.take(8 * KIB)
    del del_me
    assert pool.free_bytes == 0


def test_trimming_shortens_the_view_and_not_the_capacity() -> None:
    buffer = BufferPool(0).take(10 * KIB)
    buffer.view[:4] = b"abcd"
    capacity = buffer.capacity
    buffer.trim(3)
    assert bytes(buffer.view) == b"abc"
    assert buffer.capacity == capacity


def test_a_trimmed_buffer_comes_back_whole() -> None:
    pool = BufferPool(1 * MIB)
    buffer = pool.take(64 * KIB)
    buffer.trim(1)
    del buffer
    assert pool.free_bytes == 64 * KIB
    assert len(pool.take(64 * KIB).view) == 64 * KIB


def test_threads_get_memory_of_their_own() -> None:
    pool = BufferPool(1 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = pool.take(4 * KIB)
            buffer.view[:] = bytes([mark]) * (4 * KIB)
            if bytes(buffer.view) != bytes([mark]) * (4 * KIB):
                wrong.append(mark)

    run_together(*(partial(work, mark) for mark in range(1, 5)))
    assert not wrong
    assert pool.free_bytes <= 1 * MIB


def test_a_busy_pool_keeps_as_much_as_was_in_use_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(buffers, "monotonic", lambda: now[0])
    pool = BufferPool(1 * MIB, busy_bytes=40 * MIB)
    held = [pool.take(8 * MIB) for _ in range(3)]
    held.clear()
    assert pool.free_bytes == 24 * MIB
    held = [pool.take(8 * MIB) for _ in range(7)]
    held.clear()
    assert pool.free_bytes == 40 * MIB  # no more than it may
    now[0] += 29
    pool.take(4 * KIB)
    now[0] += 29
    assert pool.free_bytes == 40 * MIB  # busy until 30 s after the last buffer was taken
    now[0] += 2
    assert pool.free_bytes <= 1 * MIB
    held = [pool.take(8 * MIB)]
    held.clear()
    assert pool.free_bytes == 8 * MIB  # what was in use before counts no more


def test_buffers_that_last_make_no_pool_busy() -> None:
    pool = BufferPool(1 * MIB, busy_bytes=64 * MIB)
    lasting = [pool.take(8 * MIB, lasting=True) for _ in range(4)]
    brief = pool.take(1 * MIB)
    del brief
    lasting.clear()
    assert pool.free_bytes <= 1 * MIB


def test_memory_that_went_back_is_handed_out_again_as_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(buffers, "monotonic", lambda: now[0])
    pool = BufferPool(0, busy_bytes=8 * MIB)
    sizes = [256 * KIB, 1 * MIB, 3 * MIB, 12 * KIB]
    held = [pool.take(size) for size in sizes]
    kept = held[0]
    kept.view[:] = b"\x07" * len(kept.view)
    held.clear()
    assert pool.free_bytes == sum(size_class(size) for size in sizes[1:])
    now[0] += 31
    assert pool.free_bytes == 0
    assert bytes(kept.view) == b"\x07" * len(kept.view)  # its slab had other pieces, which went back
    again = [pool.take(size) for size in sizes for _ in range(3)]
    places = sorted((address(buffer), buffer.capacity) for buffer in [*again, kept])
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places))
    for number, buffer in enumerate(again):
        buffer.view[:] = bytes([number]) * len(buffer.view)
    assert all(set(bytes(buffer.view)) == {number} for number, buffer in enumerate(again))


@pytest.mark.parametrize("lasting", [False, True])
def test_a_closed_pool_has_memory_for_living_buffers_alone(lasting: bool) -> None:
    pool = BufferPool(64 * MIB, busy_bytes=64 * MIB)
    living, unused, later = (pool.take(16 * MIB, lasting) for _ in range(3))
    places = [address(buffer) for buffer in (living, unused, later)]
    living.view[:4] = b"kept"
    del unused
    pool.close()
    pool.close()
    assert [is_mapped(place) for place in places] == [True, False, True]
    del later
    assert [is_mapped(place) for place in places] == [True, False, False]
    assert pool.free_bytes == 0
    assert bytes(living.view[:4]) == b"kept"


def test_a_closed_pool_keeps_nothing_that_is_taken_later() -> None:
    pool = BufferPool(64 * MIB, busy_bytes=64 * MIB)
    pool.close()
    buffer = pool.take(16 * MIB)
    buffer.view[-1] = 7
    place = address(buffer)
    del buffer
    assert pool.free_bytes == 0
    assert not is_mapped(place)
