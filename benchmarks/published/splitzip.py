"""SplitZip (arXiv 2605.01708): its ablations, its coverage by data set, and the transfer between two processes.

`splitzip/table/...` is the published format in numpy (exponents.py): a table of the 16 most frequent exponents, fitted
to one window of calibration text, escapes of 3 bytes by chunks of 1,024; and what its ablations change, one thing each.
`splitzip/windows/...` is our format: a window of 16 exponents for each chunk, nothing fitted. Everything is decoded and
compared before it counts. Times are processor times of numpy, as a ratio to the published form's on the same data
(`encode_vs_base`); the paper's are of Triton on an H200, so that a ratio says what a change costs, no more.

`splitzip/coverage/...`: how many values have a code, by text and by model, of the table fitted to conversations.
`splitzip/transfer/...`: transfer.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks import models, other_text
from benchmarks.common import interleave
from benchmarks.conversations import calibration_text, held_out_text
from benchmarks.peers.codecs.data import real_kv
from benchmarks.peers.quality.data import CHARACTERS, LENGTH, cut, prefill
from benchmarks.published import transfer
from benchmarks.published.exponents import (
    Bits,
    Bytes,
    Form,
    counts,
    covered,
    decode,
    encode,
    entropy,
    most_frequent,
    sentinel_bytes,
    window_bytes,
)
from benchmarks.published.paper import Paper
from kvstore.codecs.splitzip.codec import bound_values, encode_values

BASE = Form()
# What the paper's ablations change, and what it found: GB/s of encoding and decoding, None where it does not say.
FORMS: dict[str, tuple[Form, float | None, float | None]] = {
    "top-16": (BASE, 613.3, 2181.8),
    "top-8": (Form(codes=8), 440.0, 711.0),
    "top-15-sentinel": (Form(sentinel=True), 396.0, 621.0),
    "index-absolute": (Form(chunk=None), None, 1421.7),
    "chunk-256": (Form(chunk=256), 351.0, None),
    "chunk-4096": (Form(chunk=4096), None, None),
    "chunk-16384": (Form(chunk=16384), None, None),
    "escapes-7-bytes": (Form(escape=7), None, None),
}
DYNAMIC_GBPS = 80.7  # a table for every tensor, found while encoding
RATIO, RATIO_E5M2 = 1.324, 1.14
CHUNKS = (256, 1024, 4096, 16384)
TEXTS: dict[str, Callable[[int], str]] = {
    "conversations": held_out_text,
    "python": other_text.python_sources,
    "pages": other_text.package_pages,
    "prose": other_text.prose,
}


def run(paper: Paper) -> None:
    """All rows of the paper; `--parts` names some of "forms", "coverage", "transfer"."""
    parts = set(paper.args.parts or ("forms", "coverage", "transfer"))
    model, tokenizer = paper.model
    if parts & {"forms", "coverage"}:
        fitted = tensors(model, tokenizer, calibration_text(LENGTH * CHARACTERS))
        if "forms" in parts:
            forms(paper, fitted, tensors(model, tokenizer, held_out_text(LENGTH * CHARACTERS)))
        if "coverage" in parts:
            coverage(paper, model, tokenizer, fitted)
    if "transfer" in parts:
        kv = real_kv((24 if paper.args.quick else 96) << 20, model, tokenizer, paper.args.text)
        torch.set_num_threads(1)
        transfer.run(paper, kv, quick=paper.args.quick)


def tensors(model: object, tokenizer: object, text: str) -> list[Bits]:
    """K and V of layer 0, K and V of layer 1, ..., of one window of 1,024 tokens: bits of bfloat16."""
    pairs = prefill(model, cut(tokenizer, text, 1)[0])
    return [x.contiguous().view(torch.uint16).numpy().reshape(-1) for pair in pairs for x in pair]


# -- the ablations -----------------------------------------------------------------------------------------------------


def forms(paper: Paper, fitted: Sequence[Bits], data: Sequence[Bits]) -> None:
    """fitted, data: tensors of calibration text and of other text."""
    found, raw = counts(fitted), sum(x.nbytes for x in data)
    for name, (form, _, _) in FORMS.items():
        table = most_frequent(found, form.entries)
        size, escapes = coded_bytes(data, [table] * len(data), form)
        ratio_rows(paper, f"table/{name}", raw, size, escapes, RATIO if form == BASE else None)
    speeds(paper, found, data)
    for name, tables in tables_by_kind(fitted, data).items():
        size, escapes = coded_bytes(data, tables, BASE)
        ratio_rows(paper, f"table/of-{name}", raw, size + table_bytes(tables), escapes)
    for chunk in CHUNKS:
        sizes = [window_bytes(x, chunk) for x in data]
        ratio_rows(paper, f"windows/chunk-{chunk}", raw, *map(sum, zip(*sizes, strict=True)))
    native = sum(native_bytes(x, "bfloat16") for x in data)
    ratio_rows(paper, "ours", raw, native, None, RATIO)
    e5m2 = [torch.from_numpy(x).view(torch.bfloat16).to(torch.float8_e5m2).view(torch.uint8).numpy() for x in data]
    size = sum(native_bytes(x, "float8_e5m2") for x in e5m2)
    ratio_rows(paper, "ours/e5m2", sum(x.nbytes for x in e5m2), size, None, RATIO_E5M2)
    layers(paper, fitted, data)


def coded_bytes(data: Sequence[Bits], tables: Sequence[Bytes], form: Form) -> tuple[int, int]:
    """Bytes of all tensors, and escapes. Ends the program if one does not come back."""
    size = escapes = 0
    for values, table in zip(data, tables, strict=True):
        coded = encode(values, table, form)
        if not np.array_equal(decode(coded, table, form), values):
            raise SystemExit(f"splitzip: {form}: what was decoded is not what was encoded")
        count = len(coded.exponents)
        of = sentinel_bytes(form, coded.values, count) if form.sentinel else form.bytes_of(coded.values, count)
        size, escapes = size + of, escapes + count
    return size, escapes


def ratio_rows(
    paper: Paper, case: str, raw: int, size: int, escapes: int | None, published: float | None = None
) -> None:
    paper.row(case, "ratio", raw / size, "x", published)
    if escapes is not None:
        paper.row(case, "escapes", escapes / (raw // 2), "share")


def speeds(paper: Paper, found: np.ndarray, data: Sequence[Bits]) -> None:
    """Processor time of each form, as a ratio to the published one."""
    values = np.concatenate(data)
    calls: dict[str, Callable[[], object]] = {}
    for name, (form, _, _) in FORMS.items():
        table = most_frequent(found, form.entries)
        coded = encode(values, table, form)
        calls[f"{name} encode"] = lambda table=table, form=form: encode(values, table, form)
        calls[f"{name} decode"] = lambda coded=coded, table=table, form=form: decode(coded, table, form)
    calls["dynamic encode"] = lambda: encode(values, most_frequent(counts([values]), BASE.entries), BASE)
    seconds = interleave(calls, 5, time.process_time)
    base = {"encode": FORMS["top-16"][1], "decode": FORMS["top-16"][2]}
    theirs = {f"{name} {way}": gbps for name, (_, *both) in FORMS.items() for way, gbps in zip(base, both, strict=True)}
    theirs["dynamic encode"] = DYNAMIC_GBPS
    for call, spent in seconds.items():
        name, way = call.split()
        ours, figure, whole = seconds[f"top-16 {way}"] / spent, theirs[call], base[way]
        theirs_to_base = figure / whole if figure and whole and name != "top-16" else None
        paper.row(f"table/{name}", f"{way}_vs_base", ours, "x", theirs_to_base)


def tables_by_kind(fitted: Sequence[Bits], data: Sequence[Bits]) -> dict[str, list[Bytes]]:
    """Tables of 16 for every tensor of `data`, by what they are fitted to."""
    sides = [most_frequent(counts(fitted[side::2]), 16) for side in range(2)]
    return {
        "keys-and-values": sides * (len(data) // 2),
        "each-layer": [most_frequent(counts([x]), 16) for x in fitted],
        "the-data": [most_frequent(counts(data), 16)] * len(data),
        "each-tensor-of-the-data": [most_frequent(counts([x]), 16) for x in data],
    }


def table_bytes(tables: Sequence[Bytes]) -> int:
    """Of all tables that differ."""
    return sum(map(len, {table.tobytes() for table in tables}))


def native_bytes(values: np.ndarray, dtype: str) -> int:
    return encode_values(values, dtype, out=np.empty(bound_values(len(values), dtype), np.uint8))


def layers(paper: Paper, fitted: Sequence[Bits], data: Sequence[Bits]) -> None:
    """The layer of which a table covers least, with one table and with one for each layer; the same with windows."""
    for side, name in enumerate(("K", "V")):
        mine, theirs = fitted[side::2], data[side::2]
        one = most_frequent(counts(fitted), 16)
        paper.row(
            f"layers/{name}/one-table",
            "coverage_worst",
            min(covered(counts([x]), one) for x in theirs),
            "share",
        )
        own = min(covered(counts([x]), most_frequent(counts([y]), 16)) for x, y in zip(theirs, mine, strict=True))
        paper.row(f"layers/{name}/own-table", "coverage_worst", own, "share")
        paper.row(
            f"layers/{name}/windows",
            "coverage_worst",
            min(1 - window_bytes(x, 4096)[1] / len(x) for x in theirs),
            "share",
        )


# -- coverage ----------------------------------------------------------------------------------------------------------


def coverage(paper: Paper, model: object, tokenizer: object, fitted: Sequence[Bits]) -> None:
    for text, source in TEXTS.items():
        found = tensors(model, tokenizer, source(LENGTH * CHARACTERS))
        coverage_rows(paper, f"coverage/smollm2/{text}", fitted, found)
    for name in models.RECIPES:
        if not models.RECIPES[name].is_trained:
            paper.row(f"coverage/{name}/conversations", "missing", 1, "model")
            continue
        other, its_tokenizer = models.load(name)
        fit = tensors(other, its_tokenizer, calibration_text(LENGTH * CHARACTERS))
        found = tensors(other, its_tokenizer, held_out_text(LENGTH * CHARACTERS))
        coverage_rows(paper, f"coverage/{name}/conversations", fit, found)


def coverage_rows(paper: Paper, case: str, fitted: Sequence[Bits], data: Sequence[Bits]) -> None:
    before, found = counts(fitted), counts(data)
    paper.row(case, "exponent_bits", entropy(found), "bits")
    for entries in (8, 15, 16):
        paper.row(f"{case}/top-{entries}", "coverage", covered(found, most_frequent(before, entries)), "share")
    escapes = sum(window_bytes(x, 4096)[1] for x in data)
    paper.row(f"{case}/windows", "coverage", 1 - escapes / found.sum(), "share")
