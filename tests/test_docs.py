"""What the documents point at exists: files, sections, make targets, benchmarks, modules. What they and docstrings show
is so."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from kvstore import KVLayout, KVStore, ModelIdentity, errors
from kvstore.codecs import codec_by_name, codec_names
from kvstore.codecs.registry import REGISTRY
from kvstore.integrations.transformers import cache, logprobs, recompute

ROOT = Path(__file__).parents[1]
PACKAGES = {"kvstore": "kvstore", "trie": "kvstore.trie", "codecs": "kvstore.codecs"}
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/results/README.md")
    for path in ROOT.glob(pattern)
)
_spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
assert _spec is not None
assert _spec.loader is not None
pages: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)
ENDINGS = "py|pyi|md|h|cc|json|bin|txt|toml|sh|png"


def _anchors(text: str) -> set[str]:
    """The names that a renderer gives to the headings of a document."""
    headings = re.findall(r"^#+ +(.+?)\s*$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _links(text: str) -> Iterator[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def test_the_documents_are_there() -> None:
    assert {"README.md", "ARCHITECTURE.md", "FORMAT.md", "CHANGELOG.md"} <= set(DOCUMENTS)


def test_links_and_headings_are_found() -> None:
    text = "# A title, twice\n[x](FILE.md#part) [y](https://example.org)\n```\n# no\n[z](no)\n```\n"
    assert list(_links(text)) == ["FILE.md#part"]
    assert _anchors(text) == {"a-title-twice"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name: str) -> None:
    for target in _links((ROOT / name).read_text()):
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), f"{name}: {target} does not exist"
        if anchor:
            assert anchor in _anchors(linked.read_text()), f"{name}: {target} names no heading"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_stay_inside_of_the_site(name: str) -> None:
    for target in _links((ROOT / name).read_text()):
        path = (ROOT / name).parent.joinpath(target.partition("#")[0]).resolve()
        inside = [ROOT / part for part in (*pages.PAGES, *pages.MORE)]
        assert target.startswith("#") or any(path.is_relative_to(part) for part in inside), target


def _paths(text: str) -> set[str]:
    """What is named in backticks as a file or a folder of this project: it has a slash, and an ending that is known or
    a slash at its end."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)))
    return set(re.findall(rf"(?<![\w./:-])\w[\w.-]*(?:/[\w.-]+)+\.(?:{ENDINGS})\b|\b\w+/(?:[\w.-]+/)*(?=\s|$)", quoted))


def test_paths_in_backticks_are_found() -> None:
    text = "`a/b.py` a/no.py `c.py` `python x/y.py --json d/e-f.json`, `k/l/` `[a]/b.py` `http://a/b.md`\n```\n`p/q.py`\n```"
    assert _paths(text) == {"a/b.py", "x/y.py", "d/e-f.json", "k/l/"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_exist(name: str) -> None:
    assert not {path for path in _paths((ROOT / name).read_text()) if not (ROOT / path).exists()}


def test_modules_that_moved_are_where_the_changelog_says() -> None:
    rows = re.findall(r"^\| `kvstore.*?\| (.+) \|$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    named = {module for row in rows for module in re.findall(r"`(kvstore[\w.]+)`", row)}
    assert len(named) > 20
    assert not {module for module in named if importlib.util.find_spec(module) is None}


def test_every_codec_has_a_page() -> None:
    """One codec: one folder or file, one row of the registry, one page, which names its number and its code."""
    registered = {number: delta.name for number, delta in REGISTRY.deltas.items()}
    registered |= {family.id: family.name for family in REGISTRY.families.values()}
    registered |= {number: archive.name for number, archive in REGISTRY.archives.items()}
    registered |= {tuned.id: tuned.name for tuned in REGISTRY.tuned.values()}
    registered |= {codec_by_name(name).id: name for name in codec_names()}
    pages = {path.stem for path in (ROOT / "docs/codecs").glob("[a-z]*.md")}  # not README.md
    assert pages == set(registered.values())
    for number, name in registered.items():
        page = (ROOT / f"docs/codecs/{name}.md").read_text()
        assert f"Codec {number} " in page
        assert any(f"`codecs/{name}{place}" in page for place in ("/", ".py"))
        assert "(../../FORMAT.md#" in page
        assert f"docs/codecs/{name}.md" in (ROOT / "ARCHITECTURE.md").read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    rules = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    commands = [
        code for quoted, block in re.findall(r"`([^`\n]+)`|```(.*?)```", text, flags=re.S) for code in (quoted, block)
    ]
    code = "\n".join(commands)
    missing = {rule for rule in re.findall(r"\bmake ([a-z][\w-]*)", code) if rule not in rules}
    missing |= {
        bench
        for bench in re.findall(r"python -m benchmarks\.([\w.]*\w)", code)
        if not any((ROOT / f"benchmarks/{bench.replace('.', '/')}{end}").exists() for end in (".py", "/__main__.py"))
    }
    assert not missing


def _programs(text: str) -> list[tuple[str, str]]:
    """The Python programs that a document shows, each with the comment right above it, which says what is special."""
    shown = re.findall(r"(?:^<!-- (.*?) -->\n)?^```python\n(.*?)^```", text, flags=re.M | re.S)
    return [(program, note) for note, program in shown]


def test_programs_and_their_notes_are_found() -> None:
    text = "<!-- not run: x -->\n```python\na\n```\n\n```python\nb\n```\n"
    assert _programs(text) == [("a\n", "not run: x"), ("b\n", "")]


def _flush_left(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_programs_of_a_document_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, one after the other, or the note above says what else holds: why it is not run, then only
    the names that it imports are looked up; or which file it is a part of."""
    monkeypatch.chdir(tmp_path)
    for program, note in _programs((ROOT / name).read_text()):
        kind, _, rest = note.partition(" ")
        if kind == "from":
            assert _flush_left(program) in _flush_left((ROOT / rest).read_text())
            continue
        lines = "\n".join(re.findall(r"^(?:from|import) .*", program, flags=re.M)) if note else program
        assert not note or note.startswith("not run: "), f"{name}: {note}"
        compile(program, name, "exec")
        exec(compile(lines, name, "exec"), {"__name__": "__main__"})


def test_the_readme_shows_one_program_and_says_why_it_is_not_run() -> None:
    """It loads a model, which this machine may not have; tests/integrations runs the same calls with small ones."""
    ((program, note),) = _programs((ROOT / "README.md").read_text())
    assert note.startswith("not run: ")
    assert "from_pretrained" in program


def test_the_page_of_calls_names_every_call() -> None:
    text = (ROOT / "docs/calls.md").read_text()
    calls = {name for name, value in vars(kvstore.KVStore).items() if callable(value) and not name.startswith("_")}
    assert not {name for name in calls if not re.search(rf"`(get\(\.\.\.|{name}\()", text)}


def _with_examples() -> Iterator[str]:
    """The modules of the package in whose text an example stands."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            linked = folder == "kvstore" and inner[0] in ("trie", "codecs")  # found in their own folders
            if not linked and ">>> " in path.read_text():
                yield ".".join([package, *(part for part in inner if part != "__init__")])


def _run(example: doctest.DocTest) -> str:
    """What went wrong; nothing, if all is as it stands there."""
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    return "".join(told)


def test_a_wrong_example_is_told() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "sum", None, 0)
    assert "Expected:" in _run(example)


def test_examples_are_found() -> None:
    assert {"kvstore.store", "kvstore.config", "kvstore.integrations.transformers.cache"} <= set(_with_examples())


@pytest.mark.parametrize("name", list(_with_examples()))
def test_the_examples_of_a_module_are_so(name: str, tmp_path: Path) -> None:
    found = [example for example in doctest.DocTestFinder().find(import_module(name)) if example.examples]
    assert found, f"{name}: an example stands where no docstring is"
    for number, example in enumerate(found):
        with _described(example.name, tmp_path / str(number)) as names:
            example.globs.update(names)
            assert not _run(example)


@contextlib.contextmanager
def _described(example: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What the examples of the methods of a class take as given, as its docstring says."""
    stores = ("kvstore.store.KVStore.", "kvstore.reports.StoreReports.")
    if not example.startswith((*stores, "kvstore.session.Session.")):
        yield {}
        return
    identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
    kv = [(torch.zeros(2, 3, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16())]
    with KVStore(folder, identity) as store:
        if example.startswith(stores):
            store.put([11, 12, 13], kv)
            yield {"store": store, "kv": kv}
        else:
            session = store.session("alice")
            session.save([11, 12, 13], kv)
            yield {"session": session, "kv": kv}


@pytest.mark.parametrize(
    "described",
    [
        *(getattr(kvstore, name) for name in kvstore.__all__ if not hasattr(errors, name)),
        cache.GrowingLayer,
        logprobs.Scores,
        recompute.Deviation,
        recompute.Recomputed,
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_public_class_shows_an_example(described: type) -> None:
    assert doctest.DocTestParser().get_examples(described.__doc__ or "")
