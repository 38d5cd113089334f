"""What goes of parcels: all of them, or their ends where those are damaged."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small
from remotecases import LONG_S
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.tiers.remote.cleaning import objects, older, orphans, remove, to_remove
from kvstore.tiers.remote.engines.folder import FolderEngine
from kvstore.tiers.remote.parcel import HEAD_BYTES, ParcelHead
from kvstore.tiers.remote.sealing import Sealer
from kvstore.tiers.remote.survey import Value, survey

BLOCK, GROUP = small.BLOCK, rs.GROUP
STEM = small.tokens_of(1, 6 * BLOCK)
FORKS = [np.concatenate([STEM, small.tokens_of(number, 6 * BLOCK)]) for number in (7, 8)]
RECORDS = 6 + 2 * 6
DAY_S = 86400.0
KEY = b"k" * 32


@pytest.fixture(params=["open", "sealed"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    return KEY if request.param == "sealed" else None


@pytest.fixture
def engine(tmp_path: Path, key: bytes | None) -> Iterator[FolderEngine]:
    """A folder with parcels, all of them old: of 4 and 4 blocks of the first fork and 4 more, 2 and 4 of the other."""
    rs.filled(tmp_path / "a", rs.settings(_url(tmp_path), key=key), *FORKS)
    _age(tmp_path)
    engine = FolderEngine(f"{tmp_path}/shared")
    yield engine
    engine.close()


def _url(tmp_path: Path) -> rs.WithParcels:
    return rs.WithParcels(f"folder://{tmp_path}/shared")


def _age(tmp_path: Path) -> None:
    for file in (tmp_path / "shared").rglob("*"):
        if file.is_file():
            os.utime(file, (0, 0))


def _sealer(key: bytes | None) -> Sealer | None:
    return None if key is None else Sealer(key)


def _stored(tmp_path: Path, key: bytes | None, name: str) -> list[int]:
    with rs.open_store(tmp_path / name, rs.settings(_url(tmp_path), promote="second", key=key)) as store:
        return [small.stored(store, tokens) // BLOCK for tokens in FORKS]


def test_each_record_is_told_and_all_bytes(engine: FolderEngine, key: bytes | None, tmp_path: Path) -> None:
    values = survey(engine, LONG_S, sealer=_sealer(key))
    assert len(values) == RECORDS
    assert not [value.problem for value in values if value.problem]
    assert sorted(map(len, objects(values))) == [2, 4, 4, 4, 4]
    files = [file.stat().st_size for file in (tmp_path / "shared").rglob("*") if file.is_file()]
    assert (sum(value.nbytes for value in values), len(files)) == (sum(files), 5)
    assert {value.object for value in values} == set(engine.list("kvs1/", LONG_S))
    assert orphans(values) == set()
    assert {value.tokens for value in values} == {BLOCK}
    if key is not None:
        assert {(v.is_sealed, v.problem) for v in survey(engine, LONG_S)} == {(True, "")}
        assert to_remove(survey(engine, LONG_S), 0, set(engine.list("kvs1/", LONG_S))) == []


def test_all_that_is_old_goes_and_what_is_used_stays_with_all_before_it(
    engine: FolderEngine, key: bytes | None
) -> None:
    old, values = older(engine, "", DAY_S, LONG_S), survey(engine, LONG_S, sealer=_sealer(key))
    going = to_remove(values, None, old)
    assert len(going) == RECORDS
    used = max((value for value in values), key=lambda value: value.depth)
    engine.touch([used.object], DAY_S, LONG_S)
    gone = remove(engine, values, going, LONG_S, old, DAY_S, _sealer(key))
    left = survey(engine, LONG_S, sealer=_sealer(key))
    assert {value.name for value in left} == {v.name for v in values} - {v.name for v in gone}
    assert used.name in {value.name for value in left}
    assert orphans(left) == set()
    assert 0 < len(gone) < RECORDS


def test_ends_go_first_until_the_rest_fits(engine: FolderEngine, key: bytes | None, tmp_path: Path) -> None:
    sealer = _sealer(key)
    values = survey(engine, LONG_S, sealer=sealer)
    total = sum(value.nbytes for value in values)
    for budget in (total, total - 1, total // 2, total // 3, 0):
        values = survey(engine, LONG_S, sealer=sealer)
        before = sum(value.nbytes for value in values)
        going = to_remove(values, budget)
        assert before - sum(value.nbytes for value in going) <= budget
        without_last = objects(going)[:-1]
        assert before - sum(value.nbytes for unit in without_last for value in unit) > budget or not going
        assert remove(engine, values, going, LONG_S, sealer=sealer) == going
        left = survey(engine, LONG_S, sealer=sealer)
        assert (orphans(left), sum(value.nbytes for value in left) <= budget) == (set(), True)
    assert left == []


@pytest.mark.parametrize("number", range(4))
def test_from_a_damaged_record_on_a_parcel_is_cut_off(
    engine: FolderEngine, key: bytes | None, tmp_path: Path, number: int
) -> None:
    sealer = _sealer(key)
    values = survey(engine, LONG_S, sealer=sealer)
    bad = next(value for value in values if value.depth == number * BLOCK)
    _spoil(engine, values, bad)
    found = survey(engine, LONG_S, sealer=sealer)
    assert [value.name for value in found if value.problem] == [bad.name]
    gone = remove(engine, found, to_remove(found, None), LONG_S, sealer=sealer)
    assert len(gone) == RECORDS - number
    left = survey(engine, LONG_S, sealer=sealer)
    assert [(value.problem, value.depth) for value in left] == [("", at * BLOCK) for at in range(number)]
    assert [(v.name, v.nbytes) for v in left] == [(v.name, v.nbytes) for v in found if v.object == bad.object][:number]
    assert _stored(tmp_path, key, "b") == [number, number]


def _spoil(engine: FolderEngine, values: list[Value], bad: Value) -> None:
    """Change the last byte of a record of a parcel."""
    unit, buffer = [value for value in values if value.object == bad.object], bytearray(1 << 16)
    size = engine.get_into(bad.object, memoryview(buffer), LONG_S)
    assert size is not None
    buffer[sum(value.nbytes for value in unit[: unit.index(bad) + 1]) - 1] ^= 1
    _put_instead(engine, bad.object, bytes(buffer[:size]))


def _put_instead(engine: FolderEngine, name: str, value: bytes) -> None:
    engine.delete([name], LONG_S)
    assert engine.put(name, [value], LONG_S)


def test_what_is_no_parcel_goes_as_a_whole(tmp_path: Path) -> None:
    rs.filled(tmp_path / "a", rs.settings(_url(tmp_path)), *FORKS)
    engine = FolderEngine(f"{tmp_path}/shared")
    values = survey(engine, LONG_S)
    unit = next(unit for unit in objects(values) if len(unit) == 4 and unit[0].depth)
    buffer = bytearray(1 << 16)
    size = engine.get_into(unit[0].object, memoryview(buffer), LONG_S)
    assert size is not None
    head = ParcelHead.unpack(buffer[:HEAD_BYTES], bytes.fromhex(unit[0].block[-64:]), 1 << 16)
    others = ParcelHead((head.keys[0], head.keys[2], head.keys[3]), (head.sizes[0], head.sizes[2], head.sizes[3]))
    second = HEAD_BYTES + head.sizes[0]
    records = buffer[HEAD_BYTES:second] + buffer[second + head.sizes[1] : size]
    for value, problems in (
        (b"", 1),
        (buffer[: size - 1], 1),
        (bytes(buffer[:size]) + b"x", 1),
        (b"?" + buffer[1:size], 1),
        (others.pack() + records, 1),  # whose second record does not follow the first
    ):
        _put_instead(engine, unit[0].object, bytes(value))
        found = survey(engine, LONG_S)
        assert [v.object for v in found if v.problem] == [unit[0].object] * problems
    engine.close()


def test_at_the_command_line(tmp_path: Path) -> None:
    rs.filled(tmp_path / "a", rs.settings(_url(tmp_path)), *FORKS)
    engine, url = FolderEngine(f"{tmp_path}/shared"), str(_url(tmp_path))
    values = survey(engine, LONG_S)
    (row,) = _run(0, "stats", url)["identities"]
    assert (row["records"], row["parcels"], row["tokens"], row["unreachable"]) == (RECORDS, 5, RECORDS * BLOCK, 0)
    bad = next(value for value in values if value.depth == 5 * BLOCK)
    _spoil(engine, values, bad)
    (problem,) = _run(3, "verify", url)["problems"]
    assert problem.startswith(bad.name)
    assert bad.object in problem
    done = _run(0, "gc", url, "--yes")
    assert done["removed"] == done["due"] == RECORDS - 5
    assert _run(0, "verify", url)["values"] == 5
    engine.close()


def _run(code: int, *arguments: str) -> Any:
    done = CliRunner().invoke(app, ["remote", *arguments, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.output)


def _tree(chance: random.Random) -> list[Value]:
    """Any tree of blocks, in parcels and alone, some of them twice, some damaged."""
    blocks: list[tuple[str, str, int]] = []  # name, the one before it, depth
    for number in range(chance.randrange(1, 40)):
        before = chance.choice(blocks) if blocks and chance.random() < 0.9 else ("", "", -BLOCK)
        blocks.append((f"{number:064x}", before[0], before[2] + BLOCK))
    by_name = {name: (before, depth) for name, before, depth in blocks}
    values = []
    for _ in range(chance.randrange(1, 40)):
        chain = [chance.choice(blocks)[0]]
        while by_name[chain[0]][0] and len(chain) < GROUP and chance.random() < 0.7:
            chain.insert(0, by_name[chain[0]][0])
        folder = f"kvs1/i/{chain[0]}.parcel/" if chance.random() < 0.7 else ""
        for name in chain if folder else chain[:1]:
            before, depth = by_name[name]
            parent, problem = f"kvs1/i/{before}" if before else "", "bad" if chance.random() < 0.05 else ""
            values.append(
                Value((folder or "kvs1/i/") + name, chance.randrange(1, 9), problem, parent, depth, BLOCK, after=parent)
            )
    return [*{value.name: value for value in values}.values()] if _whole(values) else _tree(chance)


def _whole(values: list[Value]) -> bool:
    """Whether no parcel came twice, with other blocks."""
    runs = [unit for unit in objects(values) if ".parcel/" in unit[0].name]
    return all(len({value.name for value in unit}) == len(unit) for unit in runs)


@pytest.mark.parametrize("seed", range(200))
def test_of_any_tree_nothing_goes_before_what_continues_it(seed: int) -> None:
    chance = random.Random(seed)
    values = _tree(chance)
    old = {value.object for value in values if chance.random() < 0.5}
    budget = chance.choice([None, 0, chance.randrange(0, 100)])
    going = to_remove(values, budget, old)
    assert len({value.name for value in going}) == len(going)
    left = {value.name: value for value in values}
    useless = {value.name for value in to_remove(values, None)}
    for unit in objects(going):
        for value in unit:
            del left[value.name]
        assert orphans([value for value in left.values() if value.name not in useless]) == set()
    rest = list(left.values())
    assert not [value for value in rest if value.problem or value.name in orphans(rest)]
    if budget is not None:
        assert sum(value.nbytes for value in rest) <= budget
    for unit in objects(values):
        stays = [value.name in left for value in unit]
        assert stays == sorted(stays, reverse=True)  # the beginning of a parcel
