"""Every record that was ever written here is decoded for ever (see tests/golden/make.py).

Those of codecs that need a profile or donors: test_golden_models.py.
"""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path

import pytest
import torch
from codecrows import row_of
from goldencases import CASES
from goldenmodels import record_of

from kvstore.codecs import BlockInfo, KVView, codec_by_id, codec_by_name, codec_names
from kvstore.core.keys import chain_key
from kvstore.core.layout import ITEM_BYTES
from kvstore.core.record import check_payload, parse, payload_of

GOLDEN = Path(__file__).parent.parent / "golden"
RECORDS = sorted(path for path in GOLDEN.glob("*/*.rec") if path.parent.name in codec_names())
# Written before fp16 and fp32 had modes of their own in the codec; decoded for ever, but coded otherwise today.
OLDER = {GOLDEN / "entropy" / f"{name}.rec" for name in ("float16-wave", "float32-wave", "float32-one-value")}
PROMISED = [path for path in RECORDS if row_of(path.parent.name).same_bytes and path not in OLDER]


def empty(info: BlockInfo) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dtype = getattr(torch, info.layout.dtype)
    return [
        tuple(torch.zeros(x.heads, info.count, dim, dtype=dtype) for dim in (x.key_dim, x.value_dim))
        for x in info.layout.layers
    ]


def raw_of(kv: list[tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    return b"".join(t.view(torch.uint8).numpy().tobytes() for pair in kv for t in pair)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_golden_record_decodes_to_the_bytes_it_was_made_of(path: Path) -> None:
    data = memoryview(path.read_bytes())
    header = parse(data, len(data))
    check_payload(header, data)
    codec = codec_by_id(header.codec)
    assert codec.name == path.parent.name
    case = CASES[path.stem]
    info = BlockInfo(case.layout, header.tokens, header.start)
    assert header.tokens.tolist() == case.info().tokens.tolist()
    assert (header.start, header.key) == (case.start, chain_key(header.parent, header.tokens))
    out = empty(info)
    codec.decode(info, payload_of(header, data), header.layer_sizes, KVView.of_layers(info.layout, out))
    assert hashlib.sha256(raw_of(out)).hexdigest() == (GOLDEN / f"{path.stem}.sha256").read_text().strip()


@pytest.mark.parametrize("name", codec_names())
def test_every_registered_codec_has_a_golden_record_of_every_dtype(name: str) -> None:
    found = {CASES[path.stem].layout.dtype for path in RECORDS if path.parent.name == name}
    assert found == set(ITEM_BYTES)


def test_every_case_and_every_record_belong_together() -> None:
    assert {path.stem for path in RECORDS} == set(CASES) == {path.stem for path in GOLDEN.glob("*.sha256")}


@pytest.mark.parametrize("name", CASES)
def test_the_formulas_still_give_the_bytes_that_were_hashed(name: str) -> None:
    """A golden record that decodes to a hash only says something while the hash is that of the case."""
    assert hashlib.sha256(CASES[name].raw()).hexdigest() == (GOLDEN / f"{name}.sha256").read_text().strip()


@pytest.mark.parametrize("path", PROMISED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_encoding_today_gives_the_same_bytes(path: Path) -> None:
    data = memoryview(path.read_bytes())
    codec, case = codec_by_name(path.parent.name), CASES[path.stem]
    assert record_of(codec, case.info(), case.kv(), parse(data, len(data)).record_id) == data


@pytest.mark.parametrize("path", sorted(OLDER), ids=lambda path: path.stem)
def test_encoding_today_takes_less_than_what_older_programs_wrote(path: Path) -> None:
    data = memoryview(path.read_bytes())
    header, case = parse(data, len(data)), CASES[path.stem]
    now = memoryview(record_of(codec_by_name("entropy"), case.info(), case.kv(), header.record_id))
    assert sum(parse(now, len(now)).layer_sizes) < sum(header.layer_sizes)


def test_making_golden_files_leaves_alone_what_is_there(tmp_path: Path) -> None:
    make = runpy.run_path(str(GOLDEN / "make.py"))
    (tmp_path / "old").write_bytes(b"old")
    make["write_new"](tmp_path / "old", b"new")
    assert (tmp_path / "old").read_bytes() == b"old"


def test_codec_zero_still_writes_the_same_bytes() -> None:
    """Raw is the oracle of the others: its encoder, too, may never change."""
    for name, case in CASES.items():
        data = memoryview((GOLDEN / "raw" / f"{name}.rec").read_bytes())
        assert bytes(payload_of(parse(data, len(data)), data)) == case.raw()
        assert codec_by_name("raw").id == 0


def test_golden_files_stay_small() -> None:
    """Those of stores, too, but tests/store/test_golden*.py say how small."""
    files = [path for path in GOLDEN.rglob("*") if path.is_file() and path.parent.name not in ("stores", "windows")]
    assert max(path.stat().st_size for path in files) < 32_000
    for folder in {path.parent for path in files}:
        assert sum(path.stat().st_size for path in files if path.parent == folder) < 140_000, folder
