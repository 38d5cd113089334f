"""Who may import whom, and who may touch files: read from the source, so that no import order can hide it.

Every import counts: those inside functions and those for type checkers, too. The folders are layers, one above the
other; nothing imports a layer above its own, and no module imports itself by way of others.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from threadruns import HANGS_S

ROOT = Path(__file__).parents[1]

# From the bottom to the top. A name stands for the module and everything below it; the longest name wins. Two names in
# one layer do not know each other.
TRANSFORMERS = "kvstore.integrations.transformers"
LAYERS = [
    {"kvstore.errors", "kvstore.version"},
    {"kvstore.core.tensors", "kvstore.core.fingerprints", "kvstore.core.rope_types", "kvstore.core.states"},
    {"kvstore.core.cache_layers", "kvstore.core.alike_layers"},
    {"kvstore.core.layout"},
    # Leaves, which know only those above: the identity asks `describe` about a model, and a hit makes a `cache`. So
    # `ModelIdentity.from_transformers` and `Hit.cache` hand over to what is below them.
    {f"{TRANSFORMERS}.config_facts"},
    {f"{TRANSFORMERS}.adapters", f"{TRANSFORMERS}.growing_layer", f"{TRANSFORMERS}.packed"},
    {f"{TRANSFORMERS}.lazy_layer"},
    {"kvstore.core.lazy_layers"},
    {f"{TRANSFORMERS}.fingerprint", f"{TRANSFORMERS}.cache", f"{TRANSFORMERS}.mode", f"{TRANSFORMERS}.shapes"},
    {f"{TRANSFORMERS}.describe"},
    {"kvstore.setting_checks"},
    {"kvstore.remote_config"},
    {"kvstore.config"},
    {"kvstore.log"},
    {"kvstore.timing"},
    {"kvstore.spans"},
    {"kvstore.metrics"},
    {"kvstore.core"},
    {"kvstore.eviction"},
    {"kvstore.trie", "kvstore.codecs"},
    {"kvstore.tiers"},
    {"kvstore.gate"},
    {"kvstore.residency"},
    {"kvstore.dedup"},
    {"kvstore.read"},
    {"kvstore.write"},
    {"kvstore.approximate"},
    {f"{TRANSFORMERS}.recompute"},
    {"kvstore.calibration"},
    {"kvstore.learning"},
    {"kvstore.session"},
    {"kvstore.open_remote"},
    {"kvstore.open"},
    {"kvstore.reports", "kvstore.stored"},
    {"kvstore.store"},
    {"kvstore.shared"},
    {"kvstore.transfer", "kvstore.aio", "kvstore.exporter", "kvstore.tracing", "kvstore.report", "kvstore.events"},
    {"kvstore.integrations"},
    {"kvstore"},  # the facade: its own names only, for everything else has a layer
    {"kvstore.cli"},
    {"kvstore.__main__"},
]
DATA = (
    "kvstore.errors",
    "kvstore.config",
    "kvstore.log",
    "kvstore.metrics",
    "kvstore.core",
    "kvstore.eviction",
)  # no I/O, no torch
# `arrows_between_folders`: 59 when 13 folders became layers; 12 more of `transfer` and `cli`, which see all, and 9 of
# `learning`; calibration fits what approximate estimates with; `report` reads an
# open store: 5; 7 of `gate`; a warm-up in parts is merged by `transfer`; archives of sequences hold what a codec makes
# of a model's passes, and fit what their predictors miss: 2; `shared` has the calls of a store for other processes, and
# what they return: 8; `events` watches the tiers of an open store: 4. An order of 19 folders allows 171.
MOST_ARROWS = 108
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
    "kvstore.report.page": "reads its style sheet and script, files of the package",
    "kvstore.cli.stores": "reads the token ids and the prompts that the user names",
    "kvstore.cli.warmup": "a folder that goes again, for a dry run without a store",
    "kvstore.codecs.donor.tables": "reads its tables, a file of the package",
    "kvstore.codecs.entropy.tables": "reads its tables, a file of the package",
    "kvstore.codecs.aqua.grids": "reads its grids, a file of the package",
    "kvstore.codecs.profile": "reads and writes the profile that the caller names",
    "kvstore.calibration.calibrate": "reads the model and the text that the user names",
    "kvstore.calibration.dump": "looks into its work folder",
    "kvstore.integrations.chunks.stores": "looks for the folders of its stores",
    "kvstore.integrations.llama_cpp.gguf": "reads the model that the user names",
    "kvstore.integrations.llama_cpp.library": "looks for the library; has llama.cpp write a few bytes into memory",
    "kvstore.integrations.llama_cpp.server": "files of the server, in the folder that the user names",
    "kvstore.calibration.lossy.fit": "has scratch files in the work folder",
    "kvstore.integrations.vllm.checkpoint": "reads the checkpoint that vLLM loaded",
    "kvstore.shared.shipment": "memory without a name",
    "kvstore.shared.owner": "the socket in the folder of the store",
}
NEVER = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FOLDERS = {"kvstore": "kvstore", "trie": "kvstore.trie", "codecs": "kvstore.codecs"}


def _modules() -> dict[str, Path]:
    """Modules and packages by name; an extension module by what is declared of it."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted([*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "kvstore" and parts[0] in ("trie", "codecs"):
                continue  # the symlinks; these files are found in their own folders
            names = [package, *(part for part in parts if part != "__init__")]
            found[".".join(names)] = path
    return found


MODULES = _modules()


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


@cache
def _imports_of(module: str) -> frozenset[tuple[str, bool]]:
    return frozenset(_imports(_tree(module), module))


def _imports(tree: ast.Module, module: str = "") -> Iterator[tuple[str, bool]]:
    """(imported module, whether it is imported as soon as this one is)."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, not inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            base = str(node.module)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in MODULES else base), not inside
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        later = inside or typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        waiting += [(child, later) for child in _parts(node)]


def _parts(node: ast.AST) -> list[ast.AST]:
    """What stands in a node, without expressions: no statement stands in one."""
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def _below(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def _layer(module: str) -> int:
    """Index of its layer; -1 where it has no place."""
    fits = [(len(x), i) for i, layer in enumerate(LAYERS) for x in layer if x != "kvstore" and _below(module, x)]
    return max(fits)[1] if fits else (LAYERS.index({"kvstore"}) if module == "kvstore" else -1)


def _name_in_layer(module: str) -> str:
    return max((x for x in LAYERS[_layer(module)] if _below(module, x)), key=len)


@cache
def _graph() -> dict[str, set[str]]:
    """Modules of this package that each module imports."""
    return {
        name: {imported for imported, _ in _imports_of(name) if imported in MODULES and imported != name}
        for name in MODULES
    }


PACKAGES = {".".join(name.split(".")[:2]) for name in MODULES if name.count(".") > 1}


def _folder(module: str) -> str:
    """The folder in kvstore/ that a module belongs to; kvstore itself for what stands directly in it."""
    first = ".".join(module.split(".")[:2])
    return first if first in PACKAGES else "kvstore"


def arrows_between_folders() -> int:
    """How many ordered pairs of folders there are of which one imports something from the other."""
    pairs = {(_folder(a), _folder(b)) for a, imports in _graph().items() for b in imports}
    return sum(one != other for one, other in pairs)


def test_the_tree_is_found() -> None:
    assert {"kvstore.store", "kvstore.tiers.disk.fs", "kvstore.trie.index", "kvstore.codecs.raw"} <= set(MODULES)
    assert {"kvstore.codecs._native", "kvstore.trie._trie"} <= set(MODULES)


def test_the_layers_of_known_modules() -> None:
    names = ["errors", "core.layout", "core.record", "trie.index", "tiers.host", "read.fetch", "store", "cli"]
    found = [_layer(f"kvstore.{name}") for name in names]
    assert found == sorted(set(found))
    assert _layer("kvstore.integrations.transformers.cache") < _layer("kvstore.core.results")
    assert _layer("kvstore.integrations.transformers.generation") > _layer("kvstore.store")


def test_every_module_has_a_place() -> None:
    lost = [module for module in MODULES if _layer(module) < 0]
    assert not lost, f"{lost}: add their folders to LAYERS, above what they import and below what imports them"


def test_an_import_is_seen_wherever_it_stands() -> None:
    source = "import os\nfrom kvstore.store import A\ndef f():\n    import lmdb\nif TYPE_CHECKING:\n    import torch"
    assert sorted(_imports(ast.parse(source))) == [
        ("kvstore.store", True),
        ("lmdb", False),
        ("os", True),
        ("torch", False),
    ]


@cache
def _place(module: str) -> tuple[int, str]:
    return _layer(module), _name_in_layer(module)


def test_imports_go_down_only() -> None:
    wrong = []
    for module in MODULES:
        mine, name = _place(module)
        for imported in _graph()[module]:
            other, other_name = _place(imported)
            if other > mine:
                wrong.append(f"{module} imports {imported}, which is above it")
            elif other == mine and other_name != name:
                wrong.append(f"{module} imports {imported}: {other_name} does not know {name}")
    assert not wrong


def test_whatever_is_imported_of_this_package_exists() -> None:
    """Otherwise an import could be missing in the graph."""
    imported = {(module, x) for module in MODULES for x, _ in _imports_of(module) if _below(x, "kvstore")}
    assert not [(module, x) for module, x in imported if x not in MODULES]


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(_graph()).prepare()  # its CycleError names the modules


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_there_are_not_more_arrows_between_folders_than_there_were() -> None:
    assert 0 < arrows_between_folders() <= MOST_ARROWS


def _users(package: str, at_once: bool = False) -> set[str]:
    """Modules that import something of a package. at_once: as soon as they are imported themselves."""
    return {m for m in MODULES if any(_below(name, package) and now >= at_once for name, now in _imports_of(m))}


def test_data_modules_do_not_import_torch() -> None:
    data = {module for module in MODULES if any(_below(module, name) for name in DATA)}
    assert len(data) > 30
    assert not data & _users("torch", at_once=True)


def test_lmdb_is_imported_by_its_environment_only() -> None:
    assert _users("lmdb") == {"kvstore.tiers.disk.environment"}


def test_transformers_is_imported_by_its_integration_only() -> None:
    names = ("cache", "generation", "growing_layer", "later", "passes", "positions", "prefill", "shapes", "warming")
    assert _users("transformers", at_once=True) == {f"kvstore.integrations.transformers.{name}" for name in names}


def test_sockets_are_opened_by_few_modules_only() -> None:
    network = ("socket", "ssl", "selectors", "socketserver", "http", "urllib.request", "obstore")
    users = set[str]().union(*(_users(name) for name in network))
    engines = {module for module in users if _below(module, "kvstore.tiers.remote.engines")}
    shared = {f"kvstore.shared.{name}" for name in ("wire", "link", "owner")}  # UNIX sockets, for processes of one user
    # for the name of this machine; requests to the server that the user names
    assert users - engines - shared == {"kvstore.tiers.disk.lock", "kvstore.integrations.llama_cpp.server"}


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


def test_files_are_touched_through_the_file_system_seam_only() -> None:
    assert set(MAY_TOUCH_FILES) <= set(MODULES)
    found = {module: _file_calls(_tree(module)) for module in MODULES if module not in MAY_TOUCH_FILES}
    assert not {module: calls for module, calls in found.items() if calls}


def test_the_file_system_seam_is_where_the_calls_are() -> None:
    assert len(_file_calls(_tree("kvstore.tiers.disk.fs"))) > 5


def _executed(tree: ast.Module) -> list[str]:
    """Calls that run what they are given, or may."""
    return [
        f"{ast.unparse(node.func)} in line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            ast.unparse(node.func) in ("torch.load", "eval", "exec", "__import__")
            or any(word.arg == "allow_pickle" for word in node.keywords)
        )
    ]


def test_calls_that_execute_are_seen() -> None:
    source = "torch.load('a')\neval('1')\nmodel.eval()\nnp.load('a', allow_pickle=True)\nnp.load('a')"
    assert _executed(ast.parse(source)) == ["torch.load in line 1", "eval in line 2", "np.load in line 4"]


def test_nothing_is_unpickled_or_executed() -> None:
    for module in MODULES:
        assert not NEVER & {name.split(".")[0] for name, _ in _imports_of(module)}, module
    assert not {module: calls for module in MODULES if (calls := _executed(_tree(module)))}


@pytest.mark.parametrize("package", ["kvstore.codecs", "kvstore.trie"])
def test_codecs_and_trie_import_without_lmdb_and_transformers(package: str) -> None:
    """As on a machine where they are not installed: None in sys.modules makes an import fail."""
    code = f"import sys\nsys.modules['lmdb'] = sys.modules['transformers'] = None\nimport {package}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=HANGS_S)


# ---- nothing is asked for its class ----------------------------------------------------------------------------------
# What an object can do, it says itself: a new codec or tier changes no module but its own.

HOMES = {
    "kvstore.codecs": "kvstore.codecs",
    "kvstore.tiers": "kvstore.tiers",
    "kvstore.residency.block.Block": "kvstore.tiers",
}
"""Where codecs, tiers and sources are defined, and who may ask for their classes."""


@cache
def _guarded() -> dict[str, set[str]]:
    """Names of the classes of codecs, tiers and sources, with the packages that may ask for them."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for node in _tree(module).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign) and "MemoryTier[" in ast.unparse(node.value):
                names = [ast.unparse(target) for target in node.targets]  # HostTier = MemoryTier[HostRecord]
            for name in names:
                homes = {home for place, home in HOMES.items() if _below(f"{module}.{name}", place)}
                if homes:
                    found.setdefault(name, set()).update(homes)
    return found


def _names(node: ast.AST, module: str) -> set[str]:
    """Guarded classes that an expression mentions, of packages that the module is not part of."""
    if isinstance(node, ast.Call):
        return set()  # it makes one, or asks it something
    word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    own = any(_below(module, home) for home in _guarded().get(word, ()))
    found = {word} if word in _guarded() and not own else set()
    return found.union(*(_names(child, module) for child in ast.iter_child_nodes(node)))


def _class_checks(tree: ast.Module, module: str) -> list[str]:
    """isinstance, issubclass, comparisons with a class or with its number or name, tables by class, class patterns."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        asked: list[ast.AST | None] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = [*node.args[1:]]
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            asked = [*node.keys]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        if any(_names(expression, module) for expression in asked if expression is not None):
            found.append(node)
    return [f"{ast.unparse(node)} in line {getattr(node, 'lineno', '?')}" for node in found]


def test_the_classes_of_codecs_tiers_and_sources_are_known() -> None:
    codecs = ("RawCodec", "SplitZipCodec", "DonorCodec")
    tiers = ("DiskTier", "HostTier", "HostRecord", "Entry", "Block")
    assert all("kvstore.codecs" in _guarded()[name] for name in codecs)
    assert all("kvstore.tiers" in _guarded()[name] for name in tiers)


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(codec, PredictiveCodec)",
        "isinstance(source, Entry | HostRecord)",
        "isinstance(source, (int, catalog.Entry))",
        "issubclass(kind, RawCodec)",
        "type(source) is DeviceBlock",
        "header.codec == DonorCodec.id",
        "number in (SplitZipCodec.id, 2)",
        "{HostRecord: 'host', Block: 'queue'}[type(source)]",
        "match tier:\n    case DiskTier():\n        pass",
    ],
)
def test_a_class_check_is_seen(source: str) -> None:
    assert len(_class_checks(ast.parse(source), "kvstore.read.fetch")) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("isinstance(value, int | float)", "kvstore.read.fetch"),
        ("isinstance(source, Entry)", "kvstore.tiers.disk.tier"),
        ("codec.id == 3", "kvstore.read.fetch"),
        ("HostRecord(header, buffer).payload == b''", "kvstore.read.fetch"),
        ("found: dict[int, Entry] = {}", "kvstore.residency.residency"),
    ],
)
def test_other_questions_are_no_class_checks(source: str, module: str) -> None:
    assert _class_checks(ast.parse(source), module) == []


def test_no_codec_tier_or_source_is_asked_for_its_class() -> None:
    assert not {module: checks for module in MODULES if (checks := _class_checks(_tree(module), module))}


def _python_files() -> list[str]:
    folders = ("kvstore", "codecs", "trie", "tests", "benchmarks", "tools")
    found = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()}
    links = {ROOT / "kvstore" / "codecs", ROOT / "kvstore" / "trie"}
    return sorted(str(path.relative_to(ROOT)) for path in found if not links.intersection(path.parents))


def _long(name: str) -> Iterator[str]:
    """What of a file has too many lines."""
    text = (ROOT / name).read_text()
    if len(text.splitlines()) > 500:
        yield "the file"
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
            yield node.name
        waiting += _parts(node)


def test_files_and_functions_are_small() -> None:
    files = _python_files()
    assert len(files) > 500
    assert not {name: found for name in files if (found := list(_long(name)))}
