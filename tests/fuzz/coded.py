"""Payloads of the codecs in Python and of archives, given anything: they decode, or are refused with a `CodecError`.

The functions are targets of parsers.py.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from itertools import pairwise

from arrivals import Arrival


def tsc(data: bytes) -> None:
    """Frames of any kind; what is taken is decoded as the reference decodes it."""
    import numpy as np
    import torch

    from kvstore import KVLayout
    from kvstore.codecs.aqua.tensors import widths
    from kvstore.codecs.base import BlockInfo
    from kvstore.codecs.tsc import codec as module
    from kvstore.codecs.tsc import reference
    from kvstore.codecs.view import KVView
    from kvstore.errors import CodecError

    arrival = Arrival(data)
    kind, count = arrival.number(), 1 + arrival.number() % 7
    dtype = ("bfloat16", "float16", "float32")[kind % 3]
    dim = (4, 7, 150)[kind // 4 % 3]
    layout = KVLayout.uniform(1 + kind // 64 % 2, 1 + kind // 32 % 2, dim, dtype=dtype)
    info = BlockInfo(layout, np.arange(count, dtype=np.uint32), 0)
    codec, parts, sizes = module.TscCodec(), [], []
    for shape in layout.layers:
        kappa, top = 1 + arrival.number() % count, arrival.number() % (module.MOST_TOP + 1)
        frames = codec._frames(info, shape, kappa, top)
        head = module._HEADER.pack(1, top, kappa, 0.5)
        if arrival.number() % 8 == 1:
            head, frames = arrival.take(module._HEADER.size), codec._frames(info, shape, 1, 0)
        body = arrival.take(arrival.number(2) % (frames.nbytes + 1)).ljust(frames.nbytes, b"\0")
        places = [body, _placed(body, frames)][arrival.number() % 2]
        parts.append(head + places + bytes(arrival.number() % 16 == 1))
        sizes.append(len(parts[-1]))
    payload = memoryview(b"".join(parts))
    out = [tuple(torch.zeros(x.heads, count, dim, dtype=getattr(torch, dtype)) for _ in "kv") for x in layout.layers]
    with contextlib.suppress(CodecError):
        codec.decode(info, payload, sizes, KVView.of_layers(layout, out))
        assert codec.error_bound(payload, sizes) > 0
        for part, shape, (k, v) in zip(parts, layout.layers, out, strict=True):
            mode, top, kappa, _ = module._HEADER.unpack_from(part)
            if mode != module.CODED:
                continue
            with np.errstate(all="ignore"):
                wanted = reference.decode(part[8:], count, widths(shape), kappa, top, k.dtype)
            for tensor, (_, raw) in zip((k, v), wanted, strict=True):
                found = tensor.transpose(0, 1).reshape(count, -1).contiguous().view(torch.uint8).numpy()
                assert np.array_equal(found.reshape(raw.shape), raw)


def _placed(body: bytes, frames: object) -> bytes:
    """The frames with every number of steps in range and corrections in order, so that they get further."""
    import numpy as np

    table = np.frombuffer(body, np.uint8).copy()
    keys, others = frames._split(table)  # type: ignore[attr-defined]
    others, at = others.copy(), 0
    for pages in frames.pages:  # type: ignore[attr-defined]
        rows = others[:, at : at + pages.row_bytes]
        for page in pages._pages():
            scale, numbers, kept, _ = pages._split(rows, page)
            scale[:, 1] &= 0x3F
            numbers[:] = np.minimum(numbers & 15, 14) | np.minimum(numbers >> 4, 14) << 4
            kept[:] = np.arange(kept.shape[1])
        at += pages.row_bytes
    keys = keys.copy()
    keys[:, 1::2] &= 0x3F
    return bytes(frames._joined(keys, others).tobytes())  # type: ignore[attr-defined]


def archive(data: bytes) -> None:
    """An archive of any fields, whose checksum is right, and its text."""
    import xxhash

    from kvstore.codecs.tokens import archive as module
    from kvstore.codecs.tokens.text import Reader, Uniform, encode
    from kvstore.errors import CodecError

    arrival = Arrival(data)
    ids, vocabulary = list(arrival.take(arrival.number() % 40)) or [7], 256 + arrival.number(2)
    even = Uniform(vocabulary)
    text = encode([even.interval(token) for token in ids])
    passes = module.passes_of([(at, min(8, len(ids) - at)) for at in range(0, len(ids), 8)])
    made = module.Archive(8, bytes(16), passes, vocabulary, False, 1, bytes(8), bytes(16), text, b"body").pack()
    begin, changed = module._HEAD.size, bytearray(arrival.changes(made))
    if len(changed) > begin and changed != made:
        struct.pack_into("<Q", changed, begin - 8, xxhash.xxh3_64_intdigest(bytes(changed[begin:])))
    try:
        found = module.Archive.parse(bytes(changed))
        assert 1 <= found.count <= module.MOST_TOKENS
        again = module.Archive.parse(found.pack())
        assert again == found
        reader = Reader(found.text)
        taken = [reader.take(Uniform(found.vocabulary)) for _ in range(min(found.count, 2000))]
        assert all(0 <= token < found.vocabulary for token in taken)
        reader.finish()
    except CodecError:
        assert changed != made, "what was written is refused"
        return
    assert changed != made or taken == ids


def speculative(data: bytes) -> None:
    """The body of an archive of codec 4, bf16 and fp8, changed."""
    import numpy as np
    import torch

    from kvstore import KVLayout
    from kvstore.codecs.speculative.codec import DTYPES, SpeculativeCodec
    from kvstore.errors import CodecError

    arrival = Arrival(data)
    kind, seed = arrival.number(), arrival.number()
    layout = KVLayout.uniform(1 + (kind & 1), 1, 4, dtype=DTYPES[kind >> 1 & 1])
    counts = [1 + (kind >> 2 & 7), 1 + (kind >> 5)][: 1 + seed % 2]
    tokens = np.arange(sum(counts), dtype=np.uint32)
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(len(layout.layers), 2, 1, len(tokens), 4, generator=random)
    dtype, ends = getattr(torch, layout.dtype), np.cumsum([0, *counts])
    cache = [(k.to(dtype), v.to(dtype)) for k, v in values]
    predictions = [
        [((k[:, a:b] * 1.01).bfloat16(), (v[:, a:b] + 0.01).bfloat16()) for k, v in values] for a, b in pairwise(ends)
    ]
    codec, sure = SpeculativeCodec(layout, bytes(16)), [True, bool(seed & 4)][: len(counts)]
    made = codec.encode(tokens, cache, counts, predictions, sure)
    changed = arrival.changes(made)
    out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in cache]
    try:
        codec.decode(tokens, changed, counts, predictions, out)
    except CodecError:
        assert changed != made, "what was written is refused"
        return
    if changed == made:
        for pair, back in zip(cache, out, strict=True):
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(pair, back, strict=True))


def zstd(data: bytes) -> None:
    """Chunks of blosc2, changed: the sizes that a chunk names are those that it must have, or it is refused."""
    import numpy as np
    import torch

    from kvstore import KVLayout
    from kvstore.codecs.base import BlockInfo
    from kvstore.codecs.view import KVView
    from kvstore.codecs.zstd import ZstdCodec
    from kvstore.errors import CodecError

    arrival = Arrival(data)
    kind, count = arrival.number(), 1 + arrival.number() % 40
    layout = KVLayout.uniform(1 + (kind & 1), 1, 8, dtype=("bfloat16", "float32")[kind >> 1 & 1])
    values = torch.arange(count * 8).remainder(1 + (kind >> 2)).view(1, count, 8).to(getattr(torch, layout.dtype))
    info, codec = BlockInfo(layout, np.arange(count, dtype=np.uint32), 0), ZstdCodec()
    room = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(layout, [(values, values)] * len(layout.layers)), room)
    assert sizes is not None
    made = bytes(room[: sum(sizes)])
    changed = arrival.changes(made)
    out = [(torch.zeros_like(values), torch.zeros_like(values)) for _ in layout.layers]
    sizes = (*sizes[:-1], max(0, sizes[-1] + len(changed) - len(made)))
    try:
        codec.decode(info, memoryview(changed), sizes, KVView.of_layers(layout, out))
    except CodecError:
        assert changed != made, "what was written is refused"
        return
    assert changed != made or all(torch.equal(tensor, values) for pair in out for tensor in pair)


TARGETS: dict[str, Callable[[bytes], None]] = {"tsc": tsc, "archive": archive, "speculative": speculative, "zstd": zstd}
