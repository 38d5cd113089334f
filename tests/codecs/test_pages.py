"""Pages as engines hand them to a codec: what comes back, what is refused, and what need not be installed for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from kvcases import SMALL, random_kv, same_kv
from profilecases import profile_of
from threadruns import HANGS_S

from kvstore import KVLayout
from kvstore.codecs import KVView, codec_by_name
from kvstore.codecs.pages import PageCodec
from kvstore.core.record import FLAG_STATES, HEADER_BYTES, parse, seal
from kvstore.errors import CodecError

TOKENS = 16


def coder(name: str = "entropy", layout: KVLayout = SMALL, tokens: int = TOKENS) -> PageCodec:
    return PageCodec(codec_by_name(name), layout, tokens)


def coded(pages: PageCodec, kv, key: bytes = b"a") -> bytearray:
    out = bytearray(pages.capacity)
    return out[: pages.encode(KVView.of_layers(pages.layout, kv), memoryview(out), key=key)]


def normal_kv():
    draw = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, 2, TOKENS, 16, generator=draw).bfloat16()) for _ in SMALL.layers]


def blank(layout: KVLayout = SMALL, tokens: int = TOKENS):
    return [tuple(torch.zeros_like(x) for x in pair) for pair in random_kv(tokens, layout)]


def decoded(pages: PageCodec, data: bytearray, key: bytes = b"a"):
    out = blank(pages.layout, pages.tokens)
    pages.decode(memoryview(data), KVView.of_layers(pages.layout, out), key=key)
    return out


@pytest.mark.parametrize("name", ["raw", "splitzip", "entropy", "zstd"])
def test_a_page_comes_back_bit_for_bit(name: str) -> None:
    kv = random_kv(TOKENS)
    pages = coder(name)
    data = coded(pages, kv)
    assert len(data) <= pages.capacity
    assert same_kv(decoded(pages, data), kv)
    assert same_kv(decoded(pages, data + b"what was in the place before"), kv)


def test_a_lossy_page_is_as_near_as_its_record_says() -> None:
    kv = normal_kv()
    pages = coder("tsc")
    data = coded(pages, kv)
    bound = parse(memoryview(data), pages.capacity).error_bound
    pairs = [(a, b) for was, now in zip(kv, decoded(pages, data), strict=True) for a, b in zip(was, now, strict=True)]
    assert 0 < max((a.float() - b.float()).abs().max().item() for a, b in pairs) <= bound


def test_no_changed_byte_is_decoded() -> None:
    pages = coder()
    whole = coded(pages, random_kv(TOKENS))
    out = blank()
    header = parse(memoryview(whole), pages.capacity)
    padding = range(HEADER_BYTES + 4 * len(header.layer_sizes) + 4 * TOKENS, header.payload_offset)  # read by nobody
    for at in set(range(0, len(whole), 13)) - set(padding):
        data = bytearray(whole)
        data[at] ^= 0x10
        with pytest.raises(CodecError):
            pages.decode(memoryview(data), KVView.of_layers(SMALL, out), key=b"a")
    assert same_kv(out, blank())


@pytest.mark.parametrize("size", [0, 15, 255, 300, -1])
def test_a_page_that_was_cut_short_is_a_miss(size: int) -> None:
    with pytest.raises(CodecError, match="treat it as a miss"):
        decoded(coder(), coded(coder(), random_kv(TOKENS))[:size])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (coder("splitzip"), "codec"),
        (coder(layout=KVLayout.uniform(3, 2, 16, "float16")), "layout"),
        (coder(tokens=8), "length"),
        (PageCodec(codec_by_name("predictive", profile_of(SMALL, "lossless")), SMALL, TOKENS), "codec"),
    ],
)
def test_an_intact_page_of_something_else_is_refused(other: PageCodec, what: str) -> None:
    pages = PageCodec(codec_by_name("raw"), other.layout, other.tokens) if what != "codec" else other
    data = coded(pages, random_kv(pages.tokens, pages.layout))
    data += bytes(1 << 16)
    with pytest.raises(CodecError, match=f"another {what}"):
        decoded(coder("raw" if what != "codec" else "entropy"), data)


def test_a_page_under_another_key_is_refused() -> None:
    with pytest.raises(CodecError, match="another key"):
        decoded(coder(), coded(coder(), random_kv(TOKENS)), key=b"b")


def test_a_record_with_states_is_refused() -> None:
    pages = coder("raw")
    data = coded(pages, random_kv(TOKENS))
    header = parse(memoryview(data), pages.capacity)
    seal(replace(header, flags=FLAG_STATES), memoryview(data))
    with pytest.raises(CodecError, match="only a store"):
        decoded(pages, data)


def test_a_codec_with_a_profile_is_given_tokens_and_position() -> None:
    given = profile_of(SMALL, "lossless")
    pages, kv = PageCodec(codec_by_name("predictive", given), SMALL, TOKENS), random_kv(TOKENS)
    out = memoryview(bytearray(pages.capacity))
    ids = np.arange(TOKENS, dtype=np.uint32)
    size = pages.encode(KVView.of_layers(SMALL, kv), out, start=48, token_ids=ids)
    assert same_kv(decoded(pages, bytearray(out[:size]), key=b""), kv)
    with pytest.raises(CodecError, match="expected 16, as the page has, found 3"):
        pages.encode(KVView.of_layers(SMALL, kv), out, token_ids=ids[:3])


@pytest.mark.parametrize("size", [0, 64, 900])
def test_memory_that_is_too_small_is_refused(size: int) -> None:
    with pytest.raises(CodecError, match=f"out: {size} bytes are too few"):
        coder().encode(KVView.of_layers(SMALL, random_kv(TOKENS)), memoryview(bytearray(size)))


def test_a_page_of_another_shape_is_refused_before_it_is_coded() -> None:
    with pytest.raises(CodecError, match="expected 16 tokens"):
        coder().encode(KVView.of_layers(SMALL, random_kv(8)), memoryview(bytearray(1 << 16)))
    with pytest.raises(ValueError, match="at least one token"):
        coder(tokens=0)


ALONE = """
import sys
for name in ("lmdb", "msgpack", "blosc2", "transformers", "kvstore.tiers", "kvstore.store"):
    sys.modules[name] = None
import torch
from kvstore import KVLayout
from kvstore.codecs import KVView, codec_by_name
from kvstore.codecs.pages import PageCodec
layout = KVLayout.uniform(num_layers=2, heads=2, head_dim=64)
page = [tuple(torch.randn(2, 2, 16, 64).bfloat16()) for _ in range(2)]
for name in ("raw", "splitzip", "entropy", "tsc"):
    pages = PageCodec(codec_by_name(name), layout, 16)
    place = memoryview(bytearray(pages.capacity))
    size = pages.encode(KVView.of_layers(layout, page), place)
    back = [tuple(torch.zeros_like(x) for x in pair) for pair in page]
    pages.decode(place[:size], KVView.of_layers(layout, back))
    same = all(torch.equal(a, b) for was, now in zip(page, back) for a, b in zip(was, now))
    assert same == pages.codec.exact, name
print("coded")
"""


def test_codecs_code_where_nothing_of_a_store_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout == "coded\n", done.stderr


def test_codecs_are_imported_without_torch() -> None:
    gone = "sys.modules['torch'] = sys.modules['lmdb'] = sys.modules['msgpack'] = None"
    code = f"import sys\n{gone}\nimport kvstore.codecs.pages"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=HANGS_S)
