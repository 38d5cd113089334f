"""How fast members are decoded: blocks of a workload's last sequence, their donors in those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import Rows, interleave
from benchmarks.workloads.arrival import Ids
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.groups.model import groups_model
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.profile import Profile
from kvstore.core.layout import KVLayout
from kvstore.trie.content import ContentIndex

BLOCK = 64
ROUNDS, ROUNDS_QUICK = 9, 3
SPACE = bytes(32)


@dataclass
class Member:
    """One block, coded on its donors. raw, target: `[bytes]`, packed: what was coded, where it is decoded."""

    info: BlockInfo
    payload: memoryview
    sizes: tuple[int, ...]
    donors: list[KVView]
    raw: Any
    target: Any
    out: KVView


def decode_speed(
    rows: Rows, name: str, layout: KVLayout, codec: str, profile: Profile | None, caches: Sequence[Any], quick: bool
) -> bool:
    """Rows of `donor/decode/NAME`, one thread, beside a copy of the same bytes, and where the profile can of
    `donor/decode/NAME/propagated` or `donor/decode/NAME/groups`; whether every bit came back.

    caches: (tokens, per layer (K, V)) of sequences; the last is coded on the others."""
    plain = codec_by_name(codec, profile)
    same = _speed(rows, name, DonorCodec(plain), layout, caches, quick)
    if profile is None:
        return same
    model, groups = DonorModel.from_profile(profile), groups_model(profile)
    if model is not None:
        same &= _speed(rows, f"{name}/propagated", DonorCodec(plain, model), layout, caches, quick)
    if groups is not None:
        same &= _speed(rows, f"{name}/groups", DonorCodec(plain, groups=groups), layout, caches, quick)
    return same


def _speed(rows: Rows, name: str, coder: DonorCodec, layout: KVLayout, caches: Sequence[Any], quick: bool) -> bool:
    members = coded(coder, layout, caches)
    if not members:
        return True

    def decode() -> None:
        for m in members:
            coder.decode(m.info, m.payload, m.sizes, m.donors, m.out)

    def copy() -> None:
        for m in members:
            np.copyto(m.target, m.raw)

    decode()
    same = all(np.array_equal(m.raw, m.target) for m in members)
    seconds = interleave({"decode": decode, "memcpy": copy}, ROUNDS_QUICK if quick else ROUNDS)
    size = sum(m.raw.nbytes for m in members)
    share = seconds["memcpy"] / seconds["decode"]
    rows.add(f"donor/decode/{name}", "decode_GBps", size / seconds["decode"] / 1e9, "GB/s", "memcpy", share)
    rows.add(f"donor/decode/{name}", "ratio_payload", size / sum(len(m.payload) for m in members), "x")
    return same


def coded(coder: DonorCodec, layout: KVLayout, caches: Sequence[Any]) -> list[Member]:
    """The blocks of the last sequence that have donors, on the best that the index of content finds."""
    index, stored = ContentIndex(seed=0), dict[int, tuple[int, KVView]]()
    for tokens, layers in caches[:-1]:
        parent = 0
        for start, ids, view in blocks(layout, tokens, layers):
            record = len(stored) + 1
            stored[record] = start, view
            index.insert(SPACE, record, parent, ids)
            parent = record
    found = []
    tokens, layers = caches[-1]
    spans = index.find(SPACE, tokens)
    for start, ids, view in blocks(layout, tokens, layers):
        donors: dict[int, int] = {}
        rows = []
        for span in spans:
            begin, end = max(span.start, start), min(span.start + span.length, start + len(ids))
            if begin >= end:
                continue
            at, donor = stored[span.record]
            first = span.donor_start + begin - span.start
            number = donors.setdefault(span.record, len(donors))
            rows.append(DonorRows.of(Span(begin - start, end - begin, number, first, begin - at - first), donor))
        if rows:
            found.append(member(coder, BlockInfo(layout, ids, start), view, rows, [stored[r][1] for r in donors]))
    return found


def blocks(layout: KVLayout, tokens: Ids, layers: Any) -> list[tuple[int, Ids, KVView]]:
    """Position, tokens, and keys and values of each whole block."""
    whole = KVView.of_layers(layout, [(k[0], v[0]) for k, v in layers])
    starts = range(0, len(tokens) - BLOCK + 1, BLOCK)
    return [(start, tokens[start : start + BLOCK].copy(), whole.narrow(start, BLOCK)) for start in starts]


def member(coder: DonorCodec, info: BlockInfo, view: KVView, rows: list[DonorRows], donors: list[KVView]) -> Member:
    room = memoryview(bytearray(coder.bound(info)))
    sizes = coder.encode(info, view, rows, room)
    assert sizes is not None
    raw, target = np.empty(view.nbytes, np.uint8), np.ones(view.nbytes, np.uint8)
    view.copy_to(KVView.packed(info.layout, info.count, raw.ctypes.data, raw))
    out = KVView.packed(info.layout, info.count, target.ctypes.data, target)
    return Member(info, room[: sum(sizes)], sizes, donors, raw, target, out)
