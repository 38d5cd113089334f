from __future__ import annotations

import pytest
import torch

from kvstore import KVLayout
from kvstore.codecs import KVView
from kvstore.codecs.view import Packed
from tests.helpers.gil import gives_gil, keeps_gil


def views(tokens: int) -> tuple[KVView, KVView]:
    """Two views of 512 KiB for 64 tokens; the first has random bits."""
    layout = KVLayout.uniform(16, 2, 64)
    halves = [[torch.zeros(2, tokens, 64, dtype=torch.bfloat16) for _ in range(32)] for _ in range(2)]
    for tensor in halves[0]:
        tensor.view(torch.int16).random_()
    source, target = (KVView.of_layers(layout, list(zip(x[::2], x[1::2], strict=True))) for x in halves)
    return source, target


@pytest.mark.parametrize(("tokens", "keeps"), [(64, True), (128, True), (192, False)])
def test_only_a_large_copy_gives_the_gil_away(tokens: int, keeps: bool) -> None:
    source, target = views(tokens)
    assert (keeps_gil if keeps else gives_gil)(lambda: source.copy_to(target))
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(source.tensors(), target.tensors(), strict=True)
    )


@pytest.mark.parametrize(("pieces", "keeps"), [(2, True), (3, False)])
def test_pieces_are_copied_without_the_gil_if_they_are_large_together(pieces: int, keeps: bool) -> None:
    source, _ = views(64)
    _, target = views(64 * pieces)
    memory = memoryview(bytearray(source.nbytes))
    source.pack(memory)
    packed = [Packed(memory, 64, 64 * piece, 64) for piece in range(pieces)]
    assert (keeps_gil if keeps else gives_gil)(lambda: target.unpack_all(packed))
    for piece in range(pieces):
        found = target.narrow(64 * piece, 64).tensors()
        assert all(
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(source.tensors(), found, strict=True)
        )
