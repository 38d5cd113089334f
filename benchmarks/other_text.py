"""Text that is no conversation: what Python and the installed packages bring along. Nothing comes from the network."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LEAST = 4096  # characters of a file or page that is taken


def python_sources(characters: int) -> str:
    """`characters` of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    return _joined((path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))), characters)


def package_pages(characters: int) -> str:
    """`characters` of the pages that installed packages have of themselves, Markdown or reStructuredText, in the order
    of the packages' names."""
    return _joined(_pages(), characters)


def prose(characters: int) -> str:
    """`characters` of the Python language's reference, page after page."""
    from pydoc_data.topics import topics

    return _joined((topics[name] for name in sorted(topics)), characters)


def _pages() -> Iterator[str]:
    found = {str(dist.metadata["Name"]).lower(): dist for dist in importlib.metadata.distributions()}
    for name in sorted(found):
        yield str(found[name].metadata.get_payload())  # type: ignore[attr-defined]


def _joined(texts: Iterable[str], characters: int) -> str:
    parts: list[str] = []
    for text in texts:
        if len(text) >= LEAST:
            parts.append(text)
        if sum(map(len, parts)) >= characters:
            break
    return "\n\n".join(parts)[:characters]


OTHER_TEXTS: dict[str, Callable[[int], str]] = {"python": python_sources, "markdown": package_pages}
