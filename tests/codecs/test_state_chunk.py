"""States that are stored by codecs for size: they come back, and what is no chunk of states is an error."""

from __future__ import annotations

import struct

import pytest
import torch
from damaged_layers import changed_word

from kvstore.codecs import codec_by_name, state_chunk
from kvstore.codecs.state_chunk import coded, decoded
from kvstore.core.states import State, item_bytes, pack, unpack
from kvstore.errors import CodecError


def states_of(dtype: torch.dtype, count: int = 600) -> bytes:
    values = torch.randn(2, count, generator=torch.Generator().manual_seed(1)).to(dtype)
    return pack([State(0, 0, True, conv=values[0]), State(1, 0, False, recurrent=values[1:, None])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_states_come_back_bit_for_bit_in_fewer_bytes(dtype: torch.dtype) -> None:
    states = states_of(dtype)
    chunk = coded(states)
    assert len(chunk) < 0.97 * len(states)
    assert bytes(decoded(memoryview(chunk))) == states
    assert item_bytes(memoryview(states)) == dtype.itemsize


@pytest.mark.parametrize("states", [pack([]), pack([State(3, 1, True)]), states_of(torch.float8_e5m2, 3)])
def test_states_that_a_chunk_does_not_make_smaller_stay_as_they_are(states: bytes) -> None:
    assert coded(states) == states
    assert bytes(decoded(memoryview(states))) == states
    assert [state.place for state in unpack(decoded(memoryview(states)))] == [
        x.place for x in unpack(memoryview(states))
    ]


def test_what_is_no_whole_chunk_is_an_error() -> None:
    chunk = coded(states_of(torch.float32))
    for cut in (33, 40, len(chunk) - 1):
        with pytest.raises(CodecError, match="states"):
            decoded(memoryview(chunk[:cut]))
    with pytest.raises(CodecError, match="states"):
        decoded(memoryview(chunk + b"\0"))
    with pytest.raises(CodecError, match="states"):  # its size of what it holds
        decoded(memoryview(bytes(changed_word(chunk, 4, 1 << 30))))


def test_a_chunk_may_not_hold_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    states = pack([State(0, 0, True, recurrent=torch.zeros(1 << 16))])
    chunk = coded(states)
    assert len(chunk) * 64 < len(states)
    monkeypatch.setattr(state_chunk, "_MOST_BYTES", 1 << 10)
    assert coded(states) == states
    with pytest.raises(CodecError, match=f"to hold {len(states)}"):
        decoded(memoryview(chunk))


def test_the_first_bytes_tell_a_chunk_from_states() -> None:
    assert struct.unpack("<I", coded(states_of(torch.float32))[:4])[0] > 1 << 16
    assert struct.unpack("<I", states_of(torch.float32)[:4])[0] <= 1 << 16


def test_only_codecs_for_size_code_states() -> None:
    names = ("raw", "splitzip", "entropy", "zstd")
    assert {name for name in names if codec_by_name(name).codes_states} == {"entropy", "zstd"}
