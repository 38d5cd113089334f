"""What the documents point at exists: files, sections, make targets, benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(path.name for path in ROOT.glob("*.md"))


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
        linked = ROOT / (path or name)
        assert linked.exists(), f"{name}: {target} does not exist"
        if anchor:
            assert anchor in _anchors(linked.read_text()), f"{name}: {target} names no heading"


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
        for bench in re.findall(r"python -m benchmarks\.(\w+)", code)
        if not (ROOT / f"benchmarks/{bench}.py").exists()
    }
    assert not missing
