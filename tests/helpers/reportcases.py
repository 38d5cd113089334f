"""Tables of made-up blocks, and a reader of HTML that knows what is open and what a page would fetch."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np

from kvstore.core.keys import NamespaceDigest
from kvstore.residency.block_table import ROW, BlockTable

_VOID = {"meta", "link", "br", "hr", "img", "input"}
_FETCHED = {"src", "href", "srcset", "data", "action", "poster", "background"}


def table_of(count: int, seed: int, per_sequence: int = 100) -> BlockTable:
    """`count` blocks of four tokens: each sequence of blocks goes on from some block of an older one."""
    draw, rows = np.random.default_rng(seed), np.zeros(count, ROW)
    rows["record"] = np.arange(1, count + 1)
    rows["count"], rows["bytes"], rows["bits"] = 4, 4096, 40
    starts = np.zeros(count, np.int64)
    for first in range(0, count, per_sequence):
        behind = int(draw.integers(first)) if first and draw.random() < 0.9 else -1
        for i in range(first, min(count, first + per_sequence)):
            starts[i] = 0 if behind < 0 else starts[behind] + 4
            rows["parent"][i], behind = behind + 1, i
    rows["start"], rows["uses"] = starts, draw.integers(1, 50, count)
    return BlockTable(rows, draw.integers(0, 1 << 20, 4 * count).astype(np.uint32), (NamespaceDigest(bytes(32)),))


class Page(HTMLParser):
    """What a page says.

    Attributes:
        fetched: values of attributes by which a page fetches something.
        problems: tags that are closed and not open, or open at the end.
        text: all text outside of scripts and styles.
        ids: of elements.
        headings: levels, in order.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.problems: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        self.problems += [f"{tag} is open at the end" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in _FETCHED]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag[0] == "h" and tag[1:].isdigit():
            self.headings.append(int(tag[1:]))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.problems.append(f"</{tag}> behind {self._open[-3:]} in line {self.getpos()[0]}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text += data
