"""Every record that was ever written of a codec that needs a profile or donors is decoded for ever, and of every codec
there is one (see tests/helpers/goldenmodels.py)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from codecrows import ROWS, Row, WithDonors, row_of
from goldenmodels import (
    GOLDEN,
    LAYOUTS,
    MODEL_CASES,
    RECORDS,
    block_kept,
    coder_kept,
    decoded,
    donors_kept,
    made_again,
    opened,
    profile_kept,
    raw_of,
)
from kvcases import same_kv
from profilecases import Layers

from kvstore import KVLayout
from kvstore.codecs import codec_by_name, codec_names
from kvstore.codecs.profile import NO_PROFILE
from kvstore.codecs.registry import REGISTRY
from kvstore.core.keys import chain_key
from kvstore.errors import CodecError

FORMAT = (Path(__file__).parent.parent.parent / "FORMAT.md").read_text(encoding="utf-8")
PATHS = sorted(path for path in GOLDEN.glob("*/*.rec") if path.parent.name in {row.name for row, _ in RECORDS})
WITHOUT_CODEC = {"blocks", "profiles", "rans", "speculative", "stores", "windows"}  # of records
NEAR = 2**-7, 1e-2  # relative and absolute: what machines may round otherwise
ODD = 0.02  # of the values: an input of later layers that was rounded to the other side moves a few

records = pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")


def tensors(kv: Layers) -> list[torch.Tensor]:
    return [tensor.float() for pair in kv for tensor in pair]


def as_kept(layout: KVLayout, count: int, data: bytes) -> Layers:
    """A block from the bytes that `raw_of` gave."""
    flat, at, found = torch.from_numpy(np.frombuffer(data, np.int16).copy()).view(torch.bfloat16), 0, []
    for x in layout.layers:
        pair = []
        for dim in (x.key_dim, x.value_dim):
            size = x.heads * count * dim
            pair.append(flat[at : at + size].view(x.heads, count, dim))
            at += size
        found.append((pair[0], pair[1]))
    assert at == len(flat)
    return found


def is_near(found: Layers, kept: Layers) -> bool:
    """Whether these are the same numbers but for rounding."""
    far = total = 0
    for a, b in zip(tensors(found), tensors(kept), strict=True):
        odd = ~b.isfinite()
        if not torch.equal(a[odd].nan_to_num(7.0), b[odd].nan_to_num(7.0)):
            return False
        far += int(((a - b).abs() > NEAR[0] * b.abs() + NEAR[1])[~odd].sum())
        total += a.numel()
    return far <= ODD * total


@records
def test_a_golden_record_decodes_to_what_it_decoded_to(path: Path) -> None:
    row, case = row_of(path.parent.name), MODEL_CASES[path.stem]
    header, payload = opened(path)
    coder, info = coder_kept(row, path.stem), case.info()
    assert header.codec == coder.id
    assert header.tokens.tolist() == info.tokens.tolist()
    assert (header.start, header.key) == (case.start, chain_key(header.parent, header.tokens))
    found = decoded(coder, info, header, payload)
    if row.same_bytes:
        kept = path.with_suffix(".sha256").read_text().strip()
        assert hashlib.sha256(raw_of(found)).hexdigest() == kept
    else:
        assert is_near(found, as_kept(info.layout, info.count, path.with_suffix(".raw").read_bytes()))


@records
def test_a_golden_record_is_the_block_it_was_made_of_as_nearly_as_it_says(path: Path) -> None:
    row = row_of(path.parent.name)
    header, payload = opened(path)
    coder, block = coder_kept(row, path.stem), block_kept(path.stem)
    found = decoded(coder, MODEL_CASES[path.stem].info(), header, payload)
    assert header.error_bound == 0 or row.fidelity != "exact"
    if row.fidelity == "exact":
        assert same_kv(found, block)
        return
    for a, b in zip(tensors(found), tensors(block), strict=True):
        odd = ~b.isfinite()
        assert torch.equal(a[odd].nan_to_num(7.0), b[odd].nan_to_num(7.0))
        slack = 0.0 if row.same_bytes else NEAR[1]
        assert bool(((a - b).abs()[~odd] <= header.error_bound + slack).all())


@records
def test_a_golden_record_names_what_decoding_needs(path: Path) -> None:
    row = row_of(path.parent.name)
    header, payload = opened(path)
    coder = coder_kept(row, path.stem)
    layout = MODEL_CASES[path.stem].layout
    needs_profile = row.name not in ("donor", "donor-steps", "tsc", "tsc-8")
    assert header.profile == (profile_kept(layout).id if needs_profile else NO_PROFILE)
    if isinstance(coder, WithDonors):
        donors = [donor for donor, _ in donors_kept(path.stem)]
        assert header.donors == tuple(donors[: len(header.donors)])
        assert len(header.donors) == (1 if path.stem == "one-token" else 2)
        propagated = int.from_bytes(payload[8:12], "little")
        assert propagated == (row.name == "donor-propagated")
    else:
        assert header.donors == ()


def test_every_way_of_coding_is_among_the_golden_records() -> None:
    """By the modes that payloads begin with: predicted, in loss, against donors, in steps of these, and fallen back."""
    modes = {
        name: {opened(path)[1][0] for path in PATHS if path.parent.name == name}
        for name in {p.parent.name for p in PATHS}
    }
    assert 4 in modes["predictive"]
    assert 5 in modes["predictive-lossy"]
    assert modes["predictive"] & {1, 2}
    assert modes["predictive-lossy"] & {1, 2}
    assert modes["donor"] == modes["donor-propagated"] == {6}
    assert modes["donor-steps"] == {7}
    assert modes["donor-groups"] == {24}
    assert all({0, 2} <= modes[f"aqua-{bits}"] for bits in (2, 3, 4))
    assert modes["tsc"] == modes["tsc-8"] == {0, 1}


@pytest.mark.parametrize(("row", "name"), [pytest.param(r, n, id=f"{r.name}/{n}") for r, n in RECORDS if r.same_bytes])
def test_encoding_today_gives_the_same_bytes(row: Row, name: str) -> None:
    path = GOLDEN / row.name / f"{name}.rec"
    assert made_again(row, name, opened(path)[0].record_id) == path.read_bytes()


def test_another_profile_than_the_record_names_is_another_model() -> None:
    """So that the profiles above are needed, and not any."""
    path = GOLDEN / "donor-propagated" / "rope-alike.rec"
    header, payload = opened(path)
    coder = coder_kept(row_of("donor"), "rope-alike")
    with pytest.raises(CodecError):
        decoded(coder, MODEL_CASES["rope-alike"].info(), header, payload)


def test_every_case_has_its_records_and_every_record_its_case() -> None:
    assert {(path.parent.name, path.stem) for path in PATHS} == {(row.name, name) for row, name in RECORDS}
    assert {path.name.split(".")[0] for path in (GOLDEN / "blocks").iterdir()} == set(MODEL_CASES)
    assert {path.name.split(".")[0] for path in (GOLDEN / "profiles").iterdir()} == set(LAYOUTS)


# -- every codec there is ----------------------------------------------------------------------------------------------


def numbers_of_the_format() -> dict[int, str]:
    """From the table in FORMAT.md: what may stand in a record."""
    table = FORMAT.split("## Codecs")[1].split("##")[0]
    return {int(number): name for number, name in re.findall(r"^\| (\d+) \| ([a-z0-9]+) \|", table, re.MULTILINE)}


def test_every_codec_of_the_format_has_rows_and_golden_records() -> None:
    numbers = numbers_of_the_format()
    assert {2: "predictive", 3: "donor", 5: "aqua", 6: "tsc"}.items() <= numbers.items()
    assert {codec_by_name(name).id: name for name in codec_names()}.items() <= numbers.items()
    rows = {row.name: row.make(LAYOUTS["rope"], None).id for row in ROWS}
    assert len(rows) == len(ROWS)
    assert set(codec_names()) <= set(rows)
    archives = {number: kind.name for number, kind in REGISTRY.archives.items()}  # of sequences: tests of their own
    assert archives.items() <= numbers.items()
    of_blocks = set(numbers) - set(archives)
    assert set(rows.values()) == of_blocks, "codecs of FORMAT.md without a row in codecrows.ROWS, or the other way"
    for name, number in rows.items():
        found = {opened(path)[0].codec for path in (GOLDEN / name).glob("*.rec")}
        assert found == {number}, f"no golden records of {name}: run tests/golden/make.py"


def test_every_folder_of_golden_records_is_that_of_a_row() -> None:
    folders = {path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - WITHOUT_CODEC == {row.name for row in ROWS}
