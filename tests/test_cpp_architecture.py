"""csrc/ is a folder for each part; parts build on each other in one direction, and only bindings know Python."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
FILES = sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.suffix in (".cc", ".h"))

# What each part stands on.
BELOW: dict[str, set[str]] = {
    "common": set(),
    "trie": {"common"},
    "content": {"common", "trie"},
    "xxh3": {"common"},
    "catalog": {"common", "xxh3"},
    "files": set(),
    "rans": {"common"},
    "splitzip": {"common"},
    "aqua": {"common"},
    "entropy": {"common", "rans", "splitzip"},
    "predictive": {"common", "rans"},
    "lossy": {"common", "rans", "predictive"},
    "levels": {"common", "rans", "predictive"},
    "donor": {"common", "rans", "predictive", "levels"},
}
BELOW["bindings"] = set(BELOW)

KERNELS = re.compile(r"(scalar|avx2|avx512|amx|neon)-inl\.h")


def includes(name: str) -> list[str]:
    """The files of csrc/ that a file includes."""
    return re.findall(r'^#include "([^"]+)"', (CSRC / name).read_text(), re.MULTILINE)


def part(name: str) -> str:
    return name.partition("/")[0]


def sources() -> set[str]:
    """The sources that setup.py compiles: every text in it that names one."""
    nodes = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text.endswith(".cc")}


def test_the_parts_are_known() -> None:
    assert {part(name) for name in FILES} == set(BELOW)
    assert includes("entropy/entropy.cc")[0] == "entropy/entropy.h"


def test_includes_name_files_that_exist() -> None:
    assert not {(name, other) for name in FILES for other in includes(name) if other not in FILES}


def test_includes_are_acyclic() -> None:
    TopologicalSorter({name: includes(name) for name in FILES}).prepare()


def test_the_order_of_the_parts_is_one() -> None:
    order = TopologicalSorter(BELOW)
    order.prepare()
    for name, below in BELOW.items():
        assert all(BELOW[other] <= below for other in below), name


def test_a_part_includes_what_it_stands_on_only() -> None:
    arrows = {(name, other) for name in FILES for other in includes(name)}
    assert not {(name, other) for name, other in arrows if part(other) not in {part(name)} | BELOW[part(name)]}


def test_only_bindings_know_python() -> None:
    known = re.compile(r"^#include <(Python\.h|pybind11/.*)>|\bpy::", re.MULTILINE)
    users = {name for name in FILES if known.search((CSRC / name).read_text())}
    assert {part(name) for name in users} == {"bindings"}, users


def test_bodies_are_included_by_their_part_s_choice_only() -> None:
    """What is compiled once for each set of instructions is reached by dispatch.h, and has one of three names. A body
    may use that of the same instructions of a part below."""
    bodies = {name for name in FILES if name.endswith("-inl.h")}
    assert all(KERNELS.fullmatch(Path(name).name) for name in bodies)
    for name in FILES:
        for other in bodies & set(includes(name)):
            below = name in bodies and Path(name).name == Path(other).name
            assert Path(name).parent == Path(other).parent or below, name
            assert Path(name).name == "dispatch.h" or name in bodies, name


def test_vector_instructions_are_in_their_files_only() -> None:
    found = {name for name in FILES if re.search(r"\b_mm(256|512)_\w+\(", (CSRC / name).read_text())}
    assert {Path(name).name for name in found} == {"avx2-inl.h", "avx512-inl.h", "amx-inl.h"}
    found = {name for name in FILES if re.search(r"\bv[a-z0-9]+q?_[suf](8|16|32|64)\(", (CSRC / name).read_text())}
    assert {Path(name).name for name in found} == {"neon-inl.h"}


def test_every_source_is_compiled() -> None:
    assert sources() == {name for name in FILES if name.endswith(".cc")}


def test_no_machine_is_assumed() -> None:
    flags = (ROOT / "setup.py").read_text()
    assert "-march" not in flags
    assert "-mtune" not in flags


def test_files_are_small() -> None:
    for name in FILES:
        lines = (CSRC / name).read_text().splitlines()
        assert len(lines) <= 500, name
        assert not [line for line in lines if len(line) > 120], name
