"""The benchmark of the codecs measures what it says, and refuses a codec that does not give back every bit."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmodules import load

from kvstore import KVLayout, LayerLayout

codecs, plot = load("codecs"), load("plots.codecs")
common, data, peers = load("common"), load("peers.codecs.data"), load("peers.codecs.base")

HEADS, KEY_DIM, VALUE_DIM, LAYERS = 2, 8, 4, 3
BYTES_PER_TOKEN = LAYERS * HEADS * (KEY_DIM + VALUE_DIM) * 2
LAYOUT = KVLayout((LayerLayout(HEADS, KEY_DIM, VALUE_DIM),) * LAYERS, "bfloat16")


def window(tokens: int, seed: int) -> Any:
    numbers = torch.Generator().manual_seed(seed)

    def random(dim: int) -> torch.Tensor:
        return torch.randn(HEADS, tokens, dim, generator=numbers).bfloat16()

    return np.arange(tokens, dtype=np.uint32), [(random(KEY_DIM), random(VALUE_DIM)) for _ in range(LAYERS)]


@pytest.fixture
def kv() -> Any:
    return data.assemble([window(128, 0), window(128, 1)], 192 * BYTES_PER_TOKEN, LAYOUT)


def test_values_are_cut_in_whole_blocks_and_in_tensors(kv: Any) -> None:
    (_, first), (_, second) = window(128, 0), window(128, 1)
    assert [len(ids) for ids in kv.ids] == [128, 64]
    assert kv.values.nbytes == 192 * BYTES_PER_TOKEN
    assert not kv.tiled
    units = kv.units(kv.values)
    assert np.array_equal(units[1], first[0][1].view(torch.uint16).numpy().reshape(-1))
    assert np.array_equal(units[2 * LAYERS], second[0][0][:, :64].contiguous().view(torch.uint16).numpy().reshape(-1))
    assert np.array_equal(kv.part(kv.values, 1)[: len(units[1])], units[1])
    blocks = kv.blocks(kv.values)
    assert [(info.count, info.start) for info, _ in blocks] == [(64, 0), (64, 64), (64, 0)]
    assert torch.equal(blocks[1][1].tensors()[3], first[1][1][:, 64:])


def test_windows_are_repeated_when_there_are_too_few(kv: Any) -> None:
    tiled = data.assemble([window(128, 0)], 320 * BYTES_PER_TOKEN, LAYOUT)
    assert tiled.tiled
    assert [len(ids) for ids in tiled.ids] == [128, 128, 64]
    assert np.array_equal(tiled.units(tiled.values)[0], tiled.units(tiled.values)[2 * LAYERS])


def test_normal_numbers_have_the_shares_that_their_names_say() -> None:
    found = data.normal(100_000, (0, 5), (0, 3))
    clean = found["zeros0/escapes0"]
    assert not (clean == 0).any()
    assert abs((found["zeros5/escapes0"] == 0).mean() - 0.05) < 0.005
    strange = found["zeros0/escapes3"]
    assert 0.025 < (strange != clean).mean() < 0.035
    assert ((strange ^ clean) & 0x807F == 0).all()  # only exponents differ
    assert (strange >> 7 & 0xFF).max() == 254  # all numbers are finite
    assert (clean >> 7 & 0xFF).max() < 132


def rows_of(kv: Any, tmp_path: Path, only: set[str]) -> list[dict[str, Any]]:
    rows = common.Rows("codecs", tmp_path / "rows.json")
    with ThreadPoolExecutor(2) as pool:
        pools = {1: None, 2: pool}
        codecs.measure(rows, codecs.bf16(rows, kv, only, [1, 2], pools), pools, 1)
    found: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    return found


def test_every_case_has_its_figures(kv: Any, tmp_path: Path) -> None:
    rows = rows_of(kv, tmp_path, {"raw", "zstd"})
    cases = {row["case"] for row in rows}
    blocks = {f"{name}/bf16/KV/store-blocks{end}" for name in ("raw", "zstd") for end in ("", "/2threads")}
    assert cases == blocks | {"memcpy/bf16/KV", "memcpy/bf16/KV/2threads"}
    metrics = {
        "ratio",
        "bits_per_value",
        *(f"{way}_{what}" for way in ("encode", "decode") for what in ("GBps", "share_of_memcpy")),
    }
    for case in blocks:
        assert {row["metric"] for row in rows if row["case"] == case} == metrics
    ratio = [row["value"] for row in rows if row["case"].startswith("raw") and row["metric"] == "ratio"]
    assert ratio == [1, 1]


@pytest.mark.parametrize("name", sorted(peers.LIBRARIES))
def test_a_peer_gives_back_every_bit_and_its_input_is_kept(kv: Any, name: str, tmp_path: Path) -> None:
    if peers.codec_peer(name) is None:
        pytest.skip(f"{name} is not installed")
    before = kv.values.copy()
    rows = rows_of(kv, tmp_path, {name})
    assert {row["case"] for row in rows} == {f"{name}/bf16/KV", "memcpy/bf16/KV"}
    assert np.array_equal(kv.values, before)


def test_a_peer_that_is_not_installed_is_a_row(kv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.LIBRARIES, "zipnn", "no_such_library")
    rows = rows_of(kv, tmp_path, {"zipnn", "raw"})
    assert [row["metric"] for row in rows if row["case"] == "zipnn/bf16/KV"] == ["missing"]
    assert any(row["case"].startswith("raw") for row in rows)


class Lossy:
    """A coder that loses one bit, and one that does nothing."""

    def __init__(self, values: Any, target: Any, bits: int) -> None:
        self.values, self.target, self.bits = values, target, bits

    def encode(self) -> None: ...
    def decode(self) -> None: ...

    def coded_bytes(self) -> int:
        return 1

    def restore(self) -> None:
        self.target[:] = self.values
        self.target[-1] ^= self.bits


def test_a_round_trip_that_differs_in_one_bit_ends_the_run(tmp_path: Path) -> None:
    values = np.arange(100, dtype=np.uint16)
    target = np.zeros_like(values)
    for bits in (0, 1):
        case = codecs.Case("data", Lossy(values, target, bits), values, target)
        if bits == 0:
            codecs.check("exact", case)  # the control: the same coder, keeping the bit
            continue
        rows = common.Rows("codecs")
        with pytest.raises(SystemExit, match="lossy") as ended:
            codecs.measure(rows, {"lossy": case}, {1: None}, 1)
        assert not isinstance(ended.value.code, int)  # text: printed, and the status is 1
        assert not rows.rows


def test_a_lossy_coder_may_differ_from_the_values_but_not_from_itself() -> None:
    values = np.arange(100, dtype=np.uint16)
    coder = Lossy(values, np.zeros_like(values), 1)
    case = codecs.Case("data", coder, values, coder.target, exact=False)
    codecs.check("lossy", case)
    restore = coder.restore

    def unsteady() -> None:
        restore()
        coder.bits += 1

    coder.restore = unsteady
    with pytest.raises(SystemExit, match="lossy"):
        codecs.check("lossy", case)


def test_a_coder_that_restores_nothing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(100, dtype=np.uint16)
    monkeypatch.setattr(Lossy, "restore", lambda self: None)
    target = values.copy()  # what an earlier coder restored must not count
    with pytest.raises(SystemExit):
        codecs.check("idle", codecs.Case("data", Lossy(values, target, 0), values, target))


def figure(case: str, **values: float) -> list[dict[str, Any]]:
    return [{"case": case, "metric": metric, "value": value} for metric, value in values.items()]


ROWS = [
    *figure("splitzip/bf16/KV/store-blocks", ratio=1.2, encode_GBps=4, decode_GBps=5),
    *figure("splitzip/bf16/KV", ratio=1.3, encode_GBps=6, decode_GBps=7),
    *figure("zipnn/bf16/KV", ratio=1.5, encode_GBps=1, decode_GBps=2),
    *figure("pcodec/bf16/KV", missing=1),
    *figure("memcpy/bf16/KV", copy_GBps=13),
]


def test_a_plot_has_one_point_a_codec() -> None:
    found = plot.points(ROWS)
    assert [(point.name, point.ratio, point.ours) for point in found] == [
        ("splitzip", 1.3, True),
        ("zipnn", 1.5, False),
    ]
    assert plot.memcpy(ROWS) == 13


def test_labels_do_not_cover_each_other_where_there_is_room() -> None:
    marks = [(100.0, 100.0), (104.0, 100.0), (102.0, 103.0)]
    boxes = plot.place(marks, [40.0] * 3)
    assert all(plot._overlap(a, b) == 0 for i, a in enumerate(boxes) for b in boxes[:i])
    assert plot._overlap((0, 0, 2, 2), (1, 1, 3, 3)) == 1


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "plot.png"
    plot.draw(plot.points(ROWS), plot.memcpy(ROWS), out)
    picture = out.read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 500
