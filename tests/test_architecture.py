"""Who may import whom, and who may touch files: read from the source, so that no import order can hide it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lower layers never see higher ones. A name stands for the module and everything below it; the longest name wins.
LAYERS = [
    {"kvstore.errors", "kvstore.config"},
    {
        "kvstore.identity",
        "kvstore.layout",
        "kvstore.record",
        "kvstore.session_record",
        "kvstore.eviction",
        "kvstore.metrics",
        "kvstore.guard",
    },
    {"kvstore.codecs", "kvstore.trie"},
    {"kvstore.tiers"},
    {"kvstore"},  # the engine: store, session, and what they are made of
    {"kvstore.integrations", "kvstore.calibration", "kvstore.cli"},
]
DATA = LAYERS[0] | LAYERS[1]  # no I/O, no torch at import
# Methods that hand over to an integration when they are called; importing their modules costs nothing.
LAZY = {
    ("kvstore.identity", "kvstore.integrations.transformers"),
    ("kvstore.hit", "kvstore.integrations.growing"),
}
FILE_CALLS = {
    *("open", "read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev", "sendfile", "ftruncate"),
    *("truncate", "fsync", "fdatasync", "posix_fallocate", "posix_fadvise", "lseek", "rename", "replace", "unlink"),
    *("remove", "link", "symlink", "mkdir", "makedirs", "rmdir", "listdir", "scandir", "walk", "stat", "fstat"),
    *("lstat", "statvfs", "fstatvfs", "chmod", "copy_file_range"),
}
PATH_CALLS = {"read_bytes", "read_text", "write_bytes", "write_text", "iterdir", "rglob", "glob"}
MAY_TOUCH_FILES = {
    "kvstore.tiers.disk.fs": "the one seam to the file system",
    "kvstore.config": "reads the settings file that the caller names",
    "kvstore.codecs.donor_tables": "reads its tables, a file of the package",
    "kvstore.codecs.entropy_tables": "reads its tables, a file of the package",
    "kvstore.codecs.higgs_grids": "reads its grids, a file of the package",
    "kvstore.codecs.profile": "reads and writes the profile that the caller names",
    "kvstore.calibration.calibrate": "reads the model and the text that the user names",
    "kvstore.calibration.dump": "looks into its work folder",
    "kvstore.calibration.lossy": "has scratch files in the work folder",
}
NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FOLDERS = {"kvstore": "kvstore", "trie": "kvstore.trie", "codecs": "kvstore.codecs"}


def _modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "kvstore" and parts[0] in ("trie", "codecs"):
                continue  # the symlinks; these files are found in their own folders
            names = [package, *(part for part in parts if part != "__init__")]
            found[".".join(names)] = path
    return found


MODULES = _modules()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


def _imports(tree: ast.Module, module: str = "") -> Iterator[tuple[str, bool]]:
    """(imported module, whether it is imported as soon as this one is)."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(child for child in ast.walk(node) if child is not node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            base = str(node.module)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in MODULES else base), node not in inside


def _layer(module: str) -> int:
    names = [(len(name), i) for i, layer in enumerate(LAYERS) for name in layer if _below(module, name)]
    return max(names)[1]


def _below(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def test_the_tree_is_found() -> None:
    assert {"kvstore.store", "kvstore.tiers.disk.fs", "kvstore.trie.index", "kvstore.codecs.raw"} <= set(MODULES)


def test_the_layers_of_known_modules() -> None:
    assert [_layer(x) for x in ("kvstore.config", "kvstore.record", "kvstore.trie.index", "kvstore.tiers.host")] == [
        *range(4)
    ]
    assert [_layer(x) for x in ("kvstore.store", "kvstore.integrations.transformers")] == [4, 5]


def test_an_import_is_seen_wherever_it_stands() -> None:
    source = "import os\nfrom kvstore.store import A\ndef f():\n    import lmdb\nif TYPE_CHECKING:\n    import torch"
    assert sorted(_imports(ast.parse(source))) == [
        ("kvstore.store", True),
        ("lmdb", False),
        ("os", True),
        ("torch", False),
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_only(module: str) -> None:
    for imported, _ in _imports(TREES[module], module):
        if not _below(imported, "kvstore") or (module, imported) in LAZY or module == imported == "kvstore":
            continue
        assert _layer(imported) <= _layer(module), f"{module} imports {imported}, which is above it"
        if _layer(module) == 2:
            same = module.split(".")[1] == imported.split(".")[1]
            assert same or _layer(imported) < 2, f"{module} imports {imported}: codecs and trie are independent"


@pytest.mark.parametrize(("module", "imported"), sorted(LAZY))
def test_the_exceptions_are_lazy_and_still_needed(module: str, imported: str) -> None:
    assert [at_once for name, at_once in _imports(TREES[module]) if name == imported] == [False]


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name in DATA))
def test_data_modules_do_not_import_torch(module: str) -> None:
    assert not {name for name, at_once in _imports(TREES[module]) if at_once and _below(name, "torch")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_lmdb_is_imported_by_the_catalog_only(module: str) -> None:
    uses = any(_below(name, "lmdb") for name, _ in _imports(TREES[module]))
    assert uses == (module == "kvstore.tiers.disk.catalog")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_transformers_is_imported_by_its_integration_only(module: str) -> None:
    at_once = any(_below(name, "transformers") for name, now in _imports(TREES[module]) if now)
    assert at_once == (module in ("kvstore.integrations.transformers", "kvstore.integrations.growing"))


def _file_calls(tree: ast.Module) -> list[str]:
    """Calls that reach the file system by name: builtins' and io's open, os.*, Path methods, shutil, tempfile."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            owner, _, name = call.rpartition(".")
            by_os = owner in ("os", "io") and name in FILE_CALLS
            if call == "open" or by_os or name in PATH_CALLS or owner in ("shutil", "tempfile"):
                found.append(f"{call} in line {node.lineno}")
    return found


def test_file_calls_are_seen() -> None:
    source = "open('a')\nos.pwrite(1, b'', 0)\nPath('a').read_bytes()\nos.getpid()\nfs.open('a')"
    assert [text.split()[0] for text in _file_calls(ast.parse(source))] == ["open", "os.pwrite", "Path('a').read_bytes"]


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(MAY_TOUCH_FILES)))
def test_files_are_touched_through_the_file_system_seam_only(module: str) -> None:
    assert _file_calls(TREES[module]) == []


def test_the_file_system_seam_is_where_the_calls_are() -> None:
    assert len(_file_calls(TREES["kvstore.tiers.disk.fs"])) > 5


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_is_unpickled_or_executed(module: str) -> None:
    tree = TREES[module]
    assert not NEVER & {name.split(".")[0] for name, _ in _imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("torch.load", "eval", "exec", "__import__")
            assert not [word for word in node.keywords if word.arg == "allow_pickle"]


@pytest.mark.parametrize("package", ["kvstore.codecs", "kvstore.trie"])
def test_codecs_and_trie_import_without_lmdb_and_transformers(package: str) -> None:
    """As on a machine where they are not installed: None in sys.modules makes an import fail."""
    code = f"import sys\nsys.modules['lmdb'] = sys.modules['transformers'] = None\nimport {package}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
