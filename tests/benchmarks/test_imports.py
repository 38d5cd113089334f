"""Benchmarks are too slow to be run by tests, so what they import of each other is looked up in their sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py")])


def _file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file()), None)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _names(path: Path) -> set[str]:
    """What a module has at its top level, also behind conditions."""
    found = set[str]()
    left: list[ast.AST] = list(_tree(path).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        left += ast.iter_child_nodes(node)
    return found


def _imported(path: Path) -> set[tuple[str, str]]:
    """Modules of benchmarks and the names that are taken from them."""
    return {
        (node.module, alias.name)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "benchmarks"
        for alias in node.names
    }


def _is_there(module: str, name: str) -> bool:
    path = _file(module)
    return _file(f"{module}.{name}") is not None or (path is not None and name in _names(path))


def test_imports_and_names_are_found() -> None:
    assert ("benchmarks.common", "Rows") in _imported(ROOT / "benchmarks/fleet.py")
    assert _is_there("benchmarks.common", "Rows")
    assert _is_there("benchmarks.drills", "fleet")
    assert not _is_there("benchmarks.common", "sessions")
    assert not _is_there("benchmarks.nothing", "Rows")


def test_what_benchmarks_import_of_each_other_is_there() -> None:
    assert len(FILES) > 50
    wrong = {(path.name, *pair) for path in FILES for pair in _imported(path) if not _is_there(*pair)}
    assert not wrong
