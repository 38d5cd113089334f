"""The golden records of codecs that need a profile or donors, and what they need: files beside them, for ever.

`profiles/<layout>.safetensors.gz` is a profile, `blocks/<case>.rec` a block as codec 0 has it,
`blocks/<case>.donor-N.rec` its donors, `<row>/<case>.rec` the block as a row of `codecrows.ROWS` codes it.
`<row>/<case>.sha256` is the hash of what that decodes to; where machines may round otherwise, `<row>/<case>.raw` has
the values.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from codecrows import ROWS, Coder, Row, WithDonors, donor_blocks, donor_tokens, likely_kv
from kvcases import random_kv
from profilecases import ROPE, Layers, level_kv, predicted_kv, profile_of

from kvstore import KVLayout, LayerLayout
from kvstore.codecs import BlockInfo, KVView, codec_by_id, codec_names
from kvstore.codecs.pairs import order_of
from kvstore.codecs.profile import NO_PROFILE, Profile
from kvstore.codecs.words import FLOAT8
from kvstore.core.keys import chain_key
from kvstore.core.record import Donor, RecordHeader, check_payload, parse, payload_of, payload_offset, seal

GOLDEN = Path(__file__).parent.parent / "golden"
PARENT = hashlib.sha256(b"parent of a golden record").digest()
NAMESPACE = hashlib.sha256(b"namespace of a golden record").digest()
LAYOUTS = {
    "rope": KVLayout.uniform(3, 1, 8, rope=ROPE),
    "unequal": KVLayout((LayerLayout(2, 8, 4), LayerLayout(1, 8, 12)), "bfloat16"),
    "float32": KVLayout.uniform(3, 1, 8, "float32", ROPE),
    "float16": KVLayout.uniform(3, 1, 8, "float16", ROPE),
    "float8_e5m2": KVLayout.uniform(3, 1, 8, "float8_e5m2", ROPE),
    "float8_e4m3fn": KVLayout.uniform(3, 1, 8, "float8_e4m3fn", ROPE),
    "partial": KVLayout.uniform(2, 2, 12, rope='{"partial_rotary_factor": 0.5, "rope_theta": 100.0}'),
    "levels": KVLayout((LayerLayout(2, 12, 12), LayerLayout(1, 12, 4), LayerLayout(1, 12, 20)), "bfloat16", ROPE),
}
_LEVELS = ("predictive-1", "predictive-2", "predictive-3")  # rows with records of a layout of their own
_SPECIAL = [0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x8000]
_DONOR_RECORDS = 900  # of which on donors are numbered


@dataclass(frozen=True)
class ModelCase:
    """One block. like: "alike" to its donors, "predicted" by the profile, by a level of it, as "level-2", or "noise",
    all bits; of other dtypes than bf16 "wide" for what is near the prediction, "upcast" for bf16 that is. special:
    with NaN, infinity, subnormals in it."""

    layout: str
    like: str
    count: int
    start: int = 0
    special: bool = False

    def info(self) -> BlockInfo:
        tokens = np.arange(self.start, self.start + self.count, dtype=np.uint32)
        return BlockInfo(LAYOUTS[self.layout], tokens, self.start)

    def made(self, profile: Profile) -> Layers:
        """The block; only while it has no file."""
        info = self.info()
        kv = likely_kv(info.layout, self.count)
        if self.like == "predicted":
            kv = predicted_kv(profile, info.tokens, self.start)
            order = order_of(info.layout)
            if order is not None:
                kv = [(k[..., torch.from_numpy(np.argsort(order))], v) for k, v in kv]
        if self.like.startswith("level"):
            kv = level_kv(profile, int(self.like[-1]), info.tokens, self.start)
        if self.like in ("wide", "upcast"):
            kv = [(self._wide(k), self._wide(v)) for k, v in _near(info, self.start)]
        if self.like == "noise":
            kv = random_kv(self.count, info.layout)
        if self.special and info.layout.dtype in FLOAT8:
            codes = torch.tensor([0x7F, 0xFF, 0x7E, 0xFC, 0x01, 0x87, 0x00, 0x80], dtype=torch.uint8)
            for part in (kv[1][0], kv[2][1]):
                part.view(torch.uint8)[0, 9, :8] = codes
        elif self.special:
            bits = torch.from_numpy(np.array(_SPECIAL, np.uint16).view(np.int16)).view(torch.bfloat16)
            kv = [(k.clone(), v.clone()) for k, v in kv]
            kv[1][0][0, 9, :8] = bits
            kv[2][1][0, self.count - 1, :8] = bits
        return kv

    def _wide(self, near: torch.Tensor) -> torch.Tensor:
        """Values of a wider dtype near those that are predicted."""
        dtype = getattr(torch, LAYOUTS[self.layout].dtype)
        more = torch.arange(near.numel()).view(near.shape) * 0.618 % 1 / 128 if self.like == "wide" else 0.0
        return (near.float() * (1 + more)).to(dtype)

    def takes(self, row: Row) -> bool:
        """Whether there is a record of it: against donors only of what is like them; of noise, with loss, none, for
        what differs from machine to machine has no measure there. Of other dtypes than bf16 by predictive alone, for
        the other codecs have cases of their own (goldencases.py) or do not take them; and by tsc, which has none."""
        if LAYOUTS[self.layout].dtype != "bfloat16":
            return row.name == "predictive" or (row.name in ("tsc", "tsc-8") and self.like != "noise")
        if row.name == "donor-groups" or (self.layout == "levels" and self.like == "alike"):
            return row.name == "donor-groups" and self.layout == "levels" and self.like == "alike"
        if self.layout == "levels" or row.name in _LEVELS:
            return row.name == f"predictive-{self.like[-1]}"
        if row.name in codec_names() or (row.name.startswith("donor") and self.like != "alike"):
            return False
        return self.like != "noise" or row.fidelity == "exact"


# Only ever added to.
MODEL_CASES = {
    "rope-alike": ModelCase("rope", "alike", 20),
    "rope-special": ModelCase("rope", "alike", 20, special=True),
    "rope-predicted": ModelCase("rope", "predicted", 21),
    "unequal-alike": ModelCase("unequal", "alike", 17),
    "unequal-predicted": ModelCase("unequal", "predicted", 17, start=40),
    "one-token": ModelCase("rope", "alike", 1),
    "rope-noise": ModelCase("rope", "noise", 9),
    "float32-wide": ModelCase("float32", "wide", 21),
    "float32-upcast": ModelCase("float32", "upcast", 17, start=40),
    "float32-noise": ModelCase("float32", "noise", 9),
    "float16-wide": ModelCase("float16", "wide", 21),
    "partial-alike": ModelCase("partial", "alike", 20),
    "partial-predicted": ModelCase("partial", "predicted", 21, start=40),
    **{f"level-{i}": ModelCase("levels", f"level-{i}", 21, start=40) for i in (1, 2, 3)},
    **{f"level-{i}-one-token": ModelCase("levels", f"level-{i}", 1) for i in (1, 2, 3)},
    **{f"level-{i}-special": ModelCase("levels", f"level-{i}", 20, special=True) for i in (1, 2, 3)},
    "groups-alike": ModelCase("levels", "alike", 20),
    "groups-special": ModelCase("levels", "alike", 20, special=True),
    "float8_e5m2-near": ModelCase("float8_e5m2", "upcast", 21),
    "float8_e4m3fn-near": ModelCase("float8_e4m3fn", "upcast", 21, start=40),
    "float8_e4m3fn-odd": ModelCase("float8_e4m3fn", "upcast", 64, special=True),
}
RECORDS = [(row, name) for row in ROWS for name, case in MODEL_CASES.items() if case.takes(row)]


def record_of(
    codec: Coder,
    info: BlockInfo,
    kv: Layers,
    number: int,
    *,
    profile: bytes = NO_PROFILE,
    donors: Sequence[Donor] = (),
) -> bytes:
    """A sealed record, as a store writes it."""
    begin = payload_offset(len(info.layout.layers), info.count, len(donors))
    record = bytearray(begin + codec.bound(info))
    sizes = codec.encode(info, KVView.of_layers(info.layout, kv), memoryview(record)[begin:])
    assert sizes is not None
    payload = memoryview(bytes(record[begin : begin + sum(sizes)]))
    header = RecordHeader(
        key=chain_key(PARENT, info.tokens),
        parent=PARENT,
        namespace=NAMESPACE,
        codec=codec.id,
        record_id=number,
        start=info.start,
        tokens=info.tokens,
        layer_sizes=sizes,
        raw_bytes=info.count * info.layout.bytes_per_token,
        bits=16.0 * info.count,
        profile=profile,
        error_bound=0.0 if codec.exact else codec.error_bound(payload, sizes) or math.inf,
        donors=tuple(donors),
    )
    del record[header.record_bytes :]
    seal(header, memoryview(record))
    return bytes(record)


def opened(path: Path) -> tuple[RecordHeader, memoryview]:
    """A record's header and payload, both checked."""
    data = memoryview(path.read_bytes())
    header = parse(data, len(data))
    check_payload(header, data)
    return header, payload_of(header, data)


def decoded(coder: Coder, info: BlockInfo, header: RecordHeader, payload: memoryview) -> Layers:
    dtype = getattr(torch, info.layout.dtype)
    out = [
        (
            torch.zeros(x.heads, info.count, x.key_dim, dtype=dtype),
            torch.zeros(x.heads, info.count, x.value_dim).to(dtype),
        )
        for x in info.layout.layers
    ]
    coder.decode(info, payload, header.layer_sizes, KVView.of_layers(info.layout, out))
    return out


def _near(info: BlockInfo, start: int) -> Layers:
    """What the profile of the same layout in bf16 predicts, with noise of the expected size."""
    return predicted_kv(profile_of(replace(info.layout, dtype="bfloat16"), "lossless"), info.tokens, start)


def raw_of(kv: Layers) -> bytes:
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for pair in kv for t in pair)


@lru_cache(maxsize=8)
def profile_kept(layout: str) -> Profile:
    return Profile.from_bytes(gzip.decompress((GOLDEN / "profiles" / f"{layout}.safetensors.gz").read_bytes()))


def block_kept(name: str) -> Layers:
    return _raw_block(LAYOUTS[MODEL_CASES[name].layout], GOLDEN / "blocks" / f"{name}.rec")


def donors_kept(name: str) -> list[tuple[Donor, Layers]]:
    """The donors of a case in their order: how a record names each, and its values."""
    layout = LAYOUTS[MODEL_CASES[name].layout]
    paths = sorted((GOLDEN / "blocks").glob(f"{name}.donor-*.rec"))
    headers = [opened(path)[0] for path in paths]
    return [(Donor(h.record_id, h.key), _raw_block(layout, path)) for h, path in zip(headers, paths, strict=True)]


def _raw_block(layout: KVLayout, path: Path) -> Layers:
    header, payload = opened(path)
    return decoded(codec_by_id(header.codec), BlockInfo(layout, header.tokens, header.start), header, payload)


def coder_kept(row: Row, name: str) -> Coder:
    """The row's coder, made of nothing but golden files."""
    case = MODEL_CASES[name]
    layout = LAYOUTS[case.layout]
    coder = row.make(layout, profile_kept(case.layout))
    return (
        WithDonors(coder.codec, layout, [d for _, d in donors_kept(name)]) if isinstance(coder, WithDonors) else coder
    )


# -- writing what is not there -----------------------------------------------------------------------------------------


def write_missing(write_new: Callable[[Path, bytes], None]) -> None:
    """write_new: writes a file that does not exist, and leaves alone one that does."""
    for name, layout in LAYOUTS.items():
        path = GOLDEN / "profiles" / f"{name}.safetensors.gz"
        if not path.exists():
            sections = () if layout.dtype == "bfloat16" else ("lossless",)
            sections = ("lossless", "levels") if name == "levels" else sections
            write_new(path, gzip.compress(profile_of(layout, *sections).data, mtime=0))
    for number, (name, case) in enumerate(MODEL_CASES.items(), 1):
        _write_block(write_new, number, name, case)
    for number, (row, name) in enumerate(RECORDS, 1):
        _write_record(write_new, number, row, name)


def _write_block(write_new: Callable[[Path, bytes], None], number: int, name: str, case: ModelCase) -> None:
    path, info, raw = GOLDEN / "blocks" / f"{name}.rec", case.info(), codec_by_id(0)
    if path.exists():
        return
    write_new(path, record_of(raw, info, case.made(profile_kept(case.layout)), number))
    if case.like == "alike":
        tokens, blocks = donor_tokens(case.count), donor_blocks(info.layout, case.count)
        for which, (ids, kv) in enumerate(zip(tokens, blocks, strict=True)):
            donor = BlockInfo(info.layout, np.array(ids, np.uint32), 0)
            data = record_of(raw, donor, kv, _DONOR_RECORDS + 10 * number + which)
            write_new(path.with_name(f"{name}.donor-{which}.rec"), data)


def _write_record(write_new: Callable[[Path, bytes], None], number: int, row: Row, name: str) -> None:
    path, case = GOLDEN / row.name / f"{name}.rec", MODEL_CASES[name]
    if path.exists():
        return
    data = made_again(row, name, number)
    write_new(path, data)
    header, payload = opened(path)
    values = raw_of(decoded(coder_kept(row, name), case.info(), header, payload))
    if row.same_bytes:
        write_new(path.with_suffix(".sha256"), hashlib.sha256(values).hexdigest().encode() + b"\n")
    else:
        write_new(path.with_suffix(".raw"), values)


def made_again(row: Row, name: str, number: int) -> bytes:
    """The record as today's encoder makes it of the kept block."""
    coder, info = coder_kept(row, name), MODEL_CASES[name].info()
    donors = [donor for donor, _ in donors_kept(name)] if isinstance(coder, WithDonors) else []
    used = [donors[i] for i in coder.used(info.count)] if isinstance(coder, WithDonors) else []
    return record_of(coder, info, block_kept(name), number, profile=coder.profile, donors=used)
